"""Faults: rollouts on real vLLM engines in which processes die, hang and lose their disk.

Rolls the tiny reasoner's prompts out once in peace, with each of two sets of weights.  Then, until --count
faults have been injected, in two ways, chosen by chance from --seed:

  in a runtime   some faults at random times in each rollout: instances and the KV pool's master
                 are killed, paused or hung (SIGKILL, SIGTERM, SIGSTOP); between rollouts weights
                 change, now and then while an instance is being killed
  of a command   `seer run` itself gets SIGINT, SIGTERM or SIGKILL at a random time, or may write only so much
                 to a file (RLIMIT_FSIZE), as on a full disk

Every response has to be there once, with the tokens it had in peace; so has whatever a command had written
when it ended, in whole lines.  Every rollout has to end in --bound seconds, and no process may be left.

  python benchmarks/faults.py --count 200 --json out/faults.json
  python benchmarks/faults.py --count 20 --seed 7 --only "instance killed" SIGKILL --pools mooncake
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import attrs
import msgspec
import numpy as np
import structlog
from equality import EXAMPLE
from fault_kinds import KINDS, Fault, children
from faults_of_command import COMMAND_KINDS, run_command
from safetensors.numpy import load_file, save_file

from seer_core.config import Config, load_config
from seer_core.errors import SeerError
from seer_core.model import Completion, PromptGroup
from seer_core.runtime import Runtime

CONFIG = EXAMPLE / "demo.toml"
UPDATE = "instance killed in a weight update"
FAULTS_PER_ROLLOUT = 3
ROLLOUTS_PER_RUNTIME = 5
SHARE_OF_COMMANDS = 0.15
SHARE_OF_UPDATES = 0.4
Texts = dict[str, list[int]]


@attrs.define
class Tally:
    """What became of the faults of one kind: how many there were, and what went wrong in their rollouts."""

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
    """A run of this benchmark."""

    options: argparse.Namespace
    directory: Path
    chance: random.Random
    tallies: dict[str, Tally] = attrs.Factory(dict)
    expected: dict[str, Texts] = attrs.Factory(dict)
    peace_s: float = 0.0
    missed: int = 0
    """Faults that found no process to strike."""

    def tally(self, kind: str) -> Tally:
        """Return the tally of this kind of fault."""
        return self.tallies.setdefault(kind, Tally())

    @property
    def injected(self) -> int:
        """How many faults there have been."""
        return sum(tally.faults for tally in self.tallies.values())

    @property
    def left(self) -> int:
        """How many faults there are still to be."""
        return max(0, self.options.count - self.injected)

    def overrides(self, pool: str) -> list[str]:
        """Return what is set besides the example's config."""
        return [
            f"seer.kv_pool={pool}",
            "seer.max_restarts=1000",
            "plugin.divided_rollout.chunk_tokens=64",
            f"engine.vllm.silence_timeout_s={self.options.silence}",
            *self.options.set,
        ]

    def config(self, pool: str) -> Config:
        """Return the config of a runtime."""
        return load_config(CONFIG, self.overrides(pool))

    def weights(self) -> dict[str, Path]:
        """Return two directories of weights: the example's, and the same but for a little noise."""
        changed = self.directory / "changed"
        changed.mkdir()
        noise = np.random.default_rng(self.options.seed)
        tensors = load_file(EXAMPLE / "weights" / "model.safetensors")
        save_file(
            {
                name: tensor + noise.normal(0, 0.2, tensor.shape).astype(tensor.dtype) * np.abs(tensor).mean()
                for name, tensor in tensors.items()
            },
            changed / "model.safetensors",
        )
        return {"first": EXAMPLE / "weights", "changed": changed}


async def in_peace(campaign: Campaign, weights: dict[str, Path]) -> list[PromptGroup]:
    """Roll out without faults under each set of weights, and keep the texts; return the groups."""
    async with Runtime.from_config(campaign.config("none")) as runtime:
        lines = (EXAMPLE / "prompts.jsonl").read_bytes().splitlines()[: campaign.options.groups]
        groups = runtime.groups(
            msgspec.json.decode(line) | {"group_id": f"g{index}", "seed": index, "n": campaign.options.n}
            for index, line in enumerate(lines)
        )
        for name, directory in weights.items():
            await runtime.update_weights(str(directory))
            result = await runtime.rollout(groups).wait()
            campaign.expected[name] = {each.request_id: each.token_ids for each in result.completions}
            campaign.peace_s = result.summary.total_time_s
    same = sum(
        text == campaign.expected["changed"][name] for name, text in campaign.expected["first"].items()
    )
    say(
        f"in peace: {len(campaign.expected['first'])} responses in {campaign.peace_s:.1f} s,"
        f" {same} the same with both weights"
    )
    return groups


async def in_a_runtime(campaign: Campaign, groups: list[PromptGroup], weights: dict[str, Path]) -> None:
    """Roll out a few times on one runtime, with faults."""
    options, chance = campaign.options, campaign.chance
    pool = chance.choice(options.pools)
    config = campaign.config(pool)
    kinds = [kind for kind in KINDS if kind in options.only and (pool == "mooncake" or "master" not in kind)]
    async with Runtime.from_config(config) as runtime:
        current = "first"
        for _ in range(ROLLOUTS_PER_RUNTIME):
            if chance.random() < SHARE_OF_UPDATES:
                current = chance.choice(list(weights))
                await update(campaign, runtime, weights[current])
            plan = [
                Fault(chance.choice(kinds), chance.uniform(0, 0.8 * campaign.peace_s))
                for _ in range(min(chance.randint(1, FAULTS_PER_ROLLOUT), campaign.left) if kinds else 0)
            ]
            await roll_out(campaign, runtime, groups, plan, campaign.expected[current], pool)
            if not campaign.left:
                break


async def update(campaign: Campaign, runtime: Runtime, source: Path) -> None:
    """Update weights, and kill an instance meanwhile if the plan says so."""
    tally, begun = campaign.tally(UPDATE), time.monotonic()
    updating = asyncio.ensure_future(runtime.update_weights(str(source)))
    if UPDATE in campaign.options.only and campaign.left:
        await asyncio.sleep(campaign.chance.uniform(0, 0.1))
        struck = await KINDS["instance killed"].strike(runtime, campaign.chance)
        tally.faults += struck
    try:
        async with asyncio.timeout(campaign.options.bound):
            await updating
    except SeerError as error:  # all may have died in it; then the next update has to work
        say(f"  refused: {error}")
        async with asyncio.timeout(campaign.options.bound):
            await until_one_lives(runtime)
            await runtime.update_weights(str(source))
    tally.longest_s = max(tally.longest_s, time.monotonic() - begun)


async def until_one_lives(runtime: Runtime) -> None:
    """Wait for an instance; the caller bounds it."""
    while not runtime.living:
        await asyncio.sleep(0.1)


async def roll_out(
    campaign: Campaign,
    runtime: Runtime,
    groups: list[PromptGroup],
    plan: list[Fault],
    expected: Texts,
    pool: str,
) -> None:
    """Roll out once, with these faults, and check what comes."""
    begun = time.monotonic()
    found: list[Completion] = []
    broken = ""
    struck: Counter[str] = Counter()

    async def strike(fault: Fault) -> None:
        await asyncio.sleep(fault.after_s)
        hit = await KINDS[fault.kind].strike(runtime, campaign.chance)
        struck[fault.kind] += hit
        campaign.missed += not hit

    strikes = [asyncio.ensure_future(strike(fault)) for fault in plan]
    try:
        async with asyncio.timeout(campaign.options.bound):
            async for completion in runtime.rollout(groups):
                found.append(completion)
            await asyncio.gather(*strikes)
    except (SeerError, TimeoutError) as error:
        broken = f"{type(error).__name__}: {error}"
    seconds = time.monotonic() - begun
    counts = judge([(each.request_id, each.token_ids) for each in found], expected)
    for kind in struck.elements():
        tally = campaign.tally(kind)
        tally.add(len(found), *counts, seconds)
        tally.broken += [broken] if broken else []
    words = ", ".join(f"{fault.kind} at {fault.after_s:.1f} s" for fault in plan)
    say(f"{campaign.injected:4} {pool:9} {seconds:6.1f} s  lost, doubled, wrong: {counts}  {words}  {broken}")
    if broken:
        raise SeerError(broken)


def judge(found: list[tuple[str, list[int]]], expected: Texts) -> tuple[int, int, int]:
    """Return how many responses are lost, come twice, are wrong."""
    times = Counter(name for name, _ in found)
    return (
        len(expected.keys() - times.keys()),
        sum(count - 1 for count in times.values()),
        sum(expected.get(name) != list(tokens) for name, tokens in found),
    )


async def of_a_command(campaign: Campaign, prompts: Path) -> None:
    """Run `seer run` once with a fault of its own."""
    chance, options = campaign.chance, campaign.options
    kind = chance.choice([kind for kind in COMMAND_KINDS if kind in options.only])
    out = campaign.directory / f"out-{campaign.injected}"
    overrides = campaign.overrides(chance.choice(options.pools))
    ended = await run_command(kind, overrides, CONFIG, prompts, out, chance, options.bound)
    lost, doubled, wrong = judge(ended.completions, campaign.expected["first"])
    tally = campaign.tally(kind)
    # What had not finished when the command was struck is not lost: it was never written.
    tally.add(len(ended.completions), lost if ended.status == 0 else 0, doubled, wrong, ended.seconds)
    tally.broken += ended.complaints
    say(
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
    """Run the campaign to its end."""
    options = campaign.options
    weights = campaign.weights()
    groups = await in_peace(campaign, weights)
    prompts = prompts_file(campaign, groups)
    commands = any(kind in options.only for kind in COMMAND_KINDS)
    runtimes = any(kind in options.only for kind in (*KINDS, UPDATE))
    while campaign.left:
        if campaign.missed > 20 + campaign.injected:
            raise SystemExit(f"{campaign.missed} faults found no process: this campaign proves nothing")
        if commands and (not runtimes or campaign.chance.random() < command_odds(campaign)):
            await of_a_command(campaign, prompts)
        else:
            try:
                await in_a_runtime(campaign, groups, weights)
            except SeerError as error:  # noted in its tally; the next runtime starts afresh
                say(f"a runtime was given up: {error}")
        left_over = [child.pid for child in children()]
        if left_over:
            campaign.tally("processes left over").broken.append(f"{left_over}")


def command_odds(campaign: Campaign) -> float:
    """Return the chance of a command, so that their share of the faults is as wanted."""
    done = sum(campaign.tally(kind).faults for kind in COMMAND_KINDS)
    return 1.0 if done < SHARE_OF_COMMANDS * campaign.injected else 0.0


def rows(campaign: Campaign) -> Iterator[dict[str, object]]:
    """Yield the tallies, kind by kind."""
    for kind, tally in sorted(campaign.tallies.items()):
        if tally.faults or tally.broken:
            yield {"kind": kind, **attrs.asdict(tally)}


def say(line: str) -> None:
    """Print a line now."""
    print(line, flush=True)


if __name__ == "__main__":
    every = (*KINDS, UPDATE, *COMMAND_KINDS)
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=200, help="faults to inject (default 200)")
    parser.add_argument("--seed", type=int, default=0, help="of what happens when (default 0)")
    parser.add_argument(
        "--only", nargs="+", choices=every, default=every, help="kinds of faults (default all)"
    )
    parser.add_argument("--pools", nargs="+", default=["local", "mooncake"], help="KV pools to use in turn")
    parser.add_argument("--groups", type=int, default=10, help="prompt groups of a rollout (default 10)")
    parser.add_argument("--n", type=int, default=6, help="responses of a group (default 6)")
    parser.add_argument("--silence", type=float, default=15.0, help="silence_timeout_s (default 15)")
    parser.add_argument("--bound", type=float, default=240.0, help="seconds for a rollout (default 240)")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="as for seer run")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the table as JSON")
    arguments = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    for number in (signal.SIGINT, signal.SIGTERM):  # SIGINT is ignored in what a script starts with `&`
        signal.signal(number, signal.default_int_handler)
    with tempfile.TemporaryDirectory() as temporary:
        ended = Campaign(arguments, Path(temporary), random.Random(arguments.seed))
        with suppress(KeyboardInterrupt):  # what there is by then is shown
            asyncio.run(run(ended))
    table = list(rows(ended))
    for row in table:
        say(
            "{kind:36} {faults:4} faults  {responses:6} responses  lost {lost}, doubled {doubled},"
            " wrong {wrong}, broken {0}, longest {longest_s:.0f} s".format(len(row["broken"]), **row)
        )
    say(
        f"{ended.injected} faults, {ended.missed} more found no process: "
        + " ".join(["python", os.path.relpath(__file__), *sys.argv[1:]])
    )
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_bytes(msgspec.json.format(msgspec.json.encode(table)) + b"\n")
    sys.exit(any(row[what] for row in table for what in ("lost", "doubled", "wrong", "broken")))
