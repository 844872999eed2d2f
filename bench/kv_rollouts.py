"""Rollouts over KV pools: the half of ``kv_pool`` that rolls out."""

from __future__ import annotations

import argparse
import sys
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import msgspec

from bench.frame import EXAMPLE, Row, prompts, turned
from bench.placers import AlwaysMigrate, NeverMigrate
from seer_core.model import GroupContext, Request
from seer_core.plugins.config import Config, load_config
from seer_core.plugins.loading import fill_slots
from seer_core.runtime.runtime import Runtime
from seer_core.scheduling.scheduler import Slot

__all__ = ["config_of", "larger_ways", "rollout_ways", "rollouts"]

FIGURES = (
    "tokens",
    "total_time_s",
    "tail_time_s",
    "chunks",
    "migrations",
    "preemptions",
    "cached_tokens",
    "pool_tokens",
    "prefilled_tokens",
    "recomputed_tokens",
)


def config_of(options: argparse.Namespace, overrides: Sequence[str]) -> Config:
    """Return the example's config, in chunks and without drafts."""
    chunk = f"plugin.divided_rollout.chunk_tokens={options.chunk}"
    config = load_config(EXAMPLE / "demo.toml", [chunk, *overrides, *options.set])
    return config.with_plugins(("divided_rollout", "context_sched"))


class Turns:
    """Prioritizer that lets all responses grow at one pace, so that all their KV is alive at once."""

    def __init__(self) -> None:
        self._queue: deque[Request] = deque()

    def push(self, request: Request) -> None:
        """Put the request at the end."""
        self._queue.append(request)

    def peek(self) -> Request | None:
        """Return the request that has waited longest."""
        return self._queue[0] if self._queue else None

    def take(self, request: Request) -> None:
        """Remove the request."""
        self._queue.remove(request)

    def group_changed(self, group: GroupContext, request: Request) -> None:
        """Groups do not matter."""

    def __len__(self) -> int:
        return len(self._queue)


@attrs.frozen
class RolloutWay:
    """A way to roll out: overrides of the config, and strategies beside those of the plug-ins."""

    name: str
    overrides: tuple[str, ...]
    strategies: dict[str, Callable[[], Any]]


def rollout_ways(options: argparse.Namespace) -> list[RolloutWay]:
    """Return: never moving, always moving with each pool, and with none."""
    pools = [(f"seer.kv_pool={name}",) for name in options.pool]
    return [
        RolloutWay("never moving", pools[0], {"placer": NeverMigrate}),
        *(
            RolloutWay(f"always, {name}", pool, {"placer": AlwaysMigrate})
            for name, pool in zip(options.pool, pools, strict=True)
        ),
        RolloutWay("always, no pool", ("seer.kv_pool=none",), {"placer": AlwaysMigrate}),
    ]


def larger_ways(options: argparse.Namespace) -> list[RolloutWay]:
    """Return: no pool, a small one, and one with a disk tier."""
    memory = ("seer.kv_pool=local", f"kv_pool.local.capacity_bytes={options.memory_mib << 20}")
    disk = f"kv_pool.local.disk_bytes={options.disk_mib << 20}"
    turns: dict[str, Callable[[], Any]] = {"prioritizer": Turns}
    return [
        RolloutWay("prefilled again", ("seer.kv_pool=none",), turns),
        RolloutWay("memory", memory, turns),
        RolloutWay("memory and disk", (*memory, disk), turns),
    ]


async def rollouts(
    options: argparse.Namespace, part: str, ways: Sequence[RolloutWay], groups: int
) -> list[Row]:
    """Roll out in all ways, in turned order, --rollouts times; the engines start anew each time."""
    rows: list[Row] = []
    expected: dict[str, list[int]] = {}
    for number, way in turned(ways, options.rollouts):
        config = config_of(options, list(way.overrides))
        async with Runtime.from_config(config) as runtime:
            strategies = fill_slots(config)
            slots = {name: Slot(name, "benchmark", make()) for name, make in way.strategies.items()}
            policies = attrs.evolve(strategies.policies, **slots)
            await runtime.use(attrs.evolve(strategies, policies=policies))
            pool = None if runtime.kv_pool is None else runtime.kv_pool.strategy
            before = None if pool is None else pool.stats()
            chosen = runtime.groups(prompts(groups), iteration=0)
            result = await runtime.rollout(chosen).wait()
            room = sum(info.kv_capacity_tokens for info in runtime.alive.values())
            stats = {}
            if pool is not None and before is not None:
                stats = msgspec.to_builtins(pool.stats().since(before))
        tokens = {one.request_id: one.token_ids for one in result.completions}
        expected = expected or tokens
        lengths = {group.id: len(group.prompt_token_ids) for group in chosen}
        kv_tokens = sum(lengths[one.group_id] + len(one.token_ids) for one in result.completions)
        row = {"part": part, "way": way.name, "round": number, "same_tokens": tokens == expected}
        row |= {name: getattr(result.summary, name) for name in FIGURES}
        rows.append(row | {"kv_of_capacity": kv_tokens / room, "pool": stats})
        print(f"{part}, {way.name}: {row['total_time_s']:.1f} s", file=sys.stderr, flush=True)
    return rows
