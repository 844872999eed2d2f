"""A campaign of faults: rollouts on real vLLM engines in which processes die, hang and lose their disk.

Rolls the tiny reasoner's prompts out once without faults, with each of two sets of weights.  Then, until the
plan's count or time is reached, in two ways, chosen by chance from the seed:

  in a runtime   some faults at random times in each rollout: instances and the KV pool's master
                 are killed, paused or hung (SIGKILL, SIGTERM, SIGSTOP); between rollouts weights
                 change, now and then while an instance is being killed
  of a command   `seer run` itself gets SIGINT, SIGTERM or SIGKILL at a random time, or may write only so much
                 to a file (RLIMIT_FSIZE), as on a full disk

Every response has to come once, with the tokens of the rollout without faults; so have those that a command
had written when it ended, in whole lines.  Every rollout has to end in ``bound_s``, and no process may be
left.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from pathlib import Path

import attrs
import msgspec
import numpy as np
from safetensors.numpy import load_file, save_file
from seer_host.config_files import Config, load_config
from seer_session.runtime import Runtime

from bench.harness import EXAMPLE, prompts
from seer_core.errors import SeerError
from seer_core.model import Completion, PromptGroup

from .fault_kinds import KINDS, Fault, children
from .faults_of_command import COMMAND_KINDS, run_command

CONFIG = EXAMPLE / "demo.toml"
UPDATE = "instance killed in a weight update"
FAULTS_PER_ROLLOUT = 3
ROLLOUTS_PER_RUNTIME = 5
SHARE_OF_COMMANDS = 0.15
SHARE_OF_UPDATES = 0.4
ALL_KINDS = (*KINDS, UPDATE, *COMMAND_KINDS)
Texts = dict[str, list[int]]


@attrs.frozen
class Plan:
    """Until when, and with which faults, pools and prompts; ``kinds`` are of ``ALL_KINDS``."""

    seed: int = 0
    count: int | None = None
    minutes: float | None = None
    kinds: tuple[str, ...] = ALL_KINDS
    pools: tuple[str, ...] = ("local", "mooncake")
    groups: int = 10
    n: int = 6
    silence_s: float = 15.0
    bound_s: float = 240.0
    overrides: tuple[str, ...] = ()


@attrs.define
class FaultTally:
    """Counts of one kind of fault, and what went wrong in the rollouts that had it."""

    faults: int = 0
    responses: int = 0
    lost: int = 0
    doubled: int = 0
    wrong: int = 0
    broken: list[str] = attrs.Factory(list)
    longest_s: float = 0.0

    def add(self, responses: int, lost: int, doubled: int, wrong: int, seconds: float) -> None:
        """Add one fault and what was found in its rollout."""
        self.faults += 1
        self.responses += responses
        self.lost += lost
        self.doubled += doubled
        self.wrong += wrong
        self.longest_s = max(self.longest_s, seconds)


@attrs.define
class Campaign:
    """A plan being carried out in a directory."""

    plan: Plan
    directory: Path
    chance: random.Random = attrs.Factory(lambda self: random.Random(self.plan.seed), takes_self=True)
    begun_s: float = attrs.Factory(time.monotonic)
    processes_before: frozenset[int] = attrs.Factory(lambda: frozenset(each.pid for each in children()))
    tallies: dict[str, FaultTally] = attrs.Factory(dict)
    expected: dict[str, Texts] = attrs.Factory(dict)
    undisturbed_s: float = 0.0
    missed: int = 0
    """Faults that found no process."""

    def tally(self, kind: str) -> FaultTally:
        """Return the tally of this kind of fault."""
        return self.tallies.setdefault(kind, FaultTally())

    @property
    def injected(self) -> int:
        """How many faults there have been."""
        return sum(tally.faults for tally in self.tallies.values())

    @property
    def left(self) -> int:
        """How many faults there may still be; 0 when the time is over."""
        if self.plan.minutes is not None and time.monotonic() - self.begun_s > 60 * self.plan.minutes:
            return 0
        return FAULTS_PER_ROLLOUT if self.plan.count is None else max(0, self.plan.count - self.injected)

    def overrides(self, pool: str) -> list[str]:
        """Return what is set besides the example's config."""
        return [
            f"seer.kv_pool={pool}",
            "seer.restarts.attempts=1000",
            "plugin.divided_rollout.chunk_tokens=64",
            f"engine.vllm.silence_timeout_s={self.plan.silence_s}",
            *self.plan.overrides,
        ]

    def config(self, pool: str) -> Config:
        """Return the config of a runtime."""
        return load_config(CONFIG, self.overrides(pool))

    def weights(self) -> dict[str, Path]:
        """Return two directories of weights: the example's, and the same but for a little noise."""
        changed = self.directory / "changed"
        changed.mkdir()
        noise = np.random.default_rng(self.plan.seed)
        tensors = load_file(EXAMPLE / "weights" / "model.safetensors")
        save_file(
            {
                name: tensor + noise.normal(0, 0.2, tensor.shape).astype(tensor.dtype) * np.abs(tensor).mean()
                for name, tensor in tensors.items()
            },
            changed / "model.safetensors",
        )
        return {"first": EXAMPLE / "weights", "changed": changed}


async def roll_out_undisturbed(campaign: Campaign, weights: dict[str, Path]) -> list[PromptGroup]:
    """Roll out without faults under each set of weights, and keep the texts; return the groups."""
    async with Runtime.from_config(campaign.config("none")) as runtime:
        groups = runtime.groups(
            record | {"group_id": f"g{index}", "seed": index, "n": campaign.plan.n}
            for index, record in enumerate(prompts(campaign.plan.groups))
        )
        for name, directory in weights.items():
            await runtime.update_weights(str(directory))
            result = await runtime.rollout(groups).wait()
            campaign.expected[name] = {each.request_id: each.token_ids for each in result.completions}
            campaign.undisturbed_s = result.summary.total_time_s
    return groups


async def in_a_runtime(campaign: Campaign, groups: list[PromptGroup], weights: dict[str, Path]) -> None:
    """Roll out a few times on one runtime, with faults."""
    settings, chance = campaign.plan, campaign.chance
    pool = chance.choice(settings.pools)
    config = campaign.config(pool)
    kinds = [
        kind for kind in KINDS if kind in settings.kinds and (pool == "mooncake" or "master" not in kind)
    ]
    async with Runtime.from_config(config) as runtime:
        current = "first"
        for _ in range(ROLLOUTS_PER_RUNTIME):
            if chance.random() < SHARE_OF_UPDATES:
                current = chance.choice(list(weights))
                await update(campaign, runtime, weights[current])
            faults = [
                Fault(chance.choice(kinds), chance.uniform(0, 0.8 * campaign.undisturbed_s))
                for _ in range(min(chance.randint(1, FAULTS_PER_ROLLOUT), campaign.left) if kinds else 0)
            ]
            await roll_out(campaign, runtime, groups, faults, campaign.expected[current], pool)
            if not campaign.left:
                break


async def update(campaign: Campaign, runtime: Runtime, source: Path) -> None:
    """Update weights, and kill an instance meanwhile if the plan has that kind."""
    tally, begun = campaign.tally(UPDATE), time.monotonic()
    updating = asyncio.ensure_future(runtime.update_weights(str(source)))
    if UPDATE in campaign.plan.kinds and campaign.left:
        await asyncio.sleep(campaign.chance.uniform(0, 0.1))
        struck = await KINDS["instance killed"].inject(runtime, campaign.chance)
        tally.faults += struck
    try:
        async with asyncio.timeout(campaign.plan.bound_s):
            await updating
    except SeerError as error:  # all may have died in it; then the next update has to work
        show(f"  refused: {error}")
        async with asyncio.timeout(campaign.plan.bound_s):
            await until_one_lives(runtime)
            await runtime.update_weights(str(source))
    tally.longest_s = max(tally.longest_s, time.monotonic() - begun)


async def until_one_lives(runtime: Runtime) -> None:
    """Wait for an instance; the caller bounds it."""
    while not runtime.alive:
        await asyncio.sleep(0.1)


async def roll_out(
    campaign: Campaign,
    runtime: Runtime,
    groups: list[PromptGroup],
    faults: list[Fault],
    expected: Texts,
    pool: str,
) -> None:
    """Roll out once, with these faults, and check what comes."""
    begun = time.monotonic()
    found: list[Completion] = []
    broken = ""
    struck: Counter[str] = Counter()

    async def inject(fault: Fault) -> None:
        await asyncio.sleep(fault.after_s)
        hit = await KINDS[fault.kind].inject(runtime, campaign.chance)
        struck[fault.kind] += hit
        campaign.missed += not hit

    injections = [asyncio.ensure_future(inject(fault)) for fault in faults]
    try:
        async with asyncio.timeout(campaign.plan.bound_s):
            async for completion in runtime.rollout(groups):
                found.append(completion)
            await asyncio.gather(*injections)
    except (SeerError, TimeoutError) as error:
        broken = f"{type(error).__name__}: {error}"
    seconds = time.monotonic() - begun
    counts = judge([(each.request_id, each.token_ids) for each in found], expected)
    for kind in struck.elements():
        tally = campaign.tally(kind)
        tally.add(len(found), *counts, seconds)
        tally.broken += [broken] if broken else []
    words = ", ".join(f"{fault.kind} at {fault.after_s:.1f} s" for fault in faults)
    show(
        f"{campaign.injected:4} {pool:9} {seconds:6.1f} s  lost, doubled, wrong: {counts}  {words}  {broken}"
    )
    if broken:
        raise SeerError(broken)


def judge(found: list[tuple[str, list[int]]], expected: Texts) -> tuple[int, int, int]:
    """Return how many responses are lost, doubled and wrong."""
    times = Counter(name for name, _ in found)
    return (
        len(expected.keys() - times.keys()),
        sum(count - 1 for count in times.values()),
        sum(expected.get(name) != list(tokens) for name, tokens in found),
    )


async def of_a_command(campaign: Campaign, prompts: Path) -> None:
    """Run `seer run` once with a fault of its own."""
    chance, plan = campaign.chance, campaign.plan
    kind = chance.choice([kind for kind in COMMAND_KINDS if kind in plan.kinds])
    out = campaign.directory / f"out-{campaign.injected}"
    overrides = campaign.overrides(chance.choice(plan.pools))
    ended = await run_command(kind, overrides, CONFIG, prompts, out, chance, plan.bound_s)
    lost, doubled, wrong = judge(ended.completions, campaign.expected["first"])
    tally = campaign.tally(kind)
    # What had not finished when the command ended is not lost: it was never written.
    tally.add(len(ended.completions), lost if ended.status == 0 else 0, doubled, wrong, ended.seconds)
    tally.broken += ended.complaints
    show(
        f"{campaign.injected:4} seer run  {ended.seconds:6.1f} s  {kind}: {len(ended.completions)} written,"
        f" exit {ended.status}  {'; '.join(ended.complaints)}"
    )


def prompts_file(campaign: Campaign, groups: list[PromptGroup]) -> Path:
    """Write the groups as `seer run` reads them."""
    path = campaign.directory / "prompts.jsonl"
    lines = [
        {
            "group_id": group.id,
            "prompt_token_ids": group.prompt_token_ids,
            "n": group.n,
            "seed": group.seed,
            "max_tokens": group.max_tokens,
            **msgspec.to_builtins(group.sampling),
        }
        for group in groups
    ]
    path.write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))
    return path


async def run(campaign: Campaign) -> None:
    """Carry the plan out."""
    plan = campaign.plan
    weights = campaign.weights()
    groups = await roll_out_undisturbed(campaign, weights)
    file = prompts_file(campaign, groups)
    commands = any(kind in plan.kinds for kind in COMMAND_KINDS)
    runtimes = any(kind in plan.kinds for kind in (*KINDS, UPDATE))
    while campaign.left:
        if campaign.missed > 20 + campaign.injected:
            raise SeerError(f"{campaign.missed} faults found no process: this campaign proves nothing")
        if commands and (not runtimes or campaign.chance.random() < command_odds(campaign)):
            await of_a_command(campaign, file)
        else:
            try:
                await in_a_runtime(campaign, groups, weights)
            except SeerError as error:  # noted in its tally; the next runtime starts afresh
                show(f"a runtime was given up: {error}")
        left_over = [each.pid for each in children() if each.pid not in campaign.processes_before]
        if left_over:
            campaign.tally("processes left over").broken.append(f"{left_over}")


def command_odds(campaign: Campaign) -> float:
    """Return the chance of a command, so that their share of the faults is as wanted."""
    done = sum(campaign.tally(kind).faults for kind in COMMAND_KINDS)
    return 1.0 if done < SHARE_OF_COMMANDS * campaign.injected else 0.0


def show(line: str) -> None:
    """Print a line now."""
    print(line, flush=True)
