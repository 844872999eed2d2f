"""Through the client: the library's tokens, errors, and nothing left of a client that has gone."""

import asyncio
import pickle
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, contextmanager

import httpx
import pytest
from seer_client import AsyncClient, Client, ClientError, Completion
from seer_client.protocol import plain
from seer_host.ports import reserved_port
from seer_session.runtime import Runtime

from seer_core.errors import EngineError
from tests.support.eventually import PATIENCE_S, eventually

RECORDS = [
    {"prompt": "how far", "n": 3, "group_id": "a", "metadata": {"row": 1}},
    {"prompt_token_ids": [5, 6], "n": 2, "group_id": "b", "seed": 11, "temperature": 0.7},
]

RECORD = {"group_id": "g", "prompt_token_ids": [5], "n": 2, "max_tokens": 4}


def in_its_thread(served, call):
    """Call where the server's event loop runs, as an engine does."""
    done = threading.Event()
    loop = served.server.servers[0].get_loop()
    loop.call_soon_threadsafe(lambda: (call(), done.set()))
    assert done.wait(PATIENCE_S)


def tokens(completions):
    return {each.request_id: (list(each.token_ids), list(each.logprobs)) for each in completions}


@pytest.fixture(scope="session")
def expected(config):
    """The library's completions for ``RECORDS`` in iteration 4."""

    async def run():
        async with Runtime.from_config(config) as runtime:
            return await runtime.rollout(runtime.groups(RECORDS, iteration=4)).wait()

    return asyncio.run(asyncio.wait_for(run(), PATIENCE_S)).completions


# The same tokens.


def test_a_batch_is_the_library_s_also_from_a_server_that_was_started_again(serve, connect, expected):
    for _ in range(2):
        with serve() as served:
            found = list(connect(served).rollout(RECORDS, iteration=4))
            assert tokens(found) == tokens(expected)
    texts = {each.request_id: (each.text, each.finish_reason, each.seed) for each in expected}
    assert {each.request_id: (each.text, each.finish_reason, each.seed) for each in found} == texts
    assert {each.metadata.get("row") for each in found if each.group_id == "a"} == {1}
    assert {type(each) for each in found} == {Completion}


def test_rows_of_reserved_groups_are_the_library_s(serve, connect, expected):
    reserved = [{"group_id": "a", "n": 3}, {"group_id": "b", "n": 2, "seed": 11}]
    first = {"a": {"prompt": "how far"}, "b": {"prompt_token_ids": [5, 6], "temperature": 0.7}}
    with serve() as served, ThreadPoolExecutor(5) as pool:
        client = connect(served)
        with client.reserve(reserved, iteration=4):
            assert client.state().reserved == 5
            rows = [
                pool.submit(client.rollout_row, each.group_id, each.index, **first[each.group_id])
                for each in expected
            ]
            found = [row.result(PATIENCE_S) for row in rows]
        eventually(lambda: client.state().reserved == 0)
    assert tokens(found) == tokens(expected)


def test_the_asyncio_form_does_the_same(serve, expected):
    async def run(url):
        async with AsyncClient(url) as client:
            batch = [each async for each in client.rollout(RECORDS, iteration=4)]
            async with client.reserve(RECORDS, iteration=4):
                rows = await asyncio.gather(
                    *(client.rollout_row(each.group_id, each.index) for each in expected)
                )
            state = await client.state()
            async with aclosing(client.rollout([{"prompt": "a", "n": 50}])) as some:
                await anext(some)
            return batch, rows, state

    with serve() as served:
        batch, rows, state = asyncio.run(asyncio.wait_for(run(served.url), PATIENCE_S))
    assert tokens(batch) == tokens(rows) == tokens(expected)
    assert (state.weight_version, state.asleep, state.unfinished) == (0, False, 0)


def test_groups_wait_for_the_others_prompts_and_not_for_ever(serve_by_hand, playing, connect):
    engine = playing.Hand()
    reserved = [{"group_id": name, "n": 1, "max_tokens": 4} for name in "abc"]
    with serve_by_hand(engine) as served, ThreadPoolExecutor(3) as pool:
        client = connect(served)
        with client.reserve(reserved, prompt_wait_s=600):
            rows = [pool.submit(client.rollout_row, name, 0, prompt_token_ids=[5]) for name in "ab"]
            client.state()
            assert engine.jobs == {}
            rows.append(pool.submit(client.rollout_row, "c", 0, prompt_token_ids=[5]))
            eventually(lambda: len(engine.jobs) == 3)
            for _ in range(3):
                in_its_thread(served, engine.finish)
            assert [row.result(PATIENCE_S).group_id for row in rows] == list("abc")
        eventually(lambda: client.state().reserved == 0)
        with client.reserve(reserved, prompt_wait_s=0.01):
            row = pool.submit(client.rollout_row, "a", 0, prompt_token_ids=[5])
            eventually(lambda: len(engine.jobs) == 1)
            in_its_thread(served, engine.finish)
            assert row.result(PATIENCE_S).finish_reason == "stop"


# What is refused.


@pytest.mark.parametrize("records", ["x", {"prompt": "x"}, [3], None])
def test_records_are_objects(records):
    with pytest.raises(
        ClientError, match=r"is no record; give a list of objects, such as \[{'prompt': 'x'}\]"
    ):
        plain(records)


def test_an_address_is_a_url_with_or_without_what_openais_client_needs(serve, connect):
    with pytest.raises(ClientError, match="'localhost:8000'; write one like http://"):
        Client("localhost:8000")
    with serve() as served:
        assert connect(f"{served.url}/v1/").state() == connect(served).state()


@pytest.mark.parametrize(
    ("ask", "status", "words"),
    [
        (lambda client: list(client.rollout([])), 400, "length >= 1"),
        (lambda client: list(client.rollout([{**RECORD, "x": 1}])), 400, "unknown field"),
        (lambda client: list(client.rollout([{**RECORD, "prompt_token_ids": [10**6]}])), 400, "vocabulary"),
        (lambda client: list(client.rollout([RECORD, RECORD])), 400, "occurs twice"),
        (lambda client: list(client.rollout([{**RECORD, "n": 50_000}])), 400, "at a time"),
        (lambda client: list(client.rollout(RECORDS, weight_version=3)), 409, "weight version 3"),
        (lambda client: client.rollout_row("absent", 0, prompt="a"), 404, "no reserved group"),
        (lambda client: client.update_weights("/nowhere"), 400, "no instance could load"),
        (lambda client: client.send_weights([]), 400, "no tensor"),
        (lambda client: client.send_weights([("a", ("F32", [3], b"1234"))]), 400, "'a'"),
        (lambda client: client.send_weights([("a", ("F32", [1], b"1234"))] * 2), 400, "twice"),
        (lambda client: client.send_weights([("a", ("F33", [1], b"1234"))]), 400, "F33"),
        (lambda client: client.send_weights([], version=0), 400, ">= 1"),
    ],
)
def test_what_cannot_be_done_is_one_error_that_says_why(serve_by_hand, playing, connect, ask, status, words):
    class Blind(playing.Hand):
        async def update_weights(self, source, version):
            raise EngineError("tensor 'x' is missing")

    with serve_by_hand(Blind(), most_requests=100) as served:
        client = connect(served)
        with pytest.raises(ClientError, match=words) as caught:
            ask(client)
        assert caught.value.status == status
        state = client.state()
        assert (state.unfinished, state.reserved, state.weight_version) == (0, 0, 0)
        assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_completions_have_the_most_probable_tokens_where_a_record_asks_for_them(
    serve_by_hand, playing, connect
):
    engine = playing.Hand()
    records = [{**RECORD, "n": 1, "top_logprobs": 2}, {**RECORD, "n": 1, "group_id": "h"}]
    with serve_by_hand(engine) as served, ThreadPoolExecutor(1) as pool:
        answers = pool.submit(lambda: list(connect(served).rollout(records)))
        eventually(lambda: len(engine.jobs) == 2)
        for _ in range(2):
            in_its_thread(served, lambda: engine.finish(tokens=2))
        found = {each.group_id: each.top_logprobs for each in answers.result(PATIENCE_S)}
    assert found == {"g": [[(5, -0.5), (6, -1.5)], [(6, -0.5), (7, -1.5)]], "h": None}


def test_rows_are_requested_once_and_alike(serve_by_hand, playing, connect):
    engine = playing.Hand()
    with serve_by_hand(engine) as served, ThreadPoolExecutor(1) as pool:
        client = connect(served)

        def refused(status, words, index=1, **fields):
            with pytest.raises(ClientError, match=words) as caught:
                client.rollout_row("a", index, **fields)
            assert caught.value.status == status

        with client.reserve([{"group_id": "a", "n": 3, "max_tokens": 4}]):
            with pytest.raises(ClientError, match="reserved already"), client.reserve([{"group_id": "a"}]):
                pass
            refused(400, "no prompt yet")
            refused(400, "has 3 rows", index=3, prompt_token_ids=[5])
            refused(400, "vocabulary", prompt_token_ids=[10**6])
            refused(409, "max_tokens of row 1", prompt_token_ids=[5], max_tokens=5)
            pool.submit(client.rollout_row, "a", 0, prompt_token_ids=[5])
            eventually(lambda: len(engine.jobs) == 3)
            refused(409, "requested already", index=0)
            refused(409, "prompt_token_ids of row 1", prompt_token_ids=[6])
            refused(409, "temperature of row 1", temperature=0.5)
        eventually(lambda: not engine.jobs)


def test_a_token_is_asked_for(serve, connect):
    with serve(token="a-token-of-the-run") as served:
        with pytest.raises(ClientError, match="bring the server's token") as caught:
            connect(served).state()
        assert caught.value.status == 401
        mine = pickle.loads(pickle.dumps(connect(served, token="a-token-of-the-run")))
        with mine:
            assert mine.state().instances == ["sim-0", "sim-1"]


# Who goes.


def test_a_client_that_goes_frees_all_it_asked_for(serve_by_hand, playing, connect):
    engine = playing.Hand()
    with serve_by_hand(engine) as served:
        other = connect(served)
        with Client(served.url) as client:
            batch = client.rollout([{"prompt_token_ids": [5], "n": 3, "max_tokens": 4}])
            waiting = threading.Thread(target=lambda: next(batch, None))
            waiting.start()
            eventually(lambda: len(engine.jobs) == 3)
            in_its_thread(served, engine.finish)
            waiting.join(PATIENCE_S)
            assert other.state().unfinished == 2
            batch.close()
            eventually(lambda: not engine.jobs and other.state().unfinished == 0)
            with client.reserve([{"group_id": "a", "n": 2, "prompt_token_ids": [5], "max_tokens": 4}]):
                eventually(lambda: len(engine.jobs) == 2)
            eventually(lambda: not engine.jobs and other.state().reserved == 0)
    assert len(engine.aborted) == 4


def test_what_is_aborted_ends_for_the_client_that_waits_for_it(serve_by_hand, playing, connect):
    engine = playing.Hand()
    records = [{"group_id": name, "prompt_token_ids": [5], "n": 2, "max_tokens": 4} for name in "ab"]
    with serve_by_hand(engine) as served, ThreadPoolExecutor(1) as pool:
        client = connect(served)
        batch = pool.submit(list, client.rollout(records))
        eventually(lambda: len(engine.jobs) == 4)
        assert client.abort(groups=["a", "absent"], requests=["b/1"]) == 3
        in_its_thread(served, engine.finish)
        found = {each.request_id: each.finish_reason for each in batch.result(PATIENCE_S)}
    assert found == {"a/0": "aborted", "a/1": "aborted", "b/0": "stop", "b/1": "aborted"}


def test_rows_are_aborted_while_their_group_waits_for_the_prompts_of_others(serve_by_hand, playing, connect):
    engine = playing.Hand()
    reserved = [{"group_id": name, "n": 2, "max_tokens": 4} for name in "ab"]
    with serve_by_hand(engine) as served, ThreadPoolExecutor(4) as pool:
        client = connect(served)
        with client.reserve(reserved, prompt_wait_s=600):

            def row(group, index):
                return pool.submit(client.rollout_row, group, index, prompt_token_ids=[5])

            rows = [row("a", 0)]
            eventually(lambda: client.abort(requests=["a/0", "b/0"]) == 1)
            assert client.abort(groups=["a"]) == 1
            assert client.abort(groups=["a"]) == 0
            rows += [row("a", 1), row("b", 0), row("b", 1)]
            eventually(lambda: len(engine.jobs) == 2)
            for _ in range(2):
                in_its_thread(served, engine.finish)
            found = [each.result(PATIENCE_S) for each in rows]
    assert [(each.request_id, each.finish_reason) for each in found] == [
        ("a/0", "aborted"),
        ("a/1", "aborted"),
        ("b/0", "stop"),
        ("b/1", "stop"),
    ]


def test_a_family_ends_with_its_trajectories(serve, connect):
    record = {"prompt_token_ids": [5], "n": 2, "max_tokens": 4, "family": "a/b", "trajectories": ["x", "y"]}
    with serve() as served:
        client = connect(served)
        assert len(list(client.rollout([record]))) == 2
        assert [client.end_family("a/b"), client.end_family("a/b")] == [2, 0]


def test_a_row_whose_reservation_closes_is_an_error(serve_by_hand, playing, connect):
    engine = playing.Hand()
    with serve_by_hand(engine) as served, ThreadPoolExecutor(2) as pool:
        client = connect(served)
        with client.reserve([{"group_id": "a", "n": 2}, {"group_id": "b", "n": 1}], prompt_wait_s=600):
            waiting = pool.submit(client.rollout_row, "a", 0, prompt_token_ids=[5], max_tokens=4)
            eventually(lambda: not waiting.done() and client.state().reserved == 3)
        with pytest.raises(ClientError) as caught:
            waiting.result(PATIENCE_S)
        assert caught.value.status == 404


def test_who_has_left_a_reservation_can_go_on_at_once(serve, connect):
    async def run(url):
        async with AsyncClient(url) as client:
            async with client.reserve([{"group_id": "a", "n": 3}]):
                pass
            return await client.sleep(wait_s=0)

    reserved = [{"group_id": "a", "n": 3}, {"group_id": "b", "n": 3, "prompt": "how far"}]
    with serve() as served:
        client = connect(served)
        for _ in range(10):
            with client.reserve(reserved, prompt_wait_s=0.01):
                client.rollout_row("b", 0)  # which has its prompt, and waits no longer for the other
            assert client.sleep(wait_s=0) > 0
            client.wake()
            assert asyncio.run(asyncio.wait_for(run(served.url), PATIENCE_S)) > 0
            client.wake()
        gone = httpx.delete(f"{served.url}/v1/reservations/of-none")
        assert (gone.status_code, client.state().reserved) == (200, 0)


def test_who_has_left_a_batch_can_let_the_engines_sleep(serve_by_hand, playing, connect):
    engine = playing.Hand()
    with serve_by_hand(engine) as served, ThreadPoolExecutor(1) as pool:
        client = connect(served)
        batch = client.rollout([{"prompt_token_ids": [5], "n": 3, "max_tokens": 4}])
        first = pool.submit(next, batch)
        eventually(lambda: len(engine.jobs) == 3)
        in_its_thread(served, engine.finish)
        assert first.result(PATIENCE_S).finish_reason == "stop"
        batch.close()
        assert client.sleep() > 0


def test_a_row_that_is_left_gives_up_none_of_the_same_name(serve_by_hand, playing, connect):
    engine = playing.Hand()
    record = {"group_id": "g", "prompt_token_ids": [5], "n": 1, "max_tokens": 4}
    with serve_by_hand(engine) as served, ThreadPoolExecutor(1) as pool:
        client = connect(served)
        with client.reserve([record]):
            eventually(lambda: engine.jobs)
            in_its_thread(served, engine.finish)
            other = pool.submit(list, client.rollout([record]))
            eventually(lambda: engine.jobs)
            assert client.rollout_row("g", 0).finish_reason == "stop"
            eventually(lambda: client.state().reserved == 0)  # as all its rows are over
            in_its_thread(served, engine.finish)
            [found] = other.result(PATIENCE_S)
    assert (found.finish_reason, engine.aborted) == ("stop", [])


def test_a_row_whose_client_goes_while_its_group_waits_can_be_requested_again(
    serve_by_hand, playing, connect
):
    engine = playing.Hand()
    reserved = [{"group_id": name, "n": 1, "max_tokens": 4} for name in "ab"]
    body = {"group_id": "a", "index": 0, "prompt_token_ids": [5], "progress_s": 0.01}

    @contextmanager
    def requested():
        refused = True
        while refused:  # until the server notices that the other one has gone
            with httpx.stream("POST", f"{served.url}/v1/rows", json=body, timeout=PATIENCE_S) as answer:
                refused = answer.status_code == 409
                if not refused:
                    yield answer.iter_lines()

    with serve_by_hand(engine) as served, ThreadPoolExecutor(1) as pool:
        client = connect(served)
        with client.reserve(reserved, prompt_wait_s=600):
            with requested() as lines:
                next(lines)
            with requested() as lines:
                other = pool.submit(client.rollout_row, "b", 0, prompt_token_ids=[5])
                eventually(lambda: len(engine.jobs) == 2)
                for _ in range(2):
                    in_its_thread(served, engine.finish)
                assert any('"finish_reason":"stop"' in line for line in lines)
            assert other.result(PATIENCE_S).finish_reason == "stop"


# Overload, loss and nonsense.


def test_reserved_rows_wait_for_room(serve_by_hand, playing, connect):
    engine = playing.Hand()
    record = {"prompt_token_ids": [5], "n": 2, "max_tokens": 4}
    with serve_by_hand(engine, most_requests=3) as served, ThreadPoolExecutor(2) as pool:
        client = connect(served)
        first = pool.submit(list, client.rollout([record]))
        eventually(lambda: len(engine.jobs) == 2)
        with client.reserve([{"group_id": "a", **record}, {"group_id": "b", **record, "n": 1}]):
            row = pool.submit(client.rollout_row, "a", 1)
            for _ in range(5):
                eventually(lambda: engine.jobs)
                in_its_thread(served, engine.finish)
            assert row.result(PATIENCE_S).request_id == "a/1"
        assert len(first.result(PATIENCE_S)) == 2


def test_a_row_whose_group_waits_for_others_says_that_the_server_lives(serve_by_hand, playing, connect):
    engine = playing.Hand()
    reserved = [{"group_id": name, "n": 1, "max_tokens": 4} for name in "ab"]
    body = {"group_id": "a", "index": 0, "prompt_token_ids": [5], "progress_s": 0.01}
    with serve_by_hand(engine) as served, ThreadPoolExecutor(1) as pool:
        client = connect(served)
        with (
            client.reserve(reserved, prompt_wait_s=600),
            httpx.stream("POST", f"{served.url}/v1/rows", json=body, timeout=PATIENCE_S) as answer,
        ):
            lines = answer.iter_lines()
            assert ["progress" in next(lines) for _ in range(3)] == [True] * 3
            assert engine.jobs == {}
            other = pool.submit(client.rollout_row, "b", 0, prompt_token_ids=[5])
            eventually(lambda: len(engine.jobs) == 2)
            for _ in range(2):
                in_its_thread(served, engine.finish)
            assert [line for line in lines if '"completion"' in line]
            assert other.result(PATIENCE_S).finish_reason == "stop"


def test_where_there_is_no_room_it_asks_again(serve_by_hand, playing, connect):
    engine = playing.Hand()
    record = {"prompt_token_ids": [5], "n": 2, "max_tokens": 4}
    with serve_by_hand(engine, most_requests=3) as served, ThreadPoolExecutor(2) as pool:
        first = pool.submit(list, connect(served).rollout([record]))
        eventually(lambda: len(engine.jobs) == 2)
        with pytest.raises(ClientError, match="try again later") as caught:
            list(connect(served).rollout([record]))
        assert caught.value.status == 429
        second = pool.submit(list, connect(served, patience_s=PATIENCE_S).rollout([record]))
        for _ in range(4):
            eventually(lambda: engine.jobs)
            in_its_thread(served, engine.finish)
        assert [len(each.result(PATIENCE_S)) for each in (first, second)] == [2, 2]


def test_no_server_is_one_error_after_one_warning(connect, caplog):
    with reserved_port() as port, pytest.raises(ClientError, match="no server can be reached") as caught:
        connect(f"http://127.0.0.1:{port}", patience_s=1).state()
    assert caught.value.status is None
    (warning,) = [record.getMessage() for record in caplog.records if record.name == "seer_client"]
    assert warning == f"{caught.value}; trying for 1 s"


DONE = b'{"done": {"requests": 0, "weight_version": 0}}\n'


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (b"SSH-2.0-OpenSSH_9.6\r\n", "was lost"),
        (b"", "was lost"),
        (b"HTTP/1.1 200 OK\r\n\r\nhello\n", "nonsense"),
        (b'HTTP/1.1 200 OK\r\n\r\n{"completion": {"a": 1}}\n', "nonsense"),
        (b'HTTP/1.1 200 OK\r\n\r\n{"progress": {"requests": 1, "finished": 0}}\n', "was cut"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 999\r\n\r\n" + DONE, "was lost"),
        (b"HTTP/1.1 502 Bad Gateway\r\n\r\n<html>", "answers 502"),
        (b'HTTP/1.1 200 OK\r\n\r\n{"error": {"message": "it failed", "code": 503}}\n', "it failed"),
        (None, "has stopped sending"),
    ],
)
def test_what_is_no_answer_of_seer_s_is_one_error_in_bounded_time(connect, answer, words):
    over = threading.Event()

    def play(listener):
        connection, _ = listener.accept()
        with connection:
            connection.settimeout(PATIENCE_S)
            connection.recv(1 << 16)
            if answer is None:
                over.wait(PATIENCE_S)
            else:
                connection.sendall(answer)
                connection.shutdown(socket.SHUT_WR)
                while connection.recv(1 << 16):  # closed with a part of the request unread, it would be reset
                    pass

    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as pool:
        playing = pool.submit(play, listener)
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        with pytest.raises(ClientError, match=words):
            list(connect(url, silence_s=0.5 if answer is None else 30.0).rollout(RECORDS))
        over.set()
        playing.result(PATIENCE_S)


def test_a_stream_sends_lines_of_progress_while_nothing_finishes(serve_by_hand, playing, connect):
    engine, progress = playing.Hand(), []
    with serve_by_hand(engine) as served, ThreadPoolExecutor(1) as pool:
        client = connect(served, progress_s=0.02)
        record = {"prompt_token_ids": [5], "n": 2, "max_tokens": 4}
        batch = pool.submit(list, client.rollout([record], progress=progress.append))
        eventually(lambda: engine.jobs)
        in_its_thread(served, lambda: engine.finish(tokens=3, stopped=False))
        eventually(lambda: progress and progress[-1].tokens == 3)
        in_its_thread(served, engine.finish)
        in_its_thread(served, engine.finish)
        assert len(batch.result(PATIENCE_S)) == 2
    assert {(each.requests, each.finished) for each in progress} <= {(2, 0), (2, 1)}
