"""``seer compare``: what each technique buys, on the same prompts, seeds and engines."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import attrs
import click
import msgspec
from rich.table import Table
from seer_host.config_files import Config
from seer_host.machine_probe import MachineProbe
from seer_session.assembly import assemble, fill_slots
from seer_session.prompts import PromptsFile, read_prompts
from seer_session.runtime import Runtime

from seer_cli.common import config_options, degradation_line, main_options, quiet_logs, run_async
from seer_cli.compare_table import compare_table
from seer_cli.comparison import FIGURES, Arm, ArmResult, arms_of, compare, left_out, show_figure
from seer_cli.display import Display
from seer_cli.emulation import Emulated, WrittenResponses, emulated_table, find_emulator
from seer_cli.finished_arms import FinishedArms, fingerprint
from seer_cli.machine import FIXED_WORK, drift_in_words, probe_machine
from seer_cli.output import InputPath, check_writable, write_json
from seer_cli.report.options import DASHBOARD_OPTION, REPORT_OPTION
from seer_cli.request_wording import counted
from seer_cli.tables import print_table, table_console
from seer_core.model import InstanceInfo
from seer_core.plugins.slots import Assembly, Strategies
from seer_core.ports.engine import HeldClock
from seer_core.ports.policy import Observer
from seer_core.scheduling.scheduler import CORE, Policies, Slot

if TYPE_CHECKING:
    from seer_cli.report.dashboard import Dashboard
    from seer_cli.report.reading import RunReader

__all__ = ["compare_command"]

DRAFTING = ("acceptance_length", "drafting_share")
"""Figures shown only where an arm drafts."""

RARE = ("pool_tokens", "overrun_share")
"""Figures shown only where an arm has some."""

FIXED_WORK_TITLE = "fixed work in the workers, s"


@click.command("compare")
@main_options
@config_options
@click.option("--prompts", type=InputPath(), help="Prompts file in place of [compare].prompts.")
@click.option(
    "--repeat",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    metavar="N",
    help="How often each arm is rolled out.",
)
@click.option(
    "--out", type=click.Path(path_type=Path, file_okay=False), help="Directory that keeps finished arms."
)
@click.option("--resume", is_flag=True, help="Skip the arms in --out that have finished, or begin.")
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Write one object per arm.")
@REPORT_OPTION
@DASHBOARD_OPTION
def compare_command(
    config: Config,
    prompts: Path | None,
    repeat: int,
    out: Path | None,
    resume: bool,
    json_file: Path | None,
    report: Path | None,
    dashboard_port: int | None,
) -> None:
    """Roll out the same prompts under the baseline and under each technique of CONFIG in turn.

    Arms share the engines where they can; caches are cold for each.  Engines start anew where drafting
    or the KV pool changes: one that can speculate is a little slower than one that cannot, and the
    baseline shares no KV.  Plug-ins that only watch do so in every arm.  Checks that every arm gives the
    baseline's tokens: exit status 1 if one does not.

    Times are those of the machine, and other programs change them: a fixed piece of work before, between
    and after the arms shows by how much.  With [compare.emulated] in CONFIG further tables have the same
    responses on emulated accelerators, where no load changes any time.

    \b
    Example:
      seer compare examples/tiny_reasoner/demo.toml --repeat 3 --out out/compare --json out/compare.json
    """
    if resume and out is None:
        raise click.UsageError("--resume needs the directory of the finished arms: --out DIR")
    table = compare_table(config)
    path = prompts if prompts is not None else config.base_dir / table.prompts
    check_writable(json_file, report, inputs=[path])
    assembly = assemble(config)
    arms_wanted = arms_of(config)
    for arm in arms_wanted:
        fill_slots(config.with_plugins(arm.enabled))
    emulator = find_emulator(config) if table.emulated.on else None
    for name in left_out(config):
        click.echo(f"not compared: {name!r}; to compare it too, name it in [compare].techniques", err=True)
    fleet = assembly.fleet
    read = read_prompts(path, config.rollout, fleet.model, fleet.tokenizer, seed=config.seer.seed)
    arms = FinishedArms(out, "" if out is None else fingerprint(config, read.groups, fleet.model.digest))
    readers = {} if report is None else _readers(config)
    with arms.open(resume=resume) as finished, ExitStack() as stack:
        dashboard = None
        if dashboard_port is not None:
            from seer_cli.report.dashboard import Dashboard

            dashboard = stack.enter_context(Dashboard("Seer: techniques compared", dashboard_port))
        results, instances = run_async(_compare(config, assembly, read, repeat, finished, readers, dashboard))
    baseline = results[0]
    documents = [result.to_json(baseline) for result in results]
    if json_file is not None:
        write_json(json_file, documents)
    _print(results, read, repeat)
    if report is not None:
        _write_report(report, results, readers)
    if isinstance(emulator, str):
        click.echo(f"\n{emulator}")
    elif emulator is not None and baseline.written is not None:
        outcome = baseline.written
        responses = WrittenResponses(read.groups, outcome.tokens, outcome.cut, arms_wanted, instances)
        with quiet_logs():
            emulated = emulator(responses)
        for each in emulated:
            _print_emulated(each)
        if json_file is not None:
            names = [each.on for each in emulated]
            by_arm = zip(*(each.to_json() for each in emulated), strict=True)
            found = [{"emulated": dict(zip(names, arm, strict=True))} for arm in by_arm]
            write_json(json_file, [one | two for one, two in zip(documents, found, strict=True)])
    if not all(result.tokens_equal for result in results):
        sys.exit(1)


async def _compare(
    config: Config,
    assembly: Assembly,
    read: PromptsFile,
    repeat: int,
    finished: FinishedArms,
    readers: Mapping[str, RunReader],
    dashboard: Dashboard | None,
) -> tuple[list[ArmResult], list[InstanceInfo]]:
    """Run the comparison, and return what each arm gave, and what the instances can hold.

    An arm's reader, if there is one, reads its first repeat.
    """
    count, engine = len(assembly.fleet.engines), " and ".join(config.seer.engines)
    click.echo(f"starting {count} {engine} instances ...", err=True)
    assembly = attrs.evolve(assembly, strategies=Strategies(Policies()))

    @contextmanager
    def watch(arm: Arm, number: int) -> Iterator[Sequence[Slot[Observer]]]:
        title = arm.name if repeat == 1 else f"{arm.name} ({number + 1}/{repeat})"
        reading = []
        if readers and not number:
            reading.append(Slot[Observer]("observer", CORE, readers[arm.name]))
        if dashboard is not None:
            reading.append(Slot[Observer]("observer", CORE, dashboard.watch(title)))
        with Display(title) as display:
            yield display.slot, *reading

    async with Runtime(assembly, config.seer, config.rollout) as runtime:
        instances = list(runtime.alive.values())

        async def probe() -> MachineProbe | None:
            return await probe_machine(runtime.engines.values())

        results = await compare(
            runtime,
            config,
            read.groups,
            repeat=repeat,
            watch=watch,
            finished=finished,
            probe=None if isinstance(assembly.fleet.clock, HeldClock) else probe,
        )
        return results, instances


def _readers(config: Config) -> dict[str, RunReader]:
    """Return what reads each arm for a report; it brings numpy."""
    from seer_cli.report.reading import RunReader

    return {arm.name: RunReader() for arm in arms_of(config)}


def _write_report(path: Path, results: Sequence[ArmResult], readers: Mapping[str, RunReader]) -> None:
    """Write a page of the arms' first repeats, but for those that an earlier command had finished."""
    from seer_cli.report.data import run_of
    from seer_cli.report.page import write_page

    runs, left = [], []
    for result in results:
        name, reader = result.arm.name, readers[result.arm.name]
        if reader.requests:
            runs.append(run_of(reader, name, msgspec.to_builtins(result.summaries[0])))
        else:
            left.append(name)
    if not runs:
        click.echo(f"{path}: not written, as an earlier command had finished all arms", err=True)
        return
    write_page(path, "Seer: techniques compared", runs)
    click.echo(f"{path}: a page of {len(runs)} arms" + (f", without {', '.join(left)}" if left else ""))


def _print(results: Sequence[ArmResult], read: PromptsFile, repeat: int) -> None:
    baseline = results[0]
    requests = sum(group.n for group in read.groups)
    runs = f"; medians of {repeat} runs [least, most]" if repeat > 1 else ""
    console = table_console()
    console.print(f"{requests} responses of {len(read.groups)} groups{runs}")
    print_table(_table(results))
    console.print(f"{baseline.summaries[0].tokens:,} tokens per arm; (x): ratio to the baseline")
    probes = [probe for result in results for pair in result.probes for probe in pair]
    if probes:
        console.print(drift_in_words(probes))
    for result in results:
        for summary in result.summaries:
            if failed := summary.finish_reasons.get("error", 0):
                console.print(f"{counted(failed, 'response')} FAILED in {result.arm.name}")
            if summary.degradations:
                console.print(degradation_line(summary.degradations, f" in {result.arm.name}"))


def _print_emulated(emulated: Emulated) -> None:
    console = table_console()
    console.print(f"\n{emulated.title}")
    print_table(emulated_table(emulated))
    for sentence in emulated.about:
        console.print(sentence)


def _table(results: Sequence[ArmResult]) -> Table:
    """Return the table of the arms, side by side."""
    baseline = results[0]
    table = Table()
    table.add_column("")
    for result in results:
        table.add_column(result.arm.name, justify="right")
    drafted = any(summary.drafted_tokens for result in results for summary in result.summaries)
    for figure, title in FIGURES.items():
        if figure in DRAFTING and not drafted:
            continue
        if figure in RARE and not any(any(result.stats.values[figure]) for result in results):
            continue
        table.add_row(title, *(_cell(result, figure, baseline) for result in results))
    if all(FIXED_WORK in result.stats.values for result in results):
        table.add_row(FIXED_WORK_TITLE, *(_cell(result, FIXED_WORK, baseline) for result in results))
    same = ("yes" if each.tokens_equal else f"{len(each.differing)} differ" for each in results)
    table.add_row("same tokens", *same)
    return table


def _cell(result: ArmResult, figure: str, baseline: ArmResult) -> str:
    value, least, most = result.stats.spread(figure)
    ratio = None if result is baseline else result.stats.ratio(figure, baseline.stats)
    text = show_figure(figure, value, ratio)
    return text if least == most else f"{text}\n[{least:,.4g}, {most:,.4g}]"
