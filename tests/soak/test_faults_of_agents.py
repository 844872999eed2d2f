"""Environments that fail in every way, and harnesses that vanish: no other response bears their faults.

`pytest tests/soak/test_faults_of_agents.py --soak-minutes 10 --soak-seed 3 -s` runs a long campaign.
"""

import asyncio
import importlib
import itertools
import math
import random
import threading
import time
from collections import Counter
from contextlib import suppress
from functools import partial
from pathlib import Path

import httpx
import pytest
import uvicorn
from seer_context_sched import ContextAware
from seer_divided_rollout import Chunks, KvAware
from seer_host.tables import SeerTable, TurnsTable
from seer_server import make_app
from seer_session.environment import EnvironmentAnswer
from seer_session.environment_calls import EnvironmentCalls
from seer_session.runtime import Runtime
from structlog.testing import capture_logs

from seer_core.errors import EngineError
from seer_core.model import PromptGroup, request_seed
from seer_core.plugins.slots import Assembly, Strategies
from seer_core.scheduling.scheduler import CORE, Policies, Slot
from tests.support.eventually import aeventually

ENGINES = Path(__file__).parents[2] / "examples/plugins/engines"
PATIENCE_S = 120.0
LIMIT_S = 2.0
TURNS, MOST_TOKENS, SHARE = 4, 900, 0.1
REASONS = {
    "raises": "ValueError: no network",
    "ends the process": "SystemExit",
    "hangs": f"took more than {LIMIT_S:g} s",
    "answers again, too late": f"took more than {LIMIT_S:g} s",
    "answers nothing": "which is no EnvironmentAnswer",
    "answers no token": "answered no token",
    "answers a wrong token": "the vocabulary is 0 to 999",
    "gives a reward that is none": "a reward is a finite number",
}
"""Why a response ends with ``error``, by kind of fault."""

ENDS = {"answers beyond the context": "length", "is given up meanwhile": "aborted"}
"""How a response ends otherwise."""

KINDS = (*REASONS, *ENDS, "changes its answer")


@pytest.fixture
def engines(monkeypatch):
    """Return a function that makes a runtime over two engines without a model."""
    monkeypatch.syspath_prepend(str(ENGINES))
    module = importlib.import_module("seer_no_model")

    def make(observers=(), **turns):
        slots = {"splitter": Chunks(32), "prioritizer": ContextAware(), "placer": KvAware(0.25)}
        policies = Policies(**{name: Slot(name, CORE, each) for name, each in slots.items()})
        watching = tuple(Slot("observer", CORE, each) for each in observers)
        fleet = module.NoModelFleet(module.Settings(token_s=1e-4))
        settings = SeerTable(turns=TurnsTable(**turns))
        return Runtime(Assembly(fleet, Strategies(policies, watching)), settings)

    return make


# Environments.


class Adder:
    """An environment whose answer follows from the turn alone; after some turns it ends the response."""

    def __init__(self):
        self.begun, self.closed = [], []

    async def reset(self, trajectory, earlier):
        self.begun.append(trajectory.request_id)

    async def step(self, trajectory, turn):
        return self.answer(turn)

    async def close(self, trajectory):
        self.closed.append(trajectory.request_id)

    @staticmethod
    def answer(turn):
        if turn.number == TURNS:
            return EnvironmentAnswer(done=True, reward=1.0)
        total = sum(turn.token_ids) + turn.number
        return EnvironmentAnswer(token_ids=[1 + total % 90] * (1 + total % 5), reward=0.5)


class Faulty(Adder):
    """An adder with faults that follow from the seed, the response and the turn."""

    def __init__(self, seed):
        super().__init__()
        self.seed, self.faults, self.rollout = seed, {}, None
        self.free = threading.Event()

    def fault(self, trajectory, turn):
        chance = random.Random(f"{self.seed} {trajectory.request_id} {turn.number}")
        if chance.random() >= SHARE:
            return None
        kind = chance.choice(KINDS)
        if kind != "changes its answer":
            self.faults[trajectory.request_id] = kind, turn.number
        return kind

    async def step(self, trajectory, turn):
        match kind := self.fault(trajectory, turn):
            case "hangs":
                await asyncio.Event().wait()
            case "answers again, too late":
                with suppress(asyncio.CancelledError):
                    await asyncio.Event().wait()
        return self.instant(kind, trajectory, turn)

    def instant(self, kind, trajectory, turn):
        """Return the answer of a kind of fault, or raise."""
        answer = self.answer(turn)
        match kind:
            case "raises":
                raise ValueError("no network")
            case "ends the process":
                raise SystemExit(1)
            case "answers nothing":
                return None
            case "answers no token":
                return EnvironmentAnswer(token_ids=[])
            case "answers a wrong token":
                return EnvironmentAnswer(token_ids=[5, 1000])
            case "gives a reward that is none":
                return EnvironmentAnswer(token_ids=[5], reward=math.nan)
            case "answers beyond the context":
                return EnvironmentAnswer(token_ids=itertools.repeat(5))
            case "is given up meanwhile":
                self.rollout.abort_request(trajectory.request_id)
            case "changes its answer" if answer.token_ids:
                asyncio.get_running_loop().call_soon(answer.token_ids.extend, [6, 6, 6])
        return answer


class FaultyInThreads(Faulty):
    """A faulty adder with a plain method, whose hanging calls never return."""

    def step(self, trajectory, turn):
        kind = self.fault(trajectory, turn)
        if kind in ("hangs", "answers again, too late"):
            self.free.wait()
        if kind in ("is given up meanwhile", "changes its answer"):  # only the event loop may do so
            self.faults.pop(trajectory.request_id, None)
            kind = None
        return self.instant(kind, trajectory, turn)


def groups_of(count, n=8):
    return [
        PromptGroup(f"g{number}", (5, 6, 7 + number), n, MOST_TOKENS, seed=number) for number in range(count)
    ]


def groups_that_stop(count):
    """Return groups of one response each, which the model ends by itself."""
    stops = (seed for seed in itertools.count() if 0 in tokens_of(request_seed(seed, 0), 3, 97))
    return [
        PromptGroup(f"g{seed}", (5, 6, 7), 1, MOST_TOKENS, seed=seed)
        for seed in itertools.islice(stops, count)
    ]


def tokens_of(seed, start, count):
    """Return the tokens that engines without a model write from a place on, to the end of the response."""
    found = []
    for place in range(start, start + count):
        found.append((seed + place * place) % 97)
        if found[-1] == 0:
            break
    return found


async def roll_out(runtime, environment, groups):
    made = []

    class Noted(EnvironmentCalls):
        def __init__(self, *arguments, **options):
            super().__init__(*arguments, **options)
            made.append(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("seer_session.runtime.EnvironmentCalls", Noted)
        result = await roll_out_to_its_end(runtime, environment, groups)
    [calls] = made
    assert not any((calls._calls, calls._waiting, calls._begun))
    return result


async def roll_out_to_its_end(runtime, environment, groups):
    async with runtime:
        rollout = runtime.open(environment=environment)
        environment.rollout = rollout
        rollout.add(groups)
        rollout.close()
        result = await rollout.wait()
    return result


def strike(engines, environment, groups, expected):
    """Roll out with a faulty environment, and compare each response with that of a sound one."""
    with capture_logs():
        result = asyncio.run(
            asyncio.wait_for(roll_out(engines(timeout_s=LIMIT_S), environment, groups), PATIENCE_S)
        )
    environment.free.set()
    assert sorted(each.request_id for each in result.completions) == sorted(expected)
    for each in result.completions:
        sound = expected[each.request_id]
        kind, number = environment.faults.get(each.request_id, (None, None))
        if kind is None:
            assert (list(each.token_ids), each.finish_reason, each.error) == (*sound[:2], None)
            continue
        before = sum(turn.tokens + turn.answer_tokens for turn in sound[2][:number]) + sound[2][number].tokens
        assert list(each.token_ids[:before]) == sound[0][:before]
        assert each.finish_reason == ENDS.get(kind, "error"), kind
        assert REASONS.get(kind, "") in (each.error or "")
        assert len(each.token_ids) == (
            MOST_TOKENS if kind in ENDS and each.error is None and each.finish_reason == "length" else before
        )
    assert sorted(environment.begun) == sorted(environment.closed)
    return Counter(kind for kind, _ in environment.faults.values())


@pytest.mark.parametrize("make", [Faulty, FaultyInThreads])
def test_each_fault_of_an_environment_ends_its_response_alone(engines, soak, make):
    groups, found = groups_of(24), Counter()
    sound = asyncio.run(asyncio.wait_for(roll_out(engines(), Adder(), groups), PATIENCE_S))
    expected = {
        each.request_id: (list(each.token_ids), each.finish_reason, each.turns) for each in sound.completions
    }
    end = time.monotonic() + 60 * soak.minutes
    for seed in itertools.count(soak.seed):
        found += strike(engines, make(seed), groups, expected)
        if time.monotonic() > end:
            break
    print(f"{found.total()} faults: {dict(found)}")
    wanted = (
        set(KINDS)
        - {"changes its answer"}
        - ({"is given up meanwhile"} if make is FaultyInThreads else set())
    )
    assert set(found) == wanted


@pytest.mark.parametrize("plain", [False, True], ids=["coroutines", "threads"])
def test_a_thousand_tools_that_never_return_end_with_their_reasons(engines, plain):
    free = threading.Event()

    class Stuck(Adder):
        async def step(self, trajectory, turn):
            await asyncio.Event().wait()

    class StuckInThreads(Adder):
        def step(self, trajectory, turn):
            free.wait()

    runtime = engines(timeout_s=1.0, at_once=50 if plain else 1000)
    before = threading.active_count()
    with capture_logs() as logs, pytest.raises(EngineError, match=r"all 1000 requests ended in an error"):
        asyncio.run(
            asyncio.wait_for(
                roll_out(runtime, StuckInThreads() if plain else Stuck(), groups_that_stop(1000)), PATIENCE_S
            )
        )
    reasons = Counter(each["reason"] for each in logs if each["event"] == "environment_failed")
    late = sum(number for reason, number in reasons.items() if "took more than 1 s" in reason)
    refused = sum(
        number for reason, number in reasons.items() if "calls of its environment have not" in reason
    )
    assert (late, refused) == ((100, 900) if plain else (1000, 0))
    assert threading.active_count() - before <= 110
    free.set()


# Harnesses.


class Harness:
    """An agent whose turns are requests; some of them are faults, which follow from the seed."""

    def __init__(self, seed, number, url, faults):
        self.chance, self.faults, self.url = random.Random(f"{seed} {number}"), faults, url
        self.trajectory, self.group = f"agent-{number}", f"task-{number // 4}"
        self.seed, self.prompt = number, [5, 6, 7]

    def body(self, **more):
        return {
            "prompt": self.prompt,
            "seed": self.seed,
            "max_tokens": 60,
            "trajectory": self.trajectory,
            "group": self.group,
            "return_token_ids": True,
            **more,
        }

    @property
    def wanted(self):
        """The tokens of the next turn."""
        return tokens_of(request_seed(self.seed, 0), len(self.prompt), 60)

    async def work(self, client):
        for _ in range(6):
            kind = self.chance.choice((None, None, *HARNESS_FAULTS))
            self.faults[kind] += kind is not None
            if kind is not None and not await HARNESS_FAULTS[kind](self, client):
                return
            await self.turn(client)
            self.prompt = [*self.prompt, *self.wanted, 9]
        if self.chance.random() < 0.5:
            await client.delete(f"{self.url}/v1/trajectories/{self.trajectory}")

    async def turn(self, client):
        answer = await client.post(f"{self.url}/v1/completions", json=self.body())
        assert answer.status_code == 200, answer.text
        [choice] = answer.json()["choices"]
        assert choice["token_ids"] == self.wanted

    async def vanish(self, client):
        return await self.leave(client) and False

    async def leave(self, client):
        async with client.stream("POST", f"{self.url}/v1/completions", json=self.body(stream=True)) as answer:
            assert answer.status_code == 200
        return True

    async def give_up_waiting(self, client):
        with suppress(httpx.TimeoutException):
            await client.post(f"{self.url}/v1/completions", json=self.body(), timeout=0.002)
        return True

    async def come_twice(self, client):
        await asyncio.gather(self.turn(client), self.turn(client))
        return True

    async def end_meanwhile(self, client):
        turn = asyncio.ensure_future(self.turn(client))
        await client.delete(f"{self.url}/v1/trajectories/{self.trajectory}")
        await client.delete(f"{self.url}/v1/groups/{self.group}")
        await turn
        return True

    async def go_beyond_the_context(self, client):
        answer = await client.post(f"{self.url}/v1/completions", json=self.body(prompt=[5] * 5000))
        assert answer.status_code == 400
        assert "the prompt has 5000 tokens, the model takes 4096" in answer.text
        return True


HARNESS_FAULTS = {
    "vanishes in a turn": Harness.vanish,
    "leaves a stream and comes again": Harness.leave,
    "gives up waiting and comes again": Harness.give_up_waiting,
    "comes twice at a time": Harness.come_twice,
    "ends its trajectory in a turn": Harness.end_meanwhile,
    "goes beyond the context": Harness.go_beyond_the_context,
}


async def serve(app, work):
    """Serve an application, and return what ``work`` does with its url."""
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning", lifespan="on"))
    serving = asyncio.create_task(server.serve())
    await aeventually(lambda: server.started or serving.done())
    assert not serving.done(), "the server did not start"
    try:
        return await work(f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}")
    finally:
        server.should_exit = True
        await serving


def test_harnesses_that_vanish_or_misbehave_leave_nothing_at_the_server(engines, soak):
    faults = Counter()
    app = make_app(partial(engines), trajectory_idle_s=1.0)
    broker = app.state.broker

    async def work(url):
        end = time.monotonic() + 60 * soak.minutes
        async with httpx.AsyncClient(timeout=PATIENCE_S) as client:
            for seed in itertools.count(soak.seed):
                harnesses = [Harness(seed, number, url, faults) for number in range(32)]
                await asyncio.gather(*(each.work(client) for each in harnesses))
                if time.monotonic() > end:
                    break
        kept = broker.trajectories
        await aeventually(
            lambda: not (broker.unfinished or broker._subscriptions or kept.kept or kept.kept_groups)
        )
        assert not kept._under_way

    asyncio.run(asyncio.wait_for(serve(app, work), PATIENCE_S + 60 * soak.minutes))
    print(f"{faults.total()} faults: {dict(faults)}")
    assert faults.keys() == HARNESS_FAULTS.keys() | {None}
