"""Streams within a chunk: their joined pieces are the response, also where chunks fail or instances die."""

import asyncio
import json

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from seer_divided_rollout import Chunks
from seer_host.tables import SeerTable
from seer_server.broker import RolloutBroker
from seer_session.runtime import Runtime

from seer_core.model import Completion
from seer_core.plugins.slots import Assembly, Strategies
from seer_core.runtime.restarts import RestartsTable
from seer_core.scheduling.scheduler import Policies, Slot
from tests.support.eventually import eventually

PATIENCE_S = 60
RECORD = {"prompt_token_ids": [5], "n": 2, "max_tokens": 16, "group_id": "g"}
STEADY = SeerTable(max_chunk_failures=1000, restarts=RestartsTable(1000, backoff_s=0.001))


class Joined:
    """The tokens that a reader has received of each response."""

    def __init__(self):
        self.tokens, self.logprobs, self.over = {}, {}, {}
        self.of_prompt = {}
        """The log-probs of the prompt, from the first update of each response."""

    def take(self, update):
        self.of_prompt.setdefault(update.request_id, update.prompt_logprobs)
        tokens = self.tokens.setdefault(update.request_id, [])
        logprobs = self.logprobs.setdefault(update.request_id, [])
        assert update.request_id not in self.over
        if isinstance(update, Completion):
            self.over[update.request_id] = update
        else:
            assert update.start == len(tokens)
            assert len(update.token_ids) > 0
        start = len(tokens) if isinstance(update, Completion) else 0
        tokens += update.token_ids[start:]
        logprobs += update.logprobs[start:]


class Player:
    """Plays two engines by hand, in any order; their tokens depend on the place in the response."""

    def __init__(self, playing):
        self.engines = [playing.Hand("first"), playing.Hand("second")]
        self.streamed = {}

    def act(self, what, which, tokens):
        running = [(engine, job) for engine in self.engines for job in engine.jobs.values()]
        if not running:
            return
        engine, job = running[which % len(running)]
        if what == "grow":
            streamed = self.streamed.get(job.id, 0)
            tokens = min(tokens, job.max_tokens - streamed)
            engine.grow(job.id, tokens, start=streamed)
            self.streamed[job.id] = streamed + tokens
        elif what == "begin anew":
            self.streamed[job.id] = 0
        else:
            gone = list(engine.jobs) if what == "die" else [job.id]
            for job_id in gone:
                self.streamed.pop(job_id, None)
            if what == "finish":
                engine.finish(job.id, job.max_tokens, stopped=False)
            elif what == "fail":
                engine.fail(job.id)
            else:
                engine.die()


ACTS = st.lists(
    st.tuples(
        st.sampled_from(["grow", "grow", "grow", "read", "begin anew", "finish", "fail", "die"]),
        st.integers(0, 1),
        st.integers(1, 4),
    ),
    max_size=40,
)


@given(acts=ACTS, of_prompt=st.sampled_from([None, 0]))
@settings(max_examples=150, deadline=None)
def test_joined_pieces_are_the_response_when_chunks_fail_engines_die_or_reading_is_late(
    playing, acts, of_prompt
):
    player, joined = Player(playing), Joined()

    def make_runtime(observers):
        slots = tuple(Slot("observer", "server", each) for each in observers)
        policies = Policies(splitter=Slot("splitter", "mine", Chunks(5)))
        fleet = playing.Hands(player.engines)
        return Runtime(Assembly(fleet, Strategies(policies, slots, None), None), STEADY)

    async def run():
        broker = RolloutBroker(make_runtime)
        async with broker.runtime, broker.serving():
            await asyncio.sleep(0)
            subscription = broker.submit(
                broker.runtime.groups([{**RECORD, "prompt_logprobs": of_prompt}]), streams=True
            )

            async def read():
                while not subscription.updates.empty():
                    try:
                        async with asyncio.timeout(0):
                            joined.take(await subscription.updates.get())
                    except TimeoutError:  # there was nothing new after all
                        break

            for what, which, tokens in acts:
                if what == "read":
                    await read()
                else:
                    player.act(what, which, tokens)
                await asyncio.sleep(0)
            while broker.unfinished:
                player.act("finish", 0, 0)
                await asyncio.sleep(0)
            await read()

    asyncio.run(asyncio.wait_for(run(), PATIENCE_S))
    assert set(joined.over) == {"g/0", "g/1"}
    for name, completion in joined.over.items():
        assert completion.token_ids == list(range(5, 21))
        assert completion.token_ids == joined.tokens[name]
        assert completion.logprobs == joined.logprobs[name]
        assert (joined.of_prompt[name] is not None) == (of_prompt is not None)


@pytest.fixture
def streamed(serve_by_hand, playing):
    """Serve an engine that is played by hand; give it, the server, and a stream's events."""
    engine = playing.Hand()
    body = {"prompt": [5], "max_tokens": 8, "stream": True, "logprobs": 0, "return_token_ids": True}
    body["stream_options"] = {"include_usage": True}
    with (
        serve_by_hand(engine) as served,
        httpx.stream("POST", f"{served.url}/v1/completions", json=body, timeout=PATIENCE_S) as answer,
    ):
        eventually(lambda: engine.jobs)
        lines = (line.removeprefix("data: ") for line in answer.iter_lines() if line)
        yield engine, served, lines


def test_a_stream_of_one_chunk_comes_as_its_engine_streams(streamed):
    engine, served, lines = streamed
    served.do(lambda: engine.grow(tokens=1))
    first = json.loads(next(lines))["choices"][0]
    assert (first["token_ids"], first["prompt_token_ids"], first["finish_reason"]) == ([5], [5], None)
    served.do(lambda: engine.grow(tokens=2, start=1))
    second = json.loads(next(lines))["choices"][0]
    assert second["token_ids"] == [6, 7]
    assert second["logprobs"]["token_logprobs"] == [-0.5, -0.5]
    served.do(lambda: engine.finish(tokens=4))
    *rest, usage, done = list(lines)
    last = json.loads(rest[-1])["choices"][0]
    assert (last["token_ids"], last["finish_reason"]) == ([8], "stop")
    assert json.loads(usage)["usage"]["completion_tokens"] == 4
    assert done == "[DONE]"


def test_a_chunk_that_is_repeated_goes_on_in_the_stream_where_it_was(streamed):
    engine, served, lines = streamed
    served.do(lambda: engine.grow(tokens=3))
    assert json.loads(next(lines))["choices"][0]["token_ids"] == [5, 6, 7]
    served.do(engine.fail)
    served.do(lambda: engine.grow(tokens=2))
    served.do(lambda: engine.grow(tokens=3, start=2))
    assert json.loads(next(lines))["choices"][0]["token_ids"] == [8, 9]
    served.do(lambda: engine.finish(tokens=8))
    assert json.loads(next(lines))["choices"][0]["token_ids"] == [10, 11, 12]


def test_a_response_that_is_given_up_within_a_chunk_keeps_in_its_stream_what_was_sent(streamed):
    engine, served, lines = streamed
    served.do(lambda: engine.grow(tokens=3))
    assert len(json.loads(next(lines))["choices"][0]["token_ids"]) == 3
    [job] = engine.jobs.values()
    assert httpx.post(f"{served.url}/v1/abort", json={"requests": [job.request_id]}).json() == {"aborted": 1}
    last, usage, done = list(lines)
    assert json.loads(last)["choices"][0]["token_ids"] == []
    assert json.loads(usage)["usage"]["completion_tokens"] == 3
    assert done == "[DONE]"
