"""Rollouts over KV pools: the half of ``kv_pool.py`` that rolls out, and how its figures are shown."""

from __future__ import annotations

import argparse
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import attrs
import msgspec
from equality import EXAMPLE, Nomad

from seer_core import figures
from seer_core.config import Config, load_config
from seer_core.model import GroupContext, InstanceStatus, Request
from seer_core.plugins import fill_slots
from seer_core.prompts import read_prompts
from seer_core.runtime import Runtime
from seer_core.scheduler import Slot

__all__ = ["Row", "config_of", "larger_ways", "rollout_ways", "rollouts", "shown", "spread"]

Row = dict[str, Any]
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


def spread(values: Iterable[float]) -> Row:
    """Return the median, least and most, as JSON has them."""
    return figures.spread(values)._asdict()


def shown(figure: Row, digits: int = 1) -> str:
    """Return a spread as text."""
    return f"{figure['median']:9,.{digits}f} [{figure['least']:,.{digits}f}, {figure['most']:,.{digits}f}]"


def config_of(options: argparse.Namespace, overrides: Sequence[str]) -> Config:
    """Return the example's config, in chunks and without drafts."""
    chunk = f"plugin.divided_rollout.chunk_tokens={options.chunk}"
    config = load_config(EXAMPLE / "demo.toml", [chunk, *overrides, *options.set])
    return config.with_plugins(("divided_rollout", "context_sched"))


class Settler(Nomad):
    """Placer that never lets a request move: its first instance is the emptiest one."""

    def place(
        self, request: Request, chunk_tokens: int, instances: Sequence[InstanceStatus]
    ) -> InstanceStatus | None:
        """Return the request's instance, once it has one."""
        home = [instance for instance in instances if instance.id == request.instance]
        fits = [
            instance
            for instance in home or instances
            if instance.free_slots > 0
            and instance.footprint(request, chunk_tokens) <= instance.free_kv_tokens
        ]
        return max(fits, key=lambda instance: (instance.free_kv_tokens, -instance.seq), default=None)


class Turns:
    """Prioritizer that lets all responses grow at one pace, so that all their KV is alive at once."""

    def __init__(self) -> None:
        self._queue: deque[Request] = deque()

    def push(self, request: Request) -> None:
        """Go to the end."""
        self._queue.append(request)

    def peek(self) -> Request | None:
        """Return who has waited longest."""
        return self._queue[0] if self._queue else None

    def take(self, request: Request) -> None:
        """Leave the queue."""
        self._queue.remove(request)

    def group_changed(self, group: GroupContext, request: Request) -> None:
        """Learn nothing."""

    def __len__(self) -> int:
        return len(self._queue)


@attrs.frozen
class Way:
    """A way to roll out: overrides of the config, and strategies beside those of the plug-ins."""

    name: str
    overrides: tuple[str, ...]
    strategies: dict[str, Callable[[], Any]]


def rollout_ways(options: argparse.Namespace) -> list[Way]:
    """Return: never moving, always moving with each pool, and with none."""
    pools = [(f"seer.kv_pool={name}",) for name in options.pool]
    return [
        Way("never moving", pools[0], {"placer": Settler}),
        *(
            Way(f"always, {name}", pool, {"placer": Nomad})
            for name, pool in zip(options.pool, pools, strict=True)
        ),
        Way("always, no pool", ("seer.kv_pool=none",), {"placer": Nomad}),
    ]


def larger_ways(options: argparse.Namespace) -> list[Way]:
    """Return: no pool, a small one, and one with a disk tier."""
    memory = ("seer.kv_pool=local", f"kv_pool.local.capacity_bytes={options.memory_mib << 20}")
    disk = f"kv_pool.local.disk_bytes={options.disk_mib << 20}"
    turns: dict[str, Callable[[], Any]] = {"prioritizer": Turns}
    return [
        Way("prefilled again", ("seer.kv_pool=none",), turns),
        Way("memory", memory, turns),
        Way("memory and disk", (*memory, disk), turns),
    ]


async def rollouts(options: argparse.Namespace, part: str, ways: Sequence[Way], groups: int) -> list[Row]:
    """Roll out in all ways, in turn, --rollouts times; the engines start anew each time."""
    rows: list[Row] = []
    expected: dict[str, list[int]] = {}
    for number in range(options.rollouts):
        for way in ways[:: -1 if number % 2 else 1]:
            config = config_of(options, list(way.overrides))
            async with Runtime.from_config(config) as runtime:
                model, tokenizer = runtime.fleet.model, runtime.fleet.tokenizer
                read = read_prompts(EXAMPLE / "prompts.jsonl", config.rollout, model, tokenizer)
                strategies = fill_slots(config)
                slots = {name: Slot(name, "benchmark", make()) for name, make in way.strategies.items()}
                policies = attrs.evolve(strategies.policies, **slots)
                await runtime.use(attrs.evolve(strategies, policies=policies))
                pool = None if runtime.kv_pool is None else runtime.kv_pool.strategy
                before = None if pool is None else pool.stats()
                result = await runtime.rollout(read.groups[:groups]).wait()
                room = sum(info.kv_capacity_tokens for info in runtime.living.values())
                stats = {}
                if pool is not None and before is not None:
                    stats = msgspec.to_builtins(pool.stats().since(before))
            tokens = {one.request_id: one.token_ids for one in result.completions}
            expected = expected or tokens
            prompts = {group.id: len(group.prompt_token_ids) for group in read.groups}
            kv_tokens = sum(prompts[one.group_id] + len(one.token_ids) for one in result.completions)
            row = {"part": part, "way": way.name, "round": number, "same_tokens": tokens == expected}
            row |= {name: getattr(result.summary, name) for name in FIGURES}
            row |= {"kv_of_capacity": kv_tokens / room, "pool": stats}
            rows.append(row)
            print(
                f"{part} {way.name:16} {row['total_time_s']:7.1f} s {row['migrations']:5} migrations; tokens"
                f" {row['cached_tokens']:9,} cached {row['pool_tokens']:9,} pool"
                f" {row['prefilled_tokens']:9,} prefilled; KV {row['kv_of_capacity']:.1f}x the engines';"
                f" same tokens: {row['same_tokens']}",
                flush=True,
            )
    return [*rows, *_ratios(part, rows)]


def _ratios(part: str, rows: Sequence[Row]) -> list[Row]:
    """Return each way's time, and how many times as fast as the slowest's of the same round it is."""
    times: dict[str, dict[int, float]] = defaultdict(dict)
    for row in rows:
        times[row["way"]][row["round"]] = row["total_time_s"]
    base_name = max(times, key=lambda name: spread(times[name].values())["median"])
    found = []
    for name, by_round in times.items():
        ratio = spread(times[base_name][number] / taken for number, taken in by_round.items())
        total_s = spread(by_round.values())
        found.append({"part": part, "way": name, "s": total_s, f"times as fast as {base_name}": ratio})
        print(f"{part} {name:16} {shown(total_s)} s, {shown(ratio, 2)} times as fast as {base_name}")
    return found
