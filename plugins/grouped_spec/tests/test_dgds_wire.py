"""The wire of the draft servers: what is sent arrives, and nothing else does."""

from contextlib import suppress

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from seer_grouped_spec import wire
from seer_grouped_spec.handshake import PROTOCOL_VERSION, Handshake, Unwelcome
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
    read_appends,
    read_info,
)

ME = 1
APPENDS = [("g", [Append("r", 3, b"\x01\0\0\0\x02\0\0\0"), Append("s", 0, b"")]), ("h", [])]
TO_SERVER = [
    Register(1, [("g", 60.0), ("h", 0.5)]),
    Unregister(2, ["g"]),
    Update.of(3, APPENDS),
    Fetch.of(4, {"g": {"r": 5}, "h": {}}),
    Fetch.of(5, {}),
    StatsAsked(6),
]
FROM_SERVER = [
    Done(1, ["h"]),
    Updated(3, [Refusal("g", "r", "gap", 2)]),
    Fetched(4, APPENDS, ["h"], True),
    Stats(6, {"groups": 2.0}),
    Failure(0, "message", "no"),
]


def read(codec, frame):
    """Return the message in a frame, with all that is read only when it is looked at."""
    message = codec.decode(frame[wire.HEADER_BYTES :])
    if isinstance(message, Update):
        return Update.of(message.seq, [(group, read_appends(raw)) for group, raw in message.groups])
    if isinstance(message, Fetch):
        infos = message.draft_cache_infos.items()
        return Fetch.of(message.seq, {group: read_info(raw) for group, raw in infos})
    return message


@pytest.mark.parametrize(("kind", "messages"), [(ToServer, TO_SERVER), (FromServer, FROM_SERVER)])
def test_every_message_survives_the_wire(kind, messages):
    codec = Codec(kind)
    assert [read(codec, codec.encode(message)) for message in messages] == messages


@given(st.lists(st.binary(max_size=50), max_size=10), st.data())
def test_frames_are_cut_out_of_what_arrives_however_it_arrives(bodies, data):
    stream = b"".join(len(body).to_bytes(4, "big") + body for body in bodies)
    frames, found = wire.Frames(), []
    while stream:
        size = data.draw(st.integers(1, len(stream)))
        frames.add(stream[:size])
        stream = stream[size:]
        while (body := frames.next()) is not None:
            found.append(body)
    assert (found, len(frames)) == (bodies, 0)


def test_a_frame_beyond_any_message_is_refused_by_its_head_and_none_is_made():
    frames = wire.Frames()
    frames.add((wire.MAX_MESSAGE_BYTES + 1).to_bytes(4, "big"))
    with pytest.raises(WireError, match="a message of 2097153 bytes exceeds 2097152"):
        frames.next()
    with pytest.raises(WireError, match="exceeds 2097152"):
        Codec.encode(Failure(0, "message", "x" * wire.MAX_MESSAGE_BYTES))


@pytest.mark.parametrize(
    "body",
    [
        [3, 1, [["g", [["r", -1, b""]]]]],
        [3, 1, [["g", [["", 0, b""]]]]],
        [3, 1, [["g" * 513, []]]],
        [3, 1, {}],
        [3, 1, [["g", [["r", 0, b"\0" * (4 * wire.MAX_APPEND_TOKENS + 4)]]]]],
        [3, 1, [["g", [["r", 0, b""]] * (wire.MAX_APPENDS + 1)]]],
        [3, 1, [["g", []]] * (wire.MAX_GROUPS + 1)],
        [3, 1, [["g", [["r", 0, "text"]]]]],
        [1, 1, [["g", -5.0]]],
        [1, 1, [["g", float("nan")]]],
        [4, 1, {"g": {str(i): 0 for i in range(wire.MAX_REQUESTS + 1)}}],
        [9, 1],
        {"type": 3},
        7,
    ],
)
def test_a_field_beyond_its_limits_is_refused(body):
    with pytest.raises(WireError, match="not a message"):
        read(Codec(ToServer), bytes(wire.HEADER_BYTES) + msgspec.msgpack.encode(body))


def test_appends_without_end_are_refused_over_all_groups_too():
    groups = [(f"g{group}", [Append("r", 0, b"")] * 1000) for group in range(5)]
    answer = Codec(FromServer).decode(ask(DraftServer(1 << 20), Update.of(1, groups)))
    assert answer == Failure(0, "message", "an update of more than 4096 appends")


def meet(server_token, client_token):
    """Let a server and a client meet; return what each makes of the other."""
    server, client = Handshake(server_token), Handshake(client_token)
    welcome = server.welcome(client.hello(server.greeting()))
    client.welcomed(welcome)


@pytest.mark.parametrize("token", [b"", b"secret", b"k" * 255])
def test_who_knows_the_token_is_welcome(token):
    meet(token, token)


@pytest.mark.parametrize("tokens", [(b"secret", b"secreT"), (b"secret", b""), (b"", b"secret")])
def test_who_does_not_know_the_token_is_not(tokens):
    with pytest.raises(Unwelcome, match="the token is wrong or missing"):
        meet(*tokens)


def test_a_server_that_does_not_know_the_token_is_found_out():
    client = Handshake(b"secret")
    client.hello(Handshake(b"").greeting())
    with pytest.raises(Unwelcome, match="it does not know the token itself"):
        client.welcomed(b"\1" + bytes(32))
    with pytest.raises(Unwelcome, match="the token is wrong or missing"):
        client.welcomed(Handshake.refusal())


def test_what_was_said_in_one_meeting_is_worth_nothing_in_another():
    server, client = Handshake(b"secret"), Handshake(b"secret")
    hello = client.hello(server.greeting())
    server.welcome(hello)
    with pytest.raises(Unwelcome):
        Handshake(b"secret").welcome(hello)


def test_another_protocol_or_version_is_named():
    greeting = Handshake(b"").greeting()
    with pytest.raises(Unwelcome, match="it speaks another protocol"):
        Handshake(b"").hello(b"HTTP/1.1 400 Bad Request" + bytes(30))
    with pytest.raises(Unwelcome, match=f"protocol version 9; this side speaks {PROTOCOL_VERSION}"):
        Handshake(b"").hello(greeting[:3] + b"\0\x09" + greeting[5:])


def ask(server, message):
    """Return the body of a server's answer to a message."""
    return server.answer(ME, Codec.encode(message)[wire.HEADER_BYTES :], 0.0)[wire.HEADER_BYTES :]


@given(st.binary(max_size=200))
def test_random_bytes_are_refused_or_read_but_never_break_the_server(noise):
    answer = DraftServer(1 << 20).answer(ME, noise, 0.0)[wire.HEADER_BYTES :]
    assert isinstance(Codec(FromServer).decode(answer), Done | Updated | Fetched | Stats | Failure)


@given(
    st.sampled_from(TO_SERVER),
    st.lists(st.tuples(st.integers(0, 200), st.integers(0, 255)), min_size=1, max_size=4),
    st.integers(0, 3),
)
def test_mutated_messages_never_break_the_server_nor_a_client(message, changes, cut):
    body = bytearray(Codec.encode(message)[wire.HEADER_BYTES :])
    for place, value in changes:
        body[place % len(body)] = value
    server = DraftServer(1 << 20)
    ask(server, TO_SERVER[0])
    answer = server.answer(ME, bytes(body[: len(body) - cut]), 0.0)[wire.HEADER_BYTES :]
    answer = Codec(FromServer).decode(answer)
    assert not (isinstance(answer, Failure) and answer.kind == "internal")


@given(st.sampled_from(FROM_SERVER), st.integers(0, 200), st.integers(0, 255))
def test_a_mutated_answer_is_read_or_refused(message, place, value):
    body = bytearray(Codec.encode(message)[wire.HEADER_BYTES :])
    body[place % len(body)] = value
    with suppress(WireError):
        Codec(FromServer).decode(bytes(body))


def test_groups_go_to_the_same_server_everywhere_and_to_all_of_them():
    assert [wire.server_of(name, 3) for name in ("a", "b", "group-7")] == [0, 2, 2]
    assert {wire.server_of(f"group-{number}", 3) for number in range(50)} == {0, 1, 2}
