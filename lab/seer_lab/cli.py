"""``seer sim``: policies side by side on simulated engines, or on vLLM with an emulated accelerator."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from math import log
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

import click
import msgspec
from seer_cli.common import debugged, main_options
from seer_cli.display import Display
from seer_cli.output import check_writable, write_json
from seer_cli.report.data import RunData, run_of
from seer_cli.report.options import REPORT_OPTION
from seer_cli.report.page import write_page
from seer_cli.report.reading import RunReader
from seer_cli.tables import print_table, table_console
from seer_host.tables import structure
from seer_sim.plugin import Settings

from seer_lab.bound import Bound, bounds_of
from seer_lab.drawing import importing_to_draw
from seer_lab.lengths import DrawnLengths, GroupLengths
from seer_lab.options import (
    POLICY_HELP,
    check_no_turns,
    check_once,
    check_policies,
    check_repeats,
    check_unbounded,
    choose_policies,
    drafts_option,
    keys_of,
    workload_options,
)
from seer_lab.order_notes import about_rows, order_notes
from seer_lab.recorded import log_files
from seer_lab.replayed import read_replayed, with_replayed
from seer_lab.simulate import ENGINES, SimulatedIteration, simulate
from seer_lab.table import rows_of, share_rows, share_table, table_of, to_json
from seer_lab.workload_choice import PRESSURE, choose_workload
from seer_lab.workloads import WORKLOADS, Workload, context_tokens

__all__ = ["sim_command"]

TIMES = {
    "sim": "times are simulated",
    "paced": "real vLLM scheduler, emulated accelerator, scripted text; times are the emulated ones",
    "paced-sglang": "real SGLang scheduler, emulated accelerator, scripted text; times are the emulated ones",
}

LEAST_MET = 0.97
"""Part of the pressure asked for that counts as met: KV comes in whole blocks."""


@click.command(
    "sim",
    context_settings={"default_map": {"log_level": "warning"}},
    epilog=POLICY_HELP,
)
@main_options
@workload_options
@drafts_option
@click.option(
    "--engine",
    type=click.Choice(ENGINES),
    default="sim",
    show_default=True,
    help="paced: vLLM's own scheduler, or SGLang's, on an emulated accelerator, for small workloads.",
)
@click.option(
    "--plot", type=click.Path(path_type=Path), help="Draw load and finishes over time; .svg or .png."
)
@click.option(
    "--bound",
    "bounded",
    is_flag=True,
    help="Compare each policy with the least time that any could take, and show what instances spend their"
    " time on; some seconds for each seed.",
)
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Write one object per policy.")
@REPORT_OPTION
def sim_command(
    workload: str,
    policies: tuple[str, ...],
    oracles: tuple[str, ...],
    seed: int,
    repeat: int,
    overrides: tuple[str, ...],
    drafts_file: Path | None,
    engine: str,
    plot: Path | None,
    bounded: bool,
    json_file: Path | None,
    report: Path | None,
    **size: Any,
) -> None:
    """Roll out WORKLOAD on simulated engines under each policy, and compare.

    WORKLOAD is one of the paper's, moonlight, qwen2-vl-72b or kimi-k2; synthetic; a file with lengths of
    yours, JSON lines of {"group", "prompt_tokens", "output_tokens": [...]}; a file with trajectories of
    agents, JSON lines of {"group", "index", "prompt_tokens", "turns": [[MODEL_TOKENS, TOOL_S, ANSWER_TOKENS],
    ...]}; the directory of a finished `seer run`; or the log of another system: a file or a directory that
    verl or slime dumped rollouts to, or a trace of requests.  --scale is for the paper's, --on, --instances
    and --pressure are for the others, --tool-times, --turn-tokens and --join for
    trajectories.

    \b
    Example:
      seer sim qwen2-vl-72b --scale 0.25 --policy verl --policy divided --policy context
      seer sim lengths.jsonl --instances 8 --policy verl --policy mine=divided_rollout,my_plugin
      seer sim synthetic --engine paced --policy verl --policy context
      seer sim qwen2-vl-72b --scale 0.25 --policy verl --policy seer --bound
      seer sim out/first --policy verl --policy seer --drafts out/first
      seer sim lengths.jsonl --model my_model --gpu h200 --gpus 4 --policy verl --policy context
      seer sim turns.jsonl --policy sticky --policy context --tool-times 10
      seer sim rollouts --tokenizer my_model --repeat 3 --report would_have.html
    """
    check_writable(json_file, plot, report, inputs=[Path(workload), *log_files(Path(workload))])
    overrides = debugged(overrides)
    chosen = choose_policies(policies, oracles)
    check_once(overrides, size)
    check_unbounded(drafts_file, bounded=bounded)
    load = choose_workload(workload, **size)
    check_no_turns(load, drafts_file)
    if drafts_file is not None:
        load = with_replayed(load, read_replayed(drafts_file))
    check_repeats(workload, load, repeat)
    check_policies(chosen, load, overrides)
    draw = None if plot is None else _drawing(plot)
    runs = []
    readers = {policy.name: RunReader() for policy in chosen if report is not None}
    for number in range(repeat):
        for policy in chosen:
            title = policy.name if repeat == 1 else f"{policy.name} ({number + 1}/{repeat})"
            with Display(title) as display:
                observers = [display, readers[policy.name]] if readers and not number else [display]
                run = simulate(load, policy, seed + number, overrides, observers, engine, shares=bounded)
            runs.append(run)
    bounds = bounds_of(load, chosen, range(seed, seed + repeat), overrides) if bounded else {}
    rows = rows_of(runs, bounds)
    if json_file is not None:
        write_json(json_file, to_json(rows))
    if draw is not None and plot is not None:
        draw(plot, [row.runs[0] for row in rows])
    if report is not None:
        write_page(report, f"Seer: {load.name}", _pages(runs[: len(chosen)], readers, bounds))
    engines = structure(load.config((), overrides).engine["sim"], Settings, "engine.sim")
    iterations = [load.groups(seed + number) for number in range(repeat)]
    room = engines.instances * engines.kv_capacity_tokens
    pressures = [context_tokens(groups) / room for groups in iterations]
    title = _title(load.name, iterations[0], engines, pressures)
    if repeat > 1:
        title += f"; medians of {repeat} runs [least, most]"
    console = table_console()
    console.print(title)
    print_table(table_of(rows))
    console.print(
        f"ratio: to {chosen[0].name}; tail: time spent solely on the last tenth of responses; {TIMES[engine]}"
    )
    for line in about_rows(rows):
        console.print(line)
    if bounded:
        console.print("over bound: total time over the least that any schedule takes (docs/explain/bound.md)")
        if shares := share_rows(rows):
            print_table(share_table(shares))
            console.print("shares of all instances' time, idle time included")
    is_assumed = (
        workload not in WORKLOADS
        and size["pressure"] is None
        and size["model"] is None
        and "engine.sim.kv_capacity_tokens" not in keys_of(overrides)
    )
    if is_assumed:
        console.print(f"pressure {PRESSURE:g} is assumed; give that of your engines with --pressure")
    for note in order_notes(rows, drawn=isinstance(load.lengths, DrawnLengths)):
        console.print(note)
    for note in _notes(load, seed, repeat, size["pressure"], pressures):
        console.print(note)
    for policy in chosen:
        if policy.over_issue > 1:
            console.print(
                f"{policy.name}: not strictly synchronous; starts {policy.over_issue} times the groups, puts"
                " off the last ones"
            )


def _pages(
    runs: Sequence[SimulatedIteration],
    readers: Mapping[str, RunReader],
    bounds: Mapping[tuple[str, int], Bound],
) -> list[RunData]:
    """Return what a page shows of the first run of each policy."""
    found = []
    for run in runs:
        name, bound = run.policy.name, bounds.get((run.policy.name, run.seed))
        least_s = None if bound is None else bound.total_time_s
        found.append(run_of(readers[name], name, msgspec.to_builtins(run.summary), least_s))
    return found


def _title(name: str, groups: Sequence[GroupLengths], engines: Settings, pressures: Sequence[float]) -> str:
    """Say what is rolled out, on what, and how crowded that is."""
    lengths = [tokens for group in groups for tokens in group.output_tokens]
    least, most = f"{min(pressures):.1f}", f"{max(pressures):.1f}"
    sigma = pstdev(map(log, lengths))
    return (
        f"{name}: {len(lengths):,} responses of {len(groups)} groups, {fmean(lengths):,.0f} tokens"
        f" on average, {max(lengths):,} at most, sigma {sigma:.2f}; {engines.instances} instances of"
        f" {engines.kv_capacity_tokens:,} KV tokens, which they fill"
        f" {least if least == most else f'{least} to {most}'} times"
    )


def _notes(
    workload: Workload, seed: int, repeat: int, pressure: float | None, pressures: Sequence[float]
) -> Iterator[str]:
    """Yield what a reader of the table may take for granted and should not."""
    yield from workload.notes
    if pressure is not None and max(pressures) < LEAST_MET * pressure:
        yield (
            f"pressure {pressure:g} was asked for, and is {max(pressures):.1f}: an instance has room for the"
            " longest response at least"
        )
    if not isinstance(workload.lengths, DrawnLengths) and repeat < (recorded := len(workload.lengths)):
        used = f"iteration {seed % recorded + 1}" if repeat == 1 else f"{repeat} iterations"
        yield f"{used} of {recorded}; --repeat {recorded} takes all"


def _drawing(path: Path) -> Callable[[Path, Sequence[SimulatedIteration]], None]:
    """Import what draws, before any work starts; errors as ``importing_to_draw``."""
    with importing_to_draw(path, "--plot", "--plot"):
        from seer_lab.plots import draw
    return draw
