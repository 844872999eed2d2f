"""Strategies, drafters, an observer and the running of coroutines, as the tests of a runtime share them."""

import asyncio
import threading

import attrs
import msgspec
from seer_context_sched import ContextAware
from seer_divided_rollout import Chunks, KvAware

from seer_core.ports.drafting import SourceSpec, StepTimes
from seer_core.scheduling.scheduler import Policies, Slot
from tests.support.eventually import PATIENCE_S

SIM = {
    "instances": 3,
    "kv_capacity_tokens": 8192,
    "max_model_tokens": 2048,
    "max_running": 32,
    "lengths": {"mean_tokens": 420.0, "cap_tokens": 1000},
}
SMALL_SIM = SIM | {
    "instances": 2,
    "kv_capacity_tokens": 4096,
    "max_running": 16,
    "lengths": {"mean_tokens": 200.0, "cap_tokens": 600},
}
RECORDS = [{"prompt": "a", "n": 3}, {"prompt": "b", "n": 2}]
SMALL = "[rollout]\nmax_tokens = 40\n[engine.sim.lengths]\nmean_tokens = 20"

HEAD = "from seer_core.plugins.hookspecs import hookimpl\n"

NAMED_QUEUE = f"""{HEAD}
from seer_core.scheduling.defaults import FirstComeFirstServed

@hookimpl
def seer_make_prioritizer():
    return FirstComeFirstServed()
"""


class Recorder:
    """An observer that keeps the events."""

    def __init__(self):
        self.seen = []

    def observe(self, now, event, commands):
        self.seen.append(event)


def policies(**strategies):
    return Policies(**{name: Slot(name, "mine", strategy) for name, strategy in strategies.items()})


def divided(chunk_tokens=64):
    return policies(splitter=Chunks(chunk_tokens), placer=KvAware(0.25), prioritizer=ContextAware())


def play(coroutine):
    """Run a coroutine; one that waits for what never comes fails instead of hanging."""
    return asyncio.run(asyncio.wait_for(coroutine, PATIENCE_S))


async def turns(count=10):
    """Let tasks that are ready go on."""
    for _ in range(count):
        await asyncio.sleep(0)


def roll_out(runtime, groups):
    async def run():
        async with runtime:
            return await runtime.rollout(groups).wait()

    return play(run())


def outputs(result):
    """Return everything that the noise of a response decides, by request."""
    return {
        each.request_id: (each.token_ids, each.logprobs, each.finish_reason) for each in result.completions
    }


def tokens(completions):
    return {each.request_id: list(each.token_ids) for each in completions}


async def request_ids(rollout):
    return [completion.request_id async for completion in rollout]


def with_timeout(groups, timeout_s):
    return [msgspec.structs.replace(group, timeout_s=timeout_s) for group in groups]


def in_a_thread(work):
    """Call ``work`` in another thread and return or raise what it does."""
    outcome = []

    def run():
        try:
            outcome.append((work(), None))
        except BaseException as error:
            outcome.append((None, error))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(PATIENCE_S)
    [(answer, error)] = outcome
    if error is not None:
        raise error
    return answer


@attrs.define(eq=False)
class Noted:
    """A drafter whose sharing a test chooses."""

    sharing: bool = False

    def source(self):
        return SourceSpec("noted:Source", {}, 4)

    def shares(self):
        return self.sharing

    def policy(self, step_times: StepTimes):
        return None


@attrs.define(eq=False)
class Remembering(Noted):
    """A drafter with a memory of one prompt's responses."""

    kept: list = attrs.Factory(list)

    def recall(self, prompt):
        return [tokens for asked, tokens in self.kept if list(asked) == list(prompt)]

    def remember(self, prompt, response):
        self.kept.append((prompt, response))

    def clear(self):
        self.kept.clear()
