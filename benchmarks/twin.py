"""The twin of the demo: what the simulator, fitted to this machine's vLLM, says of every arm, and what is so.

Rolls out the demo's prompts under every arm of `seer compare`.  Just before and just after each, it measures
step times, all instances stepping at once as they do in a run; the arm's twin is fitted to the mean of both,
so that a machine whose speed drifts is predicted at the speed that it had.  Lengths, and what drafts were
worth, are those of the round's arm with drafts.  Predictions are made as profiled, and with the one factor
on all steps that makes the twin of the baseline take as long as the baseline did; the factor stands for what
medians of steps leave out, and the baseline's own total is no prediction then.

With ``--engine paced`` the twin is vLLM's own scheduler on an accelerator that is as quick as the profile
says, on a virtual clock: it repeats the text of the round's arm with drafts, and really drafts from it.

  python benchmarks/twin.py --repeat 2 --json out/twin.json
  python benchmarks/twin.py --engine paced --json out/paced.json
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import sys
from contextlib import AsyncExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import attrs
import msgspec
import structlog
from seer_lab.calibrate import slowed
from seer_lab.simulate import ENGINES
from seer_lab.twin import make_twin
from seer_lab.twin_cli import FIGURES, predict_arm

from seer_core.cli.output import OutputDir
from seer_core.compare import Arm, arms_of, with_lengths
from seer_core.config import Config, load_config
from seer_core.figures import ratios, spread
from seer_core.plugins import Strategies, assemble, fill_slots
from seer_core.profile import Profile, make_profile, mean_times, measure_tables
from seer_core.prompts import read_prompts
from seer_core.result import RolloutResult
from seer_core.runtime import Runtime
from seer_core.scheduler import CORE, Policies, Slot

EXAMPLE = Path(__file__).parents[1] / "examples" / "tiny_reasoner"
BATCH = (1, 2, 4, 8, 16, 32, 64, 128)
DRAFT_TOKENS = (0, 1, 2, 4)
CONTEXT = (32, 512, 1536)


async def measure(config: Config, work: Path, repeat: int) -> list[dict[str, tuple[Profile, RolloutResult]]]:
    """Return each round's profile and result by arm; round n's arm with drafts is recorded in ``work/n``."""
    assembly = attrs.evolve(assemble(config), strategies=Strategies(Policies()))
    rounds = []
    # A trace is shown what happens until the next arm's is in use, so they are closed when all has ended.
    async with AsyncExitStack() as outputs, Runtime(assembly, config.seer, config.rollout) as runtime:
        kv_pool, fleet = runtime.kv_pool, runtime.fleet
        read = read_prompts(EXAMPLE / "prompts.jsonl", config.rollout, fleet.model, fleet.tokenizer)
        for number in range(repeat):
            results: dict[str, tuple[Profile, RolloutResult]] = {}
            for arm in arms_of(config):
                groups = read.groups
                strategies = fill_slots(config.with_plugins(arm.plugins))
                drafts = strategies.drafter is not None
                output = outputs.enter_context(
                    OutputDir(work / str(number) / arm.name.strip("+ "), 400, overwrite=True)
                )
                observer = Slot("observer", CORE, output.trace)
                strategies = attrs.evolve(strategies, observers=(*strategies.observers, observer))
                await runtime.use(strategies, kv_pool if arm.shares_kv else None)
                before = await profile(config, runtime)
                await runtime.reset_caches()
                chosen = (
                    with_lengths(groups, results["baseline"][1].completions) if arm.knows_lengths else groups
                )
                rollout = runtime.rollout(chosen)
                output.begin()
                result = await rollout.wait()
                if drafts:
                    for completion in result.completions:
                        output.completion(completion)
                output.summary(msgspec.to_builtins(result.summary))
                after = await profile(config, runtime)
                results[arm.name] = (mean_profile(before, after), result)
                drift = after.seconds[-1][0] / before.seconds[-1][0] - 1
                print(
                    f"round {number + 1}, {arm.name}: {result.summary.total_time_s:.1f} s; a large step took"
                    f" {drift:+.0%} from before to after",
                    file=sys.stderr,
                    flush=True,
                )
            rounds.append(results)
    return rounds


async def profile(config: Config, runtime: Runtime) -> Profile:
    """Measure step times of all instances at once."""
    engines = list(runtime.fleet.engines.values())
    tables = await measure_tables(engines, BATCH, DRAFT_TOKENS, CONTEXT)
    infos = list(runtime.living.values())
    return make_profile(tables, infos, engine=config.seer.engines[0], instances=len(engines), together=True)


def mean_profile(before: Profile, after: Profile) -> Profile:
    """Return the mean of two profiles of one engine."""
    tables = [mean_times(pair) for pair in zip(before.tables, after.tables, strict=True)]
    assert before.info is not None
    assert after.info is not None
    infos = [before.info, after.info]
    return make_profile(
        tables, infos, engine=before.engine, instances=before.instances, together=before.together
    )


def predict(
    config: Config, run: Path, results: dict[str, tuple[Profile, RolloutResult]], engine: str
) -> list[dict[str, Any]]:
    """Return a row for each arm of a round: measured, as profiled, with the factor."""
    factor = 1.0
    rows = []
    for arm in arms_of(config):
        profiled, result = results[arm.name]
        measured = {name: float(getattr(result.summary, name)) for name in FIGURES}
        twin, fitted = make_twin(config, profiled, run)
        predicted = predict_arm(twin, arm, engine)
        if arm.name == "baseline":
            factor = measured["total_time_s"] / predicted["total_time_s"]
        scaled = predict_arm(slowed(twin, factor), arm, engine)
        rows.append(
            {
                "name": arm.name,
                "measured": measured,
                "as profiled": predicted,
                "with the factor": scaled,
                "factor": factor,
                "fit_median_error": fitted.median_error,
            }
        )
    return rows


def show(rounds: list[list[dict[str, Any]]]) -> None:
    """Print medians over the rounds, and the errors with their least and most."""
    for rows in zip(*rounds, strict=True):
        for kind in ("as profiled", "with the factor"):
            text = f"{rows[0]['name'] if kind == 'as profiled' else '':<18} {kind:<16}"
            for figure in ("total_time_s", "tail_time_s"):
                found, measured = ([row[each][figure] for row in rows] for each in (kind, "measured"))
                error = spread(ratio - 1 for ratio in ratios(found, measured))
                mine, real = spread(found).median, spread(measured).median
                text += f"  {figure.split('_')[0]} {mine:5.1f} s, measured {real:5.1f} s ("
                text += f"{error.median:+.0%} [{error.least:+.0%}, {error.most:+.0%}])"
            preemptions = rows[0][kind]["preemptions"], rows[0]["measured"]["preemptions"]
            print(f"{text}  preemptions {preemptions[0]:.0f}, measured {preemptions[1]:.0f}")
    fits = [row["fit_median_error"] for rows in rounds for row in rows]
    factors = ", ".join(f"{rows[0]['factor']:.2f}" for rows in rounds)
    print(f"factor of each round: {factors}; fits are {spread(fits).median:.0%} off in the median")


def main(options: argparse.Namespace, work: Path) -> None:
    """Measure all rounds, then predict them."""
    config = load_config(EXAMPLE / "demo.toml", options.set)
    measured = asyncio.run(measure(config, work, options.repeat))
    drafting: Arm = next(arm for arm in arms_of(config) if "grouped_spec" in arm.plugins)
    rounds = [
        predict(config, work / str(number) / drafting.name.strip("+ "), results, options.engine)
        for number, results in enumerate(measured)
    ]
    show(rounds)
    print("command: python benchmarks/twin.py " + " ".join(sys.argv[1:]))
    if options.json:
        profiles = [
            {name: msgspec.to_builtins(each) for name, (each, _) in round.items()} for round in measured
        ]
        options.json.parent.mkdir(parents=True, exist_ok=True)
        document = {"rounds": rounds, "profiles": profiles}
        options.json.write_bytes(msgspec.json.format(msgspec.json.encode(document)) + b"\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeat", type=int, default=1, help="rounds (default 1)")
    parser.add_argument("--engine", choices=ENGINES, default="sim", help="what predicts (default sim)")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="as for seer run")
    parser.add_argument("--work", type=Path, metavar="DIR", help="keep the runs with drafts here")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything as JSON")
    arguments = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    with TemporaryDirectory() as temporary:
        main(arguments, arguments.work or Path(temporary))
