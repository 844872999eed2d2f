"""The wire of the draft servers: what is sent arrives, and nothing else does."""

from contextlib import suppress

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from seer_grouped_spec import wire
from seer_grouped_spec.server import DraftServer
from seer_grouped_spec.wire import (
    Append,
    Codec,
    Done,
    Failure,
    Fetch,
    Fetched,
    FromServer,
    Refusal,
    Register,
    Stats,
    StatsAsked,
    ToServer,
    Unregister,
    Update,
    Updated,
    WireError,
)

ME = b"0123456789abcdef"
APPENDS = [("g", [Append("r", 3, b"\x01\0\0\0\x02\0\0\0"), Append("s", 0, b"")]), ("h", [])]
TO_SERVER = [
    Register(1, ME, [("g", 60.0), ("h", 0.5)]),
    Unregister(2, ME, ["g"]),
    Update(3, ME, APPENDS),
    Fetch(4, ME, {"g": {"r": 5}, "h": {}}),
    Fetch(5, ME, {}),
    StatsAsked(6),
]
FROM_SERVER = [
    Done(1, ["h"]),
    Updated(3, [Refusal("g", "r", "gap", 2)]),
    Fetched(4, APPENDS, ["h"], True),
    Stats(6, {"groups": 2.0}),
    Failure(0, "message", "no"),
]


@pytest.mark.parametrize(("kind", "messages"), [(ToServer, TO_SERVER), (FromServer, FROM_SERVER)])
@pytest.mark.parametrize("key", [b"", b"secret", b"k" * wire.MAX_KEY_BYTES])
def test_every_message_survives_the_wire(kind, messages, key):
    codec = Codec(kind, key)
    assert [codec.decode(codec.encode(message, key)) for message in messages] == messages


@pytest.mark.parametrize(
    ("spoil", "kind"),
    [
        (lambda frame: b"", "message"),
        (lambda frame: b"XYZ" + frame[3:], "message"),
        (lambda frame: frame[:5], "message"),
        (lambda frame: frame[:-1], "message"),
        (lambda frame: frame + b"x", "message"),
        (lambda frame: frame[:3] + b"\0\x07" + frame[5:], "version"),
        (lambda frame: frame[:5] + b"\xff" + frame[6:], "key"),
        (lambda frame: frame.replace(b"secret", b"secreT"), "key"),
        (lambda frame: frame[:5] + b"\0" + frame[12:], "key"),
        (lambda frame: frame + b"\0" * wire.MAX_MESSAGE_BYTES, "message"),
    ],
)
def test_a_spoilt_frame_is_refused_for_what_is_wrong_with_it(spoil, kind):
    frame = Codec.encode(TO_SERVER[2], b"secret")
    with pytest.raises(WireError) as caught:
        Codec(ToServer, b"secret").decode(spoil(frame))
    assert caught.value.kind == kind


@pytest.mark.parametrize(
    "body",
    [
        [3, 1, ME, [["g", [["r", -1, b""]]]]],
        [3, 1, ME, [["g", [["", 0, b""]]]]],
        [3, 1, ME, [["g" * 513, []]]],
        [3, 1, ME[:15], []],
        [3, 1, ME, [["g", [["r", 0, b"\0" * (4 * wire.MAX_APPEND_TOKENS + 4)]]]]],
        [3, 1, ME, [["g", [["r", 0, b""]] * (wire.MAX_APPENDS + 1)]]],
        [3, 1, ME, [["g", []]] * (wire.MAX_GROUPS + 1)],
        [3, 1, ME, [["g", [["r", 0, "text"]]]]],
        [1, 1, ME, [["g", -5.0]]],
        [1, 1, ME, [["g", float("nan")]]],
        [4, 1, ME, {"g": {str(i): 0 for i in range(wire.MAX_REQUESTS + 1)}}],
        [9, 1, ME],
        {"type": 3},
        7,
    ],
)
def test_a_field_beyond_its_limits_is_refused(body):
    head = Codec.encode(StatsAsked(1))[: wire.HEADER_BYTES]
    with pytest.raises(WireError) as caught:
        Codec(ToServer).decode(head + msgspec.msgpack.encode(body))
    assert caught.value.kind == "message"


def test_a_key_that_does_not_fit_is_an_error_at_once():
    with pytest.raises(ValueError, match="a key of 256 bytes exceeds 255"):
        Codec(ToServer, b"k" * 256)


@given(st.binary(max_size=200), st.booleans())
def test_random_bytes_are_refused_or_read_but_never_break_the_server(noise, with_head):
    head = Codec.encode(StatsAsked(1))[: wire.HEADER_BYTES] if with_head else b""
    answer = DraftServer(1 << 20).answer([head + noise], 0.0)
    assert isinstance(Codec(FromServer).decode(answer), Done | Updated | Fetched | Stats | Failure)


@given(
    st.sampled_from(TO_SERVER),
    st.lists(st.tuples(st.integers(0, 200), st.integers(0, 255)), min_size=1, max_size=4),
    st.integers(0, 3),
)
def test_mutated_messages_never_break_the_server_nor_a_client(message, changes, cut):
    frame = bytearray(Codec.encode(message))
    for place, value in changes:
        frame[place % len(frame)] = value
    server = DraftServer(1 << 20)
    server.answer([Codec.encode(TO_SERVER[0])], 0.0)
    answer = Codec(FromServer).decode(server.answer([bytes(frame[: len(frame) - cut])], 0.0))
    assert not (isinstance(answer, Failure) and answer.kind == "internal")


@given(st.sampled_from(FROM_SERVER), st.integers(0, 200), st.integers(0, 255))
def test_a_mutated_answer_is_read_or_refused(message, place, value):
    frame = bytearray(Codec.encode(message))
    frame[place % len(frame)] = value
    with suppress(WireError):
        Codec(FromServer).decode(bytes(frame))


def test_groups_go_to_the_same_server_everywhere_and_to_all_of_them():
    assert [wire.server_of(name, 3) for name in ("a", "b", "group-7")] == [0, 2, 2]
    assert {wire.server_of(f"group-{number}", 3) for number in range(50)} == {0, 1, 2}
