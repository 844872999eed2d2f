"""OpenAI's client against the server: the library's tokens, its errors, and nothing left of who has gone."""

import asyncio
import json
import resource
import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.client import HTTPConnection

import httpx
import openai
import pytest
from seer_server.broker import RolloutBroker
from seer_session.runtime import Runtime

from seer_core.plugins.slots import Assembly, Strategies
from seer_core.scheduling.scheduler import Policies, Slot
from tests.support.eventually import eventually

PATIENCE_S = 60


def post(served, body, **headers):
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"Content-Type": "application/json", **headers}
    return httpx.post(f"{served.url}/v1/completions", content=content, headers=headers, timeout=PATIENCE_S)


# The same tokens.


def test_its_tokens_are_the_library_s(serve_sim, expected):
    ours = expected({"prompt": "how far", "n": 3, "seed": 7, "group_id": "mine"})
    with serve_sim() as served:
        answer = served.client().completions.create(
            model="seer",
            prompt="how far",
            n=3,
            seed=7,
            logprobs=0,
            extra_body={"return_token_ids": True, "group": "mine"},
        )
    assert [each.index for each in answer.choices] == [0, 1, 2]
    for index, found in enumerate(answer.choices):
        wanted = ours[f"mine/{index}"]
        assert found.token_ids == list(wanted.token_ids)
        assert found.logprobs.token_logprobs == pytest.approx(list(wanted.logprobs))
        assert len(found.logprobs.tokens) == len(wanted.token_ids)
        starts = [sum(map(len, found.logprobs.tokens[:place])) for place in range(len(wanted.token_ids))]
        assert found.logprobs.text_offset == starts
        assert (found.text, found.finish_reason) == (wanted.text, wanted.finish_reason)
        assert found.prompt_token_ids
    written = sum(len(each.token_ids) for each in ours.values())
    assert (answer.usage.completion_tokens, answer.id[:5]) == (written, "cmpl-")


def test_a_group_s_name_gives_the_seeds_that_the_library_gives(serve_sim, expected):
    ours = expected({"prompt_token_ids": [5, 6, 7], "n": 2, "group_id": "g"})
    body = {"prompt": [5, 6, 7], "n": 2, "return_token_ids": True}
    with serve_sim() as served:
        answers = [
            post(served, {**body, "group": "g"}).json(),
            post(served, body, **{"X-Seer-Group": "g", "X-Seer-Priority": "3"}).json(),
            post(served, body).json(),
        ]
    named, by_header, nameless = ([each["token_ids"] for each in answer["choices"]] for answer in answers)
    assert named == by_header == [list(ours[f"g/{index}"].token_ids) for index in range(2)]
    assert nameless != named


def test_several_prompts_are_several_groups_in_one_answer(serve_sim, expected):
    ours = expected(*({"prompt": text, "n": 2, "seed": 1, "group_id": f"g-{text}"} for text in "ab"))
    with serve_sim() as served:
        answer = served.client().completions.create(
            model="seer", prompt=["a", "b"], n=2, seed=1, extra_body={"return_token_ids": True}
        )
    names = ["g-a/0", "g-a/1", "g-b/0", "g-b/1"]
    for index, (found, name) in enumerate(zip(answer.choices, names, strict=True)):
        assert found.index == index
        assert same_start(found.token_ids, ours[name].token_ids)


def same_start(tokens, others):
    """Return whether one is the other, or its beginning: simulated lengths go by the group's name."""
    shared = min(len(tokens), len(others)) - 1  # one may end there with its last token
    return list(tokens[:shared]) == list(others[:shared])


def test_a_stream_brings_piece_by_piece_what_comes_at_once_otherwise(serve_sim):
    asked = {"model": "seer", "prompt": "how far", "n": 2, "seed": 7, "logprobs": 0}
    more = {"extra_body": {"return_token_ids": True, "group": "g"}}
    with serve_sim() as served:
        whole = served.client().completions.create(**asked, **more)
        pieces = list(served.client().completions.create(**asked, **more, stream=True))
    for choice in whole.choices:
        mine = [piece.choices[0] for piece in pieces if piece.choices[0].index == choice.index]
        assert [token for each in mine for token in each.token_ids] == choice.token_ids
        offsets = [place for each in mine for place in each.logprobs.text_offset]
        assert offsets == choice.logprobs.text_offset
        assert [score for each in mine for score in each.logprobs.token_logprobs] == pytest.approx(
            choice.logprobs.token_logprobs
        )
        assert [each.finish_reason for each in mine][-1] == choice.finish_reason
        assert not any(each.finish_reason for each in mine[:-1])


class Bytes:
    """A tokenizer whose tokens are single bytes."""

    def __init__(self):
        self.table = {5: b"a", 6: b"\xc3", 7: b"\xa9", 8: b"!"}

    def decode(self, token_ids):
        return b"".join(self.table[token] for token in token_ids).decode(errors="replace")


def test_a_character_that_a_chunk_s_end_cuts_in_two_comes_whole(serve_by_hand, playing):
    engine = playing.Hand()
    with serve_by_hand(engine, tokenizer=Bytes()) as served, streamed(served, max_tokens=8) as pieces:
        eventually(lambda: engine.jobs)
        served.do(lambda: engine.finish(tokens=2, stopped=False))
        assert next(pieces)["choices"][0]["text"] == "a"
        served.do(lambda: engine.finish(tokens=2))
        assert "".join(piece["choices"][0]["text"] for piece in pieces) == "é!"


@contextmanager
def streamed(served, path="completions", **more):
    """Ask for a stream; ``with`` gives what comes, as it comes."""
    body = {"prompt": [5], "stream": True, **more}
    with httpx.stream("POST", f"{served.url}/v1/{path}", json=body, timeout=PATIENCE_S) as answer:

        def pieces():
            for line in answer.iter_lines():
                if line and line != "data: [DONE]":
                    yield json.loads(line.removeprefix("data: "))

        yield pieces()


def test_what_a_slow_reader_has_not_read_yet_comes_as_one(playing):
    engine = playing.Hand()
    record = {"prompt_token_ids": [5], "n": 2, "max_tokens": 40, "group_id": "g"}

    async def act(broker):
        subscription = broker.submit(broker.runtime.groups([record]), streams=True)
        for _ in range(6):
            engine.finish(tokens=3, stopped=False)
        early = [await subscription.updates.get() for _ in range(2)]
        for _ in range(4):
            engine.finish(tokens=3, stopped=False)
        engine.finish(tokens=1)
        later = [await subscription.updates.get() for _ in range(2)]
        return early, later, subscription.updates.empty()

    early, later, empty = with_broker(playing, engine, act)
    assert empty
    assert [len(piece.token_ids) for piece in early] == [9, 9]
    assert {type(each).__name__: len(each.token_ids) for each in later} == {"Completion": 16, "Piece": 6}


def test_a_reader_who_pauses_loses_nothing_and_delays_no_other(serve_sim):
    body = {"prompt": "how far", "n": 256, "seed": 7, "logprobs": 0, "return_token_ids": True, "group": "g"}
    with serve_sim() as served:
        whole = post(served, body).json()["choices"]
        with streamed(served, **body) as pieces:
            first = next(pieces)  # and no more for a while
            assert post(served, {"prompt": "a"}).status_code == 200
            found = {choice["index"]: [] for choice in whole}
            for piece in [first, *pieces]:
                [choice] = piece["choices"]
                found[choice["index"]] += choice["token_ids"]
    assert found == {choice["index"]: choice["token_ids"] for choice in whole}


def test_a_group_of_the_name_of_one_under_way_is_refused_and_that_one_goes_on(serve_by_hand, playing):
    engine, body = playing.Hand(), {"prompt": [5], "max_tokens": 4, "group": "g"}
    with serve_by_hand(engine) as served, ThreadPoolExecutor(1) as pool:
        first = pool.submit(post, served, body)
        eventually(lambda: engine.jobs)
        again = post(served, body)
        assert (again.status_code, "under way" in again.json()["error"]["message"]) == (400, True)
        served.do(engine.finish)
        assert first.result(PATIENCE_S).status_code == 200


@pytest.fixture
def many_files():
    """Let this process have both ends of a thousand connections open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(max(soft, 4096), hard), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.usefixtures("many_files")
def test_a_thousand_at_once_are_answered_each_with_its_own(serve_sim):
    async def ask(many, url, number):
        body = {"prompt": [5, number], "seed": number % 10, "max_tokens": 20, "return_token_ids": True}
        answer = await many.post(f"{url}/v1/completions", json=body)
        return answer.json()["choices"][0]["token_ids"]

    async def ask_all(url):
        limits = httpx.Limits(max_connections=1000)
        async with httpx.AsyncClient(limits=limits, timeout=4 * PATIENCE_S) as many:
            return await asyncio.gather(*(ask(many, url, number) for number in range(1000)))

    with serve_sim() as served:
        found = asyncio.run(ask_all(served.url))
    assert all(1 <= len(tokens) <= 20 for tokens in found)
    assert all(same_start(tokens, found[number % 10]) for number, tokens in enumerate(found))


@pytest.mark.parametrize("stream", [False, True])
def test_who_says_no_number_of_tokens_gets_as_many_as_fit(serve_by_hand, playing, stream):
    engine = playing.Hand(kv_capacity_tokens=400)
    body = {"prompt": [5] * 100, "stream": stream}
    with serve_by_hand(engine) as served, ThreadPoolExecutor(1) as pool:
        answer = pool.submit(post, served, body)
        eventually(lambda: engine.jobs or answer.done())
        [job] = engine.jobs.values()
        assert (job.max_tokens, job.last) == (300, True)
        served.do(engine.finish)
        assert answer.result(PATIENCE_S).status_code == 200
        batch = {"records": [{"prompt_token_ids": [5]}]}
        refused = httpx.post(f"{served.url}/v1/rollouts", json=batch, timeout=PATIENCE_S)
        assert (refused.status_code, "max_tokens" in refused.json()["error"]["message"]) == (400, True)
        long = post(served, {"prompt": [5] * 400})
        assert (long.status_code, "401 tokens" in long.json()["error"]["message"]) == (400, True)


# What is refused.


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b'{"prompt": "a", ', "no request for completions"),
        (b"\xff\xfe", "no request for completions"),
        ({"prompt": "a", "nn": 3}, "nn"),
        ({"prompt": "a", "n": "three"}, "n"),
        ({"prompt": "a", "n": 0}, "n"),
        ({"prompt": "a", "n": 10**6}, "65536"),
        ({}, "prompt"),
        ({"prompt": []}, "prompt must be text"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": [[]]}, "empty"),
        ({"prompt": [-4]}, "vocabulary"),
        ({"prompt": "a", "max_tokens": 10**6}, "exceed"),
        ({"prompt": "a", "temperature": -1}, "temperature"),
        ({"prompt": "a", "timeout_s": 0}, "timeout_s"),
        ({"prompt": "a", "logprobs": 5}, "this engine has log-probs of sampled tokens alone"),
        ({"prompt": "a", "logprobs": 21}, "logprobs"),
        ({"prompt": "a", "top_logprobs": 5}, "top_logprobs is for log-probs; set logprobs as well"),
        ({"prompt": "a", "stop": ["x"]}, "stop is not supported by this engine"),
        ({"prompt": "a", "stop": "x" * 1001}, "a stop string has 1,001 characters; it may have 1,000"),
        ({"prompt": "a", "stop": ["x"] * 65}, "stop has 65 entries; it may have 64"),
        ({"prompt": "a", "stop": ["x", ""]}, "stop has an empty string"),
        ({"prompt": "a", "min_p": 2}, "min_p"),
        ({"prompt": "a", "response_format": {"type": "json_object"}}, "response_format is not supported"),
        ({"prompt": "a", "response_format": {"type": "json_schema"}}, "response_format has no json_schema"),
        ({"prompt": "a", "response_format": {"type": "xml"}}, "response_format"),
        ({"prompt": "a", "structured_outputs": {"regex": "a", "choice": ["a"]}}, "has regex and choice"),
        ({"prompt": "a", "logit_bias": {"7": 101}}, "logit_bias"),
        ({"prompt": "a", "logit_bias": {"x": 1}}, "logit_bias"),
        ({"prompt": "a", "stop_token_ids": [10**9]}, "stop_token_ids names token 1000000000"),
        ({"prompt": "a", "suffix": "b"}, "suffix is not supported"),
        ({"prompt": "a", "group": "x" * 300}, "group has 300 characters"),
    ],
)
def test_what_cannot_be_rolled_out_is_a_400_that_says_why(serve_sim, body, words):
    with serve_sim() as served:
        answer = post(served, body)
        assert post(served, {"prompt": "a", "max_tokens": 2, "echo": False, "best_of": 1}).status_code == 200
    assert answer.status_code == 400
    assert words in answer.json()["error"]["message"]


def test_who_does_not_bring_the_token_is_not_let_in(serve_sim):
    with serve_sim(token="a-token-of-the-run") as served:
        with pytest.raises(openai.AuthenticationError, match="bring the server's token"):
            served.client("a-token-of-another").completions.create(model="seer", prompt="a")
        assert httpx.get(f"{served.url}/v1/models").status_code == 401
        assert httpx.get(f"{served.url}/health").status_code == 200
        mine = served.client("a-token-of-the-run")
        assert [each.id for each in mine.models.list()] == ["seer"]
        assert mine.models.retrieve("seer").id == "seer"
        with pytest.raises(openai.NotFoundError, match="there is no model 'a/b', but 'seer'"):
            mine.models.retrieve("a/b")
        with pytest.raises(openai.NotFoundError, match="there is no model 'gpt'"):
            mine.completions.create(model="gpt", prompt="a")


def test_overload_is_refused_with_a_time_and_passes(serve_by_hand, playing):
    engine = playing.Hand()
    with serve_by_hand(engine, most_requests=3) as served, ThreadPoolExecutor(1) as pool:
        first = pool.submit(post, served, {"prompt": [5], "n": 2, "max_tokens": 4})
        eventually(lambda: len(engine.jobs) == 2)
        answer = post(served, {"prompt": [5], "n": 2, "max_tokens": 4})
        assert (answer.status_code, int(answer.headers["Retry-After"]) >= 1) == (429, True)
        assert "try again later" in answer.json()["error"]["message"]
        with pytest.raises(openai.RateLimitError):
            served.client().completions.create(model="seer", prompt=[5], n=2, max_tokens=4)
        served.do(engine.finish)
        served.do(engine.finish)
        assert first.result(PATIENCE_S).status_code == 200


def test_more_than_there_is_ever_room_for_is_no_overload_that_passes(serve_by_hand, playing):
    with serve_by_hand(playing.Hand(), most_requests=3) as served:
        answer = post(served, {"prompt": [[5], [6]], "n": 2, "max_tokens": 4})
    assert (answer.status_code, "Retry-After" in answer.headers) == (400, False)
    assert "4 responses at once, where 3 are taken" in answer.json()["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_frees_what_it_asked_for(serve_by_hand, playing, stream):
    engine = playing.Hand(max_running=1)
    body = {"prompt": [5], "n": 3, "max_tokens": 4, "stream": stream}
    with serve_by_hand(engine) as served:
        client = HTTPConnection(served.url.removeprefix("http://"), timeout=PATIENCE_S)
        client.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        eventually(lambda: engine.jobs)
        client.close()
        eventually(lambda: engine.aborted)
        assert engine.jobs == {}
        with ThreadPoolExecutor(1) as pool:
            other = pool.submit(post, served, {"prompt": [5], "max_tokens": 4})
            eventually(lambda: engine.jobs)
            served.do(engine.finish)
            assert other.result(PATIENCE_S).status_code == 200
    assert len(engine.aborted) == 1


def with_broker(playing, engine, act, most_requests=None):
    """Return what ``act`` returns for a broker whose rollout goes on in the same thread."""

    def make_runtime(observers):
        slots = tuple(Slot("observer", "server", each) for each in observers)
        return Runtime(Assembly(playing.Hands([engine]), Strategies(Policies(), slots, None), None))

    async def run():
        broker = RolloutBroker(make_runtime, most_requests)
        async with broker.runtime, broker.serving():
            await asyncio.sleep(0)
            return await act(broker)

    return asyncio.run(asyncio.wait_for(run(), PATIENCE_S))


def test_a_client_that_goes_before_it_has_said_all_is_no_error_of_the_server(serve_sim, capfd):
    with serve_sim() as served:
        with socket.create_connection(("127.0.0.1", httpx.URL(served.url).port), PATIENCE_S) as client:
            client.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n\r\n{")
            assert post(served, {"prompt": "a", "max_tokens": 2}).status_code == 200
        assert post(served, {"prompt": "a", "max_tokens": 2}).status_code == 200
    assert "ClientDisconnect" not in capfd.readouterr().err


def test_what_one_client_has_left_is_not_handed_to_another_who_asks_for_the_same(playing):
    engine = playing.Hand()
    record = {"prompt_token_ids": [5], "n": 2, "max_tokens": 4, "group_id": "g"}

    async def act(broker):
        left = broker.submit(broker.runtime.groups([record]), streams=False)
        broker.unsubscribe(left)
        subscription = broker.submit(broker.runtime.groups([record]), streams=False)
        engine.finish()
        engine.finish()
        found = [await subscription.updates.get() for _ in range(2)]
        return left.updates.empty(), subscription.updates.empty(), found

    left_empty, empty, found = with_broker(playing, engine, act)
    assert (left_empty, empty) == (True, True)
    assert [each.finish_reason for each in found] == ["stop", "stop"]


def test_who_leaves_late_takes_nothing_from_another_who_has_asked_for_the_same(playing):
    engine = playing.Hand()
    record = {"prompt_token_ids": [5], "n": 1, "max_tokens": 4, "group_id": "g"}

    async def act(broker):
        slow = broker.submit(broker.runtime.groups([record]), streams=True)
        engine.finish()
        subscription = broker.submit(broker.runtime.groups([record]), streams=False)
        broker.unsubscribe(slow)
        assert engine.aborted == []
        engine.finish()
        return await subscription.updates.get()

    assert with_broker(playing, engine, act).finish_reason == "stop"


def test_a_fleet_that_is_gone_is_one_clear_error_for_all(serve_by_hand, playing):
    engine = playing.Hand()
    with serve_by_hand(engine) as served, ThreadPoolExecutor(2) as pool:
        waiting = pool.submit(post, served, {"prompt": [5], "max_tokens": 4})
        streaming = pool.submit(post, served, {"prompt": [5], "max_tokens": 4, "stream": True})
        eventually(lambda: len(engine.jobs) == 2)
        served.do(lambda: engine.finish(logprobs=3))
        assert waiting.result(PATIENCE_S).status_code == 503
        assert "error" in streaming.result(PATIENCE_S).text
        assert post(served, {"prompt": [5]}).status_code == 503
        assert httpx.get(f"{served.url}/health").status_code == 503
