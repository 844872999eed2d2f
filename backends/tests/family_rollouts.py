"""Rollouts of a tiny model in which every chunk moves, and harm is done on the way."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from typing import Any

import attrs
from seer_session.assembly import fill_slots
from seer_session.runtime import Runtime

from backends.tests.mover import Mover
from bench.models import BlockEnds, FamilyRun
from seer_core.plugins.slots import Strategies
from seer_core.scheduling.scheduler import Slot

__all__ = ["killing", "moving", "tokens_of", "undivided"]


def moving(
    run: FamilyRun,
    runtime: Runtime,
    plugins: Sequence[str],
    acts: Sequence[tuple[int, Callable[[], bool]]] = (),
) -> Strategies:
    """Return strategies that move every chunk to another instance, and do harm on the way."""
    strategies = fill_slots(run.config("local", plugins, run.models[0]))
    placer = Slot("placer", "mover", Mover(acts))
    splitter = Slot("splitter", "blocks", BlockEnds(run.block_tokens))
    policies = attrs.evolve(strategies.policies, placer=placer, splitter=splitter)
    return attrs.evolve(strategies, policies=policies, drafter=runtime.drafter)


def undivided(run: FamilyRun, runtime: Runtime) -> Strategies:
    """Return strategies that divide no response."""
    return attrs.evolve(fill_slots(run.config("local", (), run.models[0])), drafter=runtime.drafter)


def killing(runtime: Runtime, name: str, first: Callable[[], None] = lambda: None) -> Callable[[], bool]:
    """Return an act that does something, and then kills an instance's worker."""

    def kill() -> bool:
        worker: Any = runtime.engines[name].worker
        first()
        os.kill(worker.pid, signal.SIGKILL)
        return True

    return kill


def tokens_of(result: Any) -> dict[str, list[int]]:
    """Return the tokens of a rollout's completions by their names."""
    return {each.request_id: list(each.token_ids) for each in result.completions}
