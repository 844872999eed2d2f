"""The logs of a draft server: nothing that nobody wrote, nothing twice, and no more bytes than allowed."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from seer_grouped_spec import log
from seer_grouped_spec.log import TokenLogs

A, B, C = 1, 2, 3


def data(*tokens):
    return np.asarray(tokens, "<i4").tobytes()


def tokens(append):
    return np.frombuffer(append.new_tokens, "<i4").tolist()


def fetch_all(logs, client, infos=None, now=0.0):
    """Fetch until there is no more; return the news as (group, request, prev, tokens)."""
    news, more = [], True
    for group, info in (infos or {}).items():
        logs.restate(client, group, info)
    while more:
        found, _, more = logs.fetch_cst(client, now)
        news += [
            (group, one.request_id, one.prev_token_count, tokens(one))
            for group, ones in found
            for one in ones
        ]
    return news


@pytest.fixture
def logs():
    """Logs with a group ``g`` that A and B share."""
    logs = TokenLogs(1 << 20)
    for client in (A, B):
        assert logs.register_group(client, "g", 60.0, 0.0)
    return logs


def test_others_get_what_one_wrote_once_and_the_writer_never(logs):
    assert logs.update_cst(A, "g", "r", 0, data(1, 2, 3), 0.0) is None
    assert fetch_all(logs, A) == []
    assert fetch_all(logs, B) == [("g", "r", 0, [1, 2, 3])]
    assert fetch_all(logs, B) == []
    assert logs.update_cst(A, "g", "r", 3, data(4), 0.0) is None
    assert fetch_all(logs, B) == [("g", "r", 3, [4])]


def test_an_overlap_that_agrees_is_skipped(logs):
    logs.update_cst(A, "g", "r", 0, data(1, 2, 3), 0.0)
    assert logs.update_cst(B, "g", "r", 1, data(2, 3, 4), 0.0) is None
    assert logs.update_cst(B, "g", "r", 0, data(1, 2), 0.0) is None
    assert fetch_all(logs, A) == [("g", "r", 3, [4])]
    assert fetch_all(logs, B) == []
    assert logs.stats()["tokens_repeated"] == 4


def test_a_disagreement_is_refused_and_the_log_stays(logs):
    logs.update_cst(A, "g", "r", 0, data(1, 2, 3), 0.0)
    refusal = logs.update_cst(B, "g", "r", 1, data(2, 9, 4), 0.0)
    assert (refusal.kind, refusal.have) == ("disagreement", 3)
    assert fetch_all(logs, B) == [("g", "r", 0, [1, 2, 3])]
    assert logs.stats()["disagreements"] == 1


def test_a_gap_is_refused_with_what_is_there(logs):
    logs.update_cst(A, "g", "r", 0, data(1, 2), 0.0)
    assert logs.update_cst(A, "g", "r", 5, data(6), 0.0).have == 2
    assert logs.update_cst(A, "g", "r", 3, b"", 0.0).kind == "gap"
    assert logs.update_cst(A, "g", "new", 1, b"", 0.0).have == 0
    assert logs.update_cst(A, "g", "new", 0, b"", 0.0) is None


@pytest.mark.parametrize("bad", [b"\1\2\3", data(1, -1, 2), data(-(2**31))])
def test_bytes_that_are_no_tokens_are_refused(logs, bad):
    assert logs.update_cst(A, "g", "r", 0, bad, 0.0).kind == "bad_tokens"
    assert fetch_all(logs, B) == []


def test_a_question_tells_that_the_client_has_the_text(logs):
    logs.update_cst(A, "g", "r", 0, data(1, 2, 3), 0.0)
    assert logs.update_cst(B, "g", "r", 2, b"", 0.0) is None
    assert fetch_all(logs, B) == [("g", "r", 2, [3])]


def test_a_strange_group_or_client_is_refused(logs):
    assert logs.update_cst(A, "h", "r", 0, data(1), 0.0).kind == "unknown_group"
    assert logs.update_cst(C, "g", "r", 0, data(1), 0.0).kind == "unknown_group"
    assert logs.fetch_cst(C, 0.0) == ([], [], False)


def test_a_restated_cache_is_believed(logs):
    logs.update_cst(A, "g", "r", 0, data(1, 2, 3), 0.0)
    logs.update_cst(A, "g", "s", 0, data(7), 0.0)
    fetch_all(logs, B)
    assert fetch_all(logs, B, {"g": {"r": 1, "never": 5}, "other": {"x": 1}}) == [
        ("g", "r", 1, [2, 3]),
        ("g", "s", 0, [7]),
    ]


def test_a_big_group_comes_in_slices_and_others_get_their_turn(logs):
    logs.reply_bytes = 64 << 10
    logs.register_group(A, "h", 60.0, 0.0)
    logs.register_group(B, "h", 60.0, 0.0)
    long = np.arange(100_000, dtype="<i4")
    logs.update_cst(A, "g", "r", 0, long.tobytes(), 0.0)
    logs.update_cst(A, "h", "s", 0, data(5), 0.0)
    first, _, more = logs.fetch_cst(B, 0.0)
    assert more
    assert sum(len(one.new_tokens) for _, ones in first for one in ones) <= 64 << 10
    second, _, _ = logs.fetch_cst(B, 0.0)
    assert second[0][0] == "h"
    rest = [entry for entry in fetch_all(logs, B) if entry[0] == "g"]
    text = [t for _, ones in first for one in ones for t in tokens(one)]
    text += [t for group, ones in second if group == "g" for one in ones for t in tokens(one)]
    assert text + [t for *_, part in rest for t in part] == long.tolist()


def test_a_group_of_many_requests_comes_whole(logs):
    logs.memory_bytes = 4 << 20
    for number in range(3000):
        logs.update_cst(A, "g", f"r{number}", 0, data(number), 0.0)
    assert len(fetch_all(logs, B)) == 3000


def test_the_last_one_out_drops_the_group(logs):
    logs.update_cst(A, "g", "r", 0, data(1, 2, 3), 0.0)
    logs.unregister_group(A, "g")
    logs.unregister_group(A, "g")
    assert logs.stats()["groups"] == 1
    logs.unregister_group(B, "g")
    figures = logs.stats()
    assert (figures["groups"], figures["clients"], figures["held_bytes"]) == (0, 0, 0)
    assert figures["groups_finished"] == 1


def test_a_group_unused_for_its_ttl_expires_and_its_clients_hear_of_it(logs):
    fetch_all(logs, B, now=20.0)
    logs.update_cst(A, "g", "r", 0, data(1), 30.0)
    logs.expire(70.0)
    assert logs.fetch_cst(B, 70.0) == ([], ["g"], False)  # its own time had passed
    logs.expire(89.0)
    assert logs.stats()["groups"] == 1
    logs.expire(90.0)
    assert logs.stats()["groups_expired"] == 1
    assert logs.fetch_cst(A, 90.0) == ([], ["g"], False)
    assert logs.stats()["held_bytes"] == 0
    assert logs.update_cst(A, "g", "r", 1, data(2), 91.0).kind == "unknown_group"


def test_what_is_read_keeps_a_group_alive_for_the_reader(logs):
    logs.update_cst(A, "g", "r", 0, data(1), 50.0)
    fetch_all(logs, B, now=55.0)
    logs.expire(109.0)
    assert fetch_all(logs, B, now=109.0) == []
    assert logs.stats()["clients"] == 2


def test_a_client_that_leaves_takes_part_in_nothing_and_the_last_one_s_groups_go_with_it(logs):
    logs.register_group(A, "h", 60.0, 0.0)
    logs.update_cst(A, "h", "r", 0, data(1, 2, 3), 0.0)
    logs.update_cst(A, "g", "r", 0, data(1, 2, 3), 0.0)
    logs.leave(A)
    assert (logs.has_part(A), logs.has_part(B), logs.stats()["groups"]) == (False, True, 1)
    assert fetch_all(logs, B) == [("g", "r", 0, [1, 2, 3])]
    logs.leave(B)
    logs.leave(C)
    figures = logs.stats()
    assert (figures["groups"], figures["clients"], figures["held_bytes"]) == (0, 0, 0)


def test_a_client_that_never_hears_what_it_lost_is_counted_until_it_leaves(logs):
    logs.expire(1000.0)
    assert logs.stats()["held_bytes"] == 2 * log.BYTES_PER_LEASE
    logs.leave(A)
    assert logs.fetch_cst(B, 1000.0) == ([], ["g"], False)
    assert (logs.stats()["held_bytes"], logs.stats()["clients"]) == (0, 0)


def test_beyond_its_memory_the_least_recently_written_group_goes_first():
    logs = TokenLogs(38_000)
    for name in "xyz":
        logs.register_group(A, name, 60.0, 0.0)
    for name in "xyz":
        assert logs.update_cst(A, name, "r", 0, bytes(8000), 0.0) is None
    assert logs.update_cst(A, "x", "s", 0, bytes(4000), 0.0) is None
    assert logs.update_cst(A, "y", "r", 2000, data(1), 0.0).kind == "evicted"
    assert logs.update_cst(A, "x", "s", 1000, data(1), 0.0) is None
    figures = logs.stats()
    assert figures["groups_evicted"] == 1
    assert figures["held_bytes"] <= 38_000
    assert logs.update_cst(A, "z", "r", 2000, bytes(40_000), 0.0).kind == "evicted"
    assert logs.stats()["held_bytes"] <= 38_000


def test_groups_without_end_are_refused():
    logs = TokenLogs(100 * (log.BYTES_PER_GROUP + log.BYTES_PER_LEASE + 3))
    taken = [logs.register_group(A, f"g{number:02}", 60.0, 0.0) for number in range(150)]
    assert taken == [True] * 100 + [False] * 50
    assert logs.stats()["groups_refused"] == 50


def test_an_id_too_long_in_bytes_is_refused(logs):
    assert not logs.register_group(A, "ü" * 300, 60.0, 0.0)
    assert logs.update_cst(A, "g", "ü" * 300, 0, data(1), 0.0).kind == "too_many"


WRITE = st.tuples(
    st.just("write"),
    st.sampled_from([A, B]),
    st.sampled_from("gh"),
    st.sampled_from("rs"),
    st.integers(0, 12),
    st.integers(0, 6),
    st.booleans(),
)
FETCH = st.tuples(st.just("fetch"), st.sampled_from([A, B]), st.booleans())


@given(st.lists(WRITE | FETCH, max_size=60))
def test_every_client_ends_with_the_log_whatever_the_order(steps):
    """The truth of request r is 0, 1, 2, ...; a lie is refused; nobody gets what nobody wrote."""
    logs, written, copies = TokenLogs(1 << 20), {}, {A: {}, B: {}}
    for client in (A, B):
        for group in "gh":
            logs.register_group(client, group, 60.0, 0.0)

    def fetch(client, restate):
        mine = copies[client]
        infos = {g: {r: n for (group, r), n in mine.items() if group == g} for g in "gh"} if restate else {}
        for group, request, prev, news in fetch_all(logs, client, infos):
            assert news == list(range(prev, prev + len(news)))
            assert prev <= mine.get((group, request), 0)
            mine[group, request] = max(mine.get((group, request), 0), prev + len(news))

    for kind, client, *more in steps:
        if kind == "fetch":
            fetch(client, *more)
            continue
        group, request, prev, count, lie = more
        have = written.get((group, request), 0)
        text = [9999] * count if lie else range(prev, prev + count)
        refusal = logs.update_cst(client, group, request, prev, data(*text), 0.0)
        if prev > have:
            assert refusal.kind == "gap"
        elif lie and count and prev < have:
            assert refusal.kind == "disagreement"
        elif not (lie and count):
            assert refusal is None
            written[group, request] = max(have, prev + count)
            copies[client][group, request] = max(copies[client].get((group, request), 0), prev + count)
        else:
            return  # the lie came first, and is now the truth
    for client in (A, B):
        fetch(client, True)
        assert {key: n for key, n in copies[client].items() if n} == {
            key: n for key, n in written.items() if n
        }
