"""Turns of SkyRL's agent loops: each is a request of its own, on a rollout that is open for the batch.

A response's first turn is one of its group, which the scheduler gets as soon as all of its first turns are
asked for.  What an environment has answered differs from response to response, so each further turn is a
group of one, of the first group's family.  A response is a trajectory, whose KV is kept until all are over.
"""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from seer_session import SessionRollout

from seer_core import Completion
from seer_core.errors import ConfigError, SeerError

if TYPE_CHECKING:
    from skyrl.train.generators.base import GeneratorInput, TrajectoryID

__all__ = ["BatchTurns", "group_id_of", "iteration_of"]

Place = tuple[str, int]
"""A request by its group and its index."""


def group_id_of(batch: GeneratorInput, trajectory: TrajectoryID) -> str:
    """Return the name of a trajectory's group: the phase, and the prompt's place in SkyRL's data."""
    return f"{batch['batch_metadata'].training_phase}-{trajectory.instance_id}"


def iteration_of(batch: GeneratorInput) -> int:
    """Return what enters the seeds besides a group's name: the step, but all evaluations are alike."""
    about = batch["batch_metadata"]
    return about.global_step if about.training_phase == "train" else 0


class BatchTurns:
    """The requests of one batch's agent loops, which run in one event loop; made in it."""

    def __init__(self, rollout: SessionRollout, batch: GeneratorInput) -> None:
        self._rollout, self._iteration = rollout, iteration_of(batch)
        self._places: dict[str, Place] = {
            f"{each.instance_id}_{each.repetition_id}": (group_id_of(batch, each), each.repetition_id)
            for each in batch["trajectory_ids"]
        }
        self._sizes = Counter(group_id for group_id, _ in self._places.values())
        self._first: dict[str, dict[int, Sequence[int]]] = {}
        self._asked: Counter[str] = Counter()
        self._waiting: dict[Place, asyncio.Future[Completion]] = {}
        self._loop = asyncio.get_running_loop()
        threading.Thread(target=self._read, name="seer-skyrl-turns", daemon=True).start()

    async def ask(self, session: str, prompt: Sequence[int], wanted: Mapping[str, Any]) -> Completion:
        """Return the next turn of a session, whose prompt has its earlier turns.

        Raises:
            ConfigError: the session is none of the batch's, or its group has another prompt.
        """
        if session not in self._places:
            raise ConfigError(f"SkyRL asks for a turn of {session!r}, which is not in its batch")
        group_id, index = self._places[session]
        number = self._asked[session]
        self._asked[session] += 1
        if number:
            turn = f"{group_id}-{index}-{number}"
            ready = self._expect((turn, 0))
            await self._add(turn, group_id, [index], prompt, wanted)
            return await ready
        ready = self._expect((group_id, index))
        first = self._first.setdefault(group_id, {})
        first[index] = prompt
        if any(each != prompt for each in first.values()):
            raise ConfigError(
                f"SkyRL's environment gives responses of {group_id} different prompts, and a group has"
                " one; let it give them the same"
            )
        if len(first) == self._sizes[group_id]:
            await self._add(group_id, group_id, sorted(first), prompt, wanted)
        return await ready

    def _expect(self, place: Place) -> asyncio.Future[Completion]:
        ready = self._waiting[place] = self._loop.create_future()
        return ready

    async def _add(
        self,
        group_id: str,
        family: str,
        indices: Sequence[int],
        prompt: Sequence[int],
        wanted: Mapping[str, Any],
    ) -> None:
        record = {
            "group_id": group_id,
            "prompt_token_ids": prompt,
            "n": len(indices),
            "family": family,
            "trajectories": [_trajectory(family, index) for index in indices],
            **wanted,
        }
        await asyncio.to_thread(self._rollout.add, [record], self._iteration)

    def forget(self) -> None:
        """Drop what is kept for further turns."""
        for group_id, index in self._places.values():
            self._rollout.forget(_trajectory(group_id, index))
        for group_id in self._sizes:
            self._rollout.forget(group_id)

    def _read(self) -> None:
        """Pass each turn on as it finishes, in a thread, until the rollout is over."""
        try:
            for completion in self._rollout:
                self._loop.call_soon_threadsafe(self._finished, completion)
        except (SeerError, RuntimeError) as error:  # the engines, or SkyRL's event loop, are gone
            if not self._loop.is_closed():
                self._loop.call_soon_threadsafe(self._failed, error)

    def _finished(self, completion: Completion) -> None:
        ready = self._waiting.pop((completion.group_id, completion.index))
        if not ready.done():
            ready.set_result(completion)

    def _failed(self, error: Exception) -> None:
        for ready in self._waiting.values():
            if not ready.done():
                ready.set_exception(error)


def _trajectory(group_id: str, index: int) -> str:
    return f"{group_id}/{index}"
