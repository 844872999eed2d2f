"""How soon does a response end by an error of user code, of whichever class it is?

Each class of error is raised once by each kind of user code, in a rollout of two responses of which only the
second meets it.  The classes are all of Python's own and those that libraries raise with bad luck: texts that
raise, attributes that raise, megabytes, lone surrogates, interrupts.  Time runs from the moment before
the error is made until the response is over; for an observer until both are, and for a placer until the
rollout has ended.  Rewards are computed in a process of their own.  Engines have no model and answer at once;
clocks are real.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import os
import sys
import tempfile
import textwrap
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from seer_session.environment import EnvironmentAnswer
from seer_session.runtime import Runtime

from bench.harness import ROOT, Row, cell, markdown, spread_of
from seer_core.errors import SeerError
from seer_core.model import Completion, PromptGroup
from seer_core.plugins.slots import Assembly, Strategies
from seer_core.scheduling.scheduler import Policies, Slot

DEPENDS_ON = (
    "seer_core/error_origin.py",
    "seer_core/runtime/observers.py",
    "session/seer_session/environment_calls.py",
    "training/rl/seer_rl/reward_worker.py",
    "tests/support/raising.py",
)
ROUNDS = 1
ENGINES = ROOT / "examples/plugins/engines"
DONE = EnvironmentAnswer(done=True)
NOT_FOR_TASKS = ("attributes raise", "class raises", "an end of its own")
"""Classes on which Python's own task groups fail."""


class Raiser:
    """Raises the error of a name, and keeps the moment before."""

    def __init__(self) -> None:
        self.name = ""
        self.began_s = 0.0

    def __call__(self) -> None:
        """Keep the moment, and raise the error."""
        from tests.support.raising import raise_one

        self.began_s = time.perf_counter()
        raise_one(self.name)


class CoroutineTool:
    """An environment whose second response meets the error in a coroutine."""

    def __init__(self, fail: Raiser) -> None:
        self.fail = fail

    async def step(self, trajectory: Any, turn: Any) -> EnvironmentAnswer:
        """Raise for the second response."""
        if trajectory.index:
            self.fail()
        return DONE


class PlainTool(CoroutineTool):
    """An environment whose second response meets it in a plain method, which runs in a thread."""

    def step(self, trajectory: Any, turn: Any) -> EnvironmentAnswer:  # type: ignore[override]
        """Raise for the second response."""
        if trajectory.index:
            self.fail()
        return DONE


class TaskTool(CoroutineTool):
    """An environment whose second response meets it in a task that it makes."""

    async def step(self, trajectory: Any, turn: Any) -> EnvironmentAnswer:
        """Wait for the task."""
        return await asyncio.ensure_future(super().step(trajectory, turn))


class ResetTool(CoroutineTool):
    """An environment whose second response meets it as it begins."""

    async def reset(self, trajectory: Any, earlier: Any) -> None:
        """Raise for the second response."""
        if trajectory.index:
            self.fail()

    async def step(self, trajectory: Any, turn: Any) -> EnvironmentAnswer:
        """End each response."""
        return DONE


TOOLS = {
    "an environment's coroutine": CoroutineTool,
    "an environment's plain method": PlainTool,
    "an environment's own task": TaskTool,
    "an environment's `reset`": ResetTool,
}


class Ends:
    """An observer that keeps when each response was over."""

    def __init__(self) -> None:
        self.at_s: dict[str, float] = {}

    def observe(self, now: float, event: Any, commands: Any) -> None:
        """Do nothing."""

    def completed(self, now: float, completion: Completion) -> None:
        """Keep the moment."""
        self.at_s[completion.request_id] = time.perf_counter()


class RaisingObserver:
    """An observer that meets the error at the first event."""

    def __init__(self, fail: Raiser) -> None:
        self.fail = fail

    def observe(self, now: float, event: Any, commands: Any) -> None:
        """Meet the error."""
        self.fail()


class RaisingPlacer:
    """A placer that meets the error at its first choice."""

    def __init__(self, fail: Raiser) -> None:
        self.fail = fail

    def place(self, *given: Any) -> None:
        """Meet the error."""
        self.fail()


Outcome = tuple[str, bool, float]
"""The reason, whether the rest of the rollout went on, and the seconds."""


def options(parser: argparse.ArgumentParser) -> None:
    """Add nothing: the classes are those of ``tests/support/raising.py``."""


def run(options: argparse.Namespace) -> list[Row]:
    """Let each kind of code raise each class of error."""
    from tests.support.raising import ERRORS

    sys.path.insert(0, str(ENGINES))
    rows = []
    for kind, measure in _kinds():
        names = [each for each in ERRORS if kind != "an environment's own task" or each not in NOT_FOR_TASKS]
        found = asyncio.run(measure(names))
        rows += [_row(kind, found)]
        print(f"{kind}: {len(found)} errors", file=sys.stderr, flush=True)
    return rows


def _row(kind: str, found: dict[str, Outcome]) -> Row:
    from tests.support.raising import class_of

    return {
        "kind": kind,
        "errors": len(found),
        "named": sum(class_of(name) in reason for name, (reason, *_) in found.items()),
        "others_finished": sum(whole for _, whole, _ in found.values()),
        "seconds": spread_of(seconds for *_, seconds in found.values()),
    }


def _kinds() -> Iterator[tuple[str, Callable[[Sequence[str]], Awaitable[dict[str, Outcome]]]]]:
    for kind, tool in TOOLS.items():
        yield kind, lambda names, tool=tool: _with_tool(tool, names)  # type: ignore[misc]
    yield "a reward", _with_reward
    yield "an observer", _with_observer
    yield "a placer", _with_placer


def _runtime(policies: Policies, *observers: Any) -> Runtime:
    module = importlib.import_module("seer_no_model")
    fleet = module.NoModelFleet(module.Settings(instances=1, token_s=0.0))
    slots = tuple(Slot("observer", "mine", each) for each in observers)
    return Runtime(Assembly(fleet, Strategies(policies, slots)))


def _group(number: int) -> PromptGroup:
    """Return a group whose responses end by themselves, as those of ``seer_no_model`` with such seeds do."""
    return PromptGroup(f"g{number}", (5, 6, 7), 2, 100, seeds=(0, 97))


async def _with_tool(tool: type[CoroutineTool], names: Sequence[str]) -> dict[str, Outcome]:
    ends, fail, found = Ends(), Raiser(), {}
    async with _runtime(Policies(), ends) as runtime:
        for number, name in enumerate(names):
            fail.name = name
            result = await runtime.rollout([_group(number)], environment=tool(fail)).wait()
            first, second = sorted(result.completions, key=lambda each: each.index)
            seconds = ends.at_s[second.request_id] - fail.began_s
            found[name] = second.error or "", first.finish_reason == "stop", seconds
    return found


async def _with_observer(names: Sequence[str]) -> dict[str, Outcome]:
    """Leave a failed observer out, as nothing ends by it; seconds are until both responses are over."""
    from structlog.testing import capture_logs

    found = {}
    for number, name in enumerate(names):
        ends, fail = Ends(), Raiser()
        fail.name = name
        with capture_logs() as logs:
            async with _runtime(Policies(), RaisingObserver(fail), ends) as runtime:
                result = await runtime.rollout([_group(number)]).wait()
        [reason] = [log["error"] for log in logs if log["event"] == "observer_failed"]
        whole = all(each.finish_reason in ("stop", "length") for each in result.completions)
        found[name] = reason, whole, max(ends.at_s.values()) - fail.began_s
    return found


async def _with_placer(names: Sequence[str]) -> dict[str, Outcome]:
    """No placer, no rollout: its error ends the rollout, and is raised there."""
    found: dict[str, Outcome] = {}
    for number, name in enumerate(names):
        fail = Raiser()
        fail.name = name
        async with _runtime(Policies(placer=Slot("placer", "mine", RaisingPlacer(fail)))) as runtime:  # type: ignore[arg-type]
            try:
                await runtime.rollout([_group(number)]).wait()
            except SeerError as error:
                found[name] = str(error), False, time.perf_counter() - fail.began_s
    return found


REWARD = """
from tests.support.raising import raise_one

def reward(response):
    if name := response.metadata["raises"]:
        raise_one(name)
    return 1.5
"""


async def _with_reward(names: Sequence[str]) -> dict[str, Outcome]:
    from seer_rl import Response, RewardError
    from seer_rl.rewards import RewardPool

    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "raising_reward.py").write_text(textwrap.dedent(REWARD))
        with RewardPool("raising_reward.py:reward", Path(folder), 1, 60.0) as pool:
            for name in names:
                began_s = time.perf_counter()
                try:
                    reason = (
                        f"it gave {pool.submit(Response({'raises': name}, 'text', [5], 'stop')).result()}"
                    )
                except RewardError as error:
                    reason = str(error)
                seconds = time.perf_counter() - began_s
                other = pool.submit(Response({"raises": ""}, "text", [5], "stop")).result()
                found[name] = reason, other == 1.5, seconds
    return found


def table(rows: Sequence[Row]) -> str:
    """Return a line for each kind of code."""
    columns = [
        "raised by",
        "errors",
        "named by their class",
        "the other response finished",
        "ms until the end",
    ]
    lines = [
        [
            row["kind"],
            str(row["errors"]),
            str(row["named"]),
            "-" if row["kind"] == "a placer" else str(row["others_finished"]),
            cell({key: 1000 * value for key, value in row["seconds"].items()}),
        ]
        for row in rows
    ]
    return markdown(columns, lines)


def answer(rows: Sequence[Row]) -> str:
    """Return how many errors were named, and the longest time."""
    errors = sum(row["errors"] for row in rows)
    named = sum(row["named"] for row in rows)
    others = sum(row["others_finished"] for row in rows if row["kind"] != "a placer")
    asked = sum(row["errors"] for row in rows if row["kind"] != "a placer")
    longest_s = max(row["seconds"]["most"] for row in rows)
    return (
        f"Of {errors} errors of user code {named} were named by their class, at most {longest_s:.2f} s after"
        f" they were raised. {others} of {asked} responses beside them went on; a placer's error"
        " ends its rollout."
    )
