"""Code of users as input: what an environment, a strategy or a reward raises and answers, drawn at random."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import structlog
from seer_host.tables import TurnsTable
from seer_rl import Response
from seer_rl.rewards import LARGEST_REWARD, RewardPool
from seer_session.environment import EnvironmentAnswer, ModelTurn, Trajectory
from seer_session.environment_calls import EncodedAnswer, EnvironmentCalls, Question
from seer_sim.tokens import ByteTokenizer

from seer_core.errors import PluginError, SeerError
from seer_core.model import InstanceInfo
from seer_core.model.events import GroupSpec, GroupsSubmitted, InstanceStarted, RequestsAborted
from seer_core.ports.clock import RealClock
from seer_core.ports.engine import ModelInfo
from seer_core.runtime.observers import ObserverHub
from seer_core.scheduling.defaults import FirstComeFirstServed, LeastLoaded, WholeRequests
from seer_core.scheduling.scheduler import Policies, Scheduler, Slot
from tests.support.raising import ERRORS
from tests.support.virtual_time import run_in_virtual_time

__all__ = [
    "ANSWERS",
    "CHOICES",
    "RAISED",
    "REWARDS",
    "reward_pool",
    "try_answer",
    "try_choice",
    "try_raised",
    "try_reward",
]

TIMEOUT_S = 60.0

ANSWERS = (
    {"token_ids": [5, 6], "reward": 0.5},
    {"text": "ab", "reward": -1.0, "delay_s": 2.5},
    {"messages": [{"role": "tool", "content": "cd"}], "chat_template_kwargs": {"tools": []}},
    {"done": True, "reward": 1e300},
)
"""Fields of an answer."""

CHOICES = (
    {"slot": "splitter", "method": "split", "answer": 4},
    {"slot": "placer", "method": "has_room", "answer": True},
    {"slot": "prioritizer", "method": "group_changed", "answer": None},
)
"""A method of a strategy, and its answer."""

RAISED = tuple(
    {"where": where, "class": kind, "text": "no luck"}
    for where in ("step", "plain", "task", "reset", "observe", "place", "split", "peek")
    for kind in ("KeyboardInterrupt", "CancelledError", "ValueError", "none")
)
"""A place, the class that is raised there, ``none`` for no error, and its text."""

REWARDS = (
    {"class": "none", "answer": 1.5},
    {"class": "none", "answer": "-2", "environment_reward": 3.0},
    {"class": "none", "answer": 1e15, "more": {"print": "x"}},
    {"class": "KeyboardInterrupt", "answer": None},
)
"""The class that a reward raises, or its answer, and the reward of the response's environment."""

REWARD_CODE = """
from tests.support.raising import ERRORS, raise_one

def reward(response):
    name = response.metadata.get("class")
    if isinstance(name, str) and name in ERRORS:
        raise_one(name)
    return response.metadata.get("answer")
"""

DEFAULTS = {"prioritizer": FirstComeFirstServed, "splitter": WholeRequests, "placer": LeastLoaded}
SLOT_OF = {"place": "placer", "split": "splitter", "peek": "prioritizer"}


def _read(data: bytes) -> dict[str, Any]:
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise SeerError("no such code of a user")
    return found


class _Listener:
    """Keeps what becomes of one turn."""

    def __init__(self) -> None:
        self.found: asyncio.Future[EncodedAnswer | str] = asyncio.get_running_loop().create_future()

    def extend(
        self, request_id: str, token_ids: list[int], reward: float | None, done: bool, images: object = None
    ) -> None:
        self.found.set_result(EncodedAnswer(token_ids, reward, done))

    def extension_failed(self, request_id: str, reason: str) -> None:
        self.found.set_result(reason)


def _ask(environment: Any) -> None:
    """Ask about one turn; raises SeerError with the reason if it fails."""

    async def story() -> EncodedAnswer | str:
        listener = _Listener()
        settings = TurnsTable(timeout_s=TIMEOUT_S)
        model = ModelInfo(200, 1000)
        calls = EnvironmentCalls(environment, settings, RealClock(), model, ByteTokenizer(), listener)
        trajectory = Trajectory("g/0", "g", 0, 7, (1, 2, 3), {}, {})
        calls.ask(Question(trajectory, ModelTurn(0, [5, 6], "ab", None, 10), tuple))
        found = await listener.found
        assert asyncio.get_running_loop().time() <= TIMEOUT_S
        calls.stop()
        await calls.closed()
        return found

    found = run_in_virtual_time(story())
    if isinstance(found, str):
        assert "HangError" not in found
        raise SeerError(found)
    assert found.reward is None or abs(found.reward) <= 1e300
    assert len(found.token_ids) <= 11


def try_answer(workspace: Any, data: bytes) -> None:
    """Let an environment answer with these fields."""
    given = _read(data)
    fields = {name: given[name] for name in EnvironmentAnswer.__struct_fields__ if name in given}

    class Answering:
        async def step(self, trajectory: Any, turn: Any) -> Any:
            return EnvironmentAnswer(**fields) if fields else given

    _ask(Answering())


class _Changed:
    """A strategy with another method."""

    def __init__(self, inner: Any, method: str, call: Any) -> None:
        self._inner, self._method, self._call = inner, method, call

    def __getattr__(self, name: str) -> Any:
        return self._call if name == self._method else getattr(self._inner, name)

    def __len__(self) -> int:
        return len(self._inner)


def _decide(slot: str, method: str, call: Any) -> None:
    async def story() -> None:
        strategy = _Changed(DEFAULTS[slot](), method, call)
        scheduler = Scheduler(Policies(**{slot: Slot(slot, "mine", strategy)}))  # type: ignore[arg-type]
        scheduler.handle(InstanceStarted(InstanceInfo("x", 1000, 1, 8, 1000)), 0.0)
        scheduler.handle(GroupsSubmitted((GroupSpec("g", 8, 2, 4),)), 1.0)
        scheduler.handle(RequestsAborted(("g/0", "g/1")), 2.0)

    try:
        asyncio.run(story())
    except PluginError as error:
        message = str(error)
        if "HangError" in message or not message.startswith(f"plug-in 'mine', slot '{slot}'"):
            raise AssertionError(message) from error
        raise


def try_choice(workspace: Any, data: bytes) -> None:
    """Let a strategy's method answer so."""
    given = _read(data)
    slot, method = str(given.get("slot")), str(given.get("method"))
    if slot not in DEFAULTS or method not in ("split", "place", "peek", "has_room", "group_changed", "tick"):
        raise SeerError("no such strategy")
    _decide(slot, method, lambda *call: given.get("answer"))


def try_raised(workspace: Any, data: bytes) -> None:
    """Let code raise this class with this text."""
    given = _read(data)
    where, kind, text = str(given.get("where")), given.get("class"), given.get("text")
    if kind == "none":
        return
    plain = kind if isinstance(kind, str) and kind in ERRORS else "ValueError"

    def fail(*call: Any) -> Any:
        error = ERRORS[plain]()
        if plain in ("KeyboardInterrupt", "SystemExit", "CancelledError", "ValueError", "GeneratorExit"):
            error.args = (text,)
        raise error

    if where in SLOT_OF:
        _decide(SLOT_OF[where], where, fail)
    elif where == "observe":
        _observe(fail)
    else:
        _ask(_Failing(where, fail))


def _observe(fail: Any) -> None:
    class Observer:
        def observe(self, now: float, event: Any, commands: Any) -> None:
            fail()

    async def story() -> None:
        hub = ObserverHub([Slot("observer", "mine", Observer())])
        hub.notify(0.0, GroupsSubmitted(()), ())
        assert hub.failed == 1

    with structlog.testing.capture_logs() as logs:
        asyncio.run(story())
    raise SeerError(logs[0]["error"])


class _Failing:
    """An environment that fails in one of several ways."""

    def __init__(self, where: Any, fail: Any) -> None:
        self._fail = fail
        if where == "reset":
            self.reset = fail
        self.step = fail if where == "plain" else self._in_a_task if where == "task" else self._in_step

    async def _in_step(self, trajectory: Any, turn: Any) -> Any:
        self._fail()

    async def _in_a_task(self, trajectory: Any, turn: Any) -> Any:
        await asyncio.gather(asyncio.ensure_future(self._in_step(trajectory, turn)), asyncio.sleep(0))


def reward_pool(folder: Path) -> RewardPool:
    """Return a pool whose reward does as the response's metadata says."""
    (folder / "of_metadata.py").write_text(REWARD_CODE)
    return RewardPool("of_metadata.py:reward", folder, 1, TIMEOUT_S)


def try_reward(workspace: Any, data: bytes) -> None:
    """Let a reward raise or answer so."""
    given = _read(data)
    environment = given.get("environment_reward")
    reward = environment if isinstance(environment, float) else None
    response = Response(given, "ab", [5, 6], "stop", environment_reward=reward)
    assert abs(workspace.rewards.submit(response).result()) <= LARGEST_REWARD
