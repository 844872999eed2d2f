"""``seer twin``: predict the arms of ``seer compare`` on one's own engines, beside what was measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click
import msgspec
from rich.console import Console
from rich.table import Table
from seer_cli.common import config_options, main_options
from seer_cli.comparison import Arm, arms_of
from seer_cli.output import TRACE, InputPath, check_writable, write_json
from seer_cli.profiles import read_profile
from seer_cli.report.command import read_run
from seer_cli.report.data import RunData, run_of
from seer_cli.report.options import REPORT_OPTION
from seer_cli.report.page import write_page
from seer_cli.report.reading import RunReader
from seer_cli.stats import Stats
from seer_cli.tables import print_table, table_console
from seer_host.config_files import Config
from seer_host.json_files import JsonFormat
from seer_host.tables import nearest
from seer_session.assembly import fill_slots

from seer_core.errors import ConfigError, quote
from seer_core.plugins.config_types import NotNegative
from seer_lab.bound import Bound, bounds_of
from seer_lab.calibrate import calibrated, plugins_of
from seer_lab.options import check_unbounded, drafts_option
from seer_lab.policies import PolicySet
from seer_lab.recorded import log_files
from seer_lab.replayed import read_replayed, with_replayed
from seer_lab.shares import Shares
from seer_lab.simulate import ENGINES, simulate
from seer_lab.table import ShareRow, bound_rows, share_table
from seer_lab.twin import Twin, make_twin

__all__ = ["FIGURES", "predict", "twin_command"]

FIGURES = {
    "total_time_s": ("total\ntime, s", ",.1f"),
    "tail_time_s": ("tail\ntime, s", ",.1f"),
    "throughput_tokens_per_s": ("tokens\nper s", ",.0f"),
    "preemptions": ("preemp-\ntions", ",.0f"),
    "recomputed_tokens": ("recomputed\ntokens", ",.0f"),
    "acceptance_length": ("tokens per\nstep", ".2f"),
}
"""What is predicted, how it is called and how shown."""

TOTAL_TIME = "total_time_s"


class _MeasuredArm(msgspec.Struct, frozen=True):
    """The figures of an arm of ``seer compare --json`` that are compared."""

    name: str
    total_time_s: NotNegative
    tail_time_s: NotNegative
    throughput_tokens_per_s: NotNegative
    preemptions: NotNegative
    recomputed_tokens: NotNegative
    acceptance_length: NotNegative


_MEASURED = JsonFormat[list[_MeasuredArm]](
    list[_MeasuredArm], "no comparison", "write one with `seer compare --json`", ConfigError
)


@click.command("twin", context_settings={"default_map": {"log_level": "warning"}})
@main_options
@config_options
@click.option(
    "--profile",
    required=True,
    type=InputPath(),
    help="Of `seer profile CONFIG`, with several --context.",
)
@click.option(
    "--lengths",
    required=True,
    type=InputPath(),
    help="Directory of a finished `seer run CONFIG`, or a file as for `seer sim`.",
)
@click.option("--compare", "measured_file", type=InputPath(), help="Measured: `seer compare --json`.")
@drafts_option
@click.option(
    "--calibrate",
    is_flag=True,
    help="Slow all steps by one factor: the recorded run then takes as long as it did.",
)
@click.option(
    "--engine",
    type=click.Choice(ENGINES),
    default="sim",
    show_default=True,
    help="paced: vLLM's own scheduler; it repeats the recorded text, and really drafts from it."
    "  SGLang's does not draft.",
)
@click.option(
    "--bound",
    "bounded",
    is_flag=True,
    help="Compare each arm with the least time that any schedule takes, and show what instances spend their"
    " time on.",
)
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Write one object per arm.")
@REPORT_OPTION
def twin_command(
    config: Config,
    profile: Path,
    lengths: Path,
    measured_file: Path | None,
    drafts_file: Path | None,
    calibrate: bool,
    engine: str,
    bounded: bool,
    json_file: Path | None,
    report: Path | None,
) -> None:
    """Predict what `seer compare CONFIG` would show, from measured step times and recorded lengths.

    Fits the simulator's cost model to the profile, and rolls the recorded lengths out under every arm.  With
    --drafts the worth of drafts follows from recorded text, which may have been written without drafts.
    Otherwise it is the recorded run's: an input, not a prediction.  With --bound the page of --report says
    how far the recorded run itself was from its bound.

    \b
    Example:
      seer profile CONFIG --together --context 64 --context 1024 --out profile.json
      seer run CONFIG --prompts prompts.jsonl --out out/first
      seer twin CONFIG --profile profile.json --lengths out/first
      seer twin CONFIG --profile profile.json --lengths out/first --bound --report could_have.html
    """
    check_writable(json_file, report, inputs=log_files(lengths))
    check_unbounded(drafts_file, bounded=bounded)
    measured = None if measured_file is None else _read_measured(config, measured_file)
    pages: list[RunData] = []
    rows, about = predict(
        config,
        profile,
        lengths,
        measured,
        calibrate=calibrate,
        engine=engine,
        bounded=bounded,
        drafts=drafts_file,
        pages=None if report is None else pages,
    )
    if json_file is not None:
        write_json(json_file, rows)
    if report is not None:
        if (lengths / TRACE).exists():
            pages.insert(0, read_run(lengths, "recorded", _bound_of_recorded(config, lengths, rows)))
        write_page(report, f"Seer: the twin of {lengths.name}", pages)
    _print(rows, about)


def predict(
    config: Config,
    profile: Path,
    lengths: Path,
    measured: Mapping[str, Mapping[str, float]] | None = None,
    *,
    calibrate: bool = False,
    engine: str = "sim",
    bounded: bool = False,
    drafts: Path | None = None,
    pages: list[RunData] | None = None,
) -> tuple[list[dict[str, Any]], str]:
    """Return one object per arm, with figures predicted, measured and the error, and a line on the fit.

    With ``calibrate`` the total time of the recorded run's own arm is no prediction any more: it says so.
    With ``bounded`` an arm has its ``bound``, and what times are over it, and on simulated engines ``shares``
    of instances' time and ``kv_by_tenths``.
    ``measured`` holds figures by name, by arm.  ``error`` is predicted over measured, less 1.  To ``pages``,
    if it is given, is added what a page shows of each arm.

    Raises:
        ConfigError, InputError, PromptError: see ``make_twin``.
    """
    twin, fitted = make_twin(config, read_profile(profile), lengths)
    if drafts is not None:
        twin = with_replayed(twin, read_replayed(drafts))
    factor = 1.0
    if calibrate:
        twin, factor = calibrated(twin, lengths)
    arms = arms_of(config)
    for arm in arms:
        fill_slots(twin.config(arm.plugins))
    rows: list[dict[str, Any]] = []
    for arm in arms:
        policy = PolicySet(arm.name, arm.plugins, has_lengths=arm.has_lengths, shares_kv=arm.shares_kv)
        reader = RunReader()
        watching = [] if pages is None else [reader]
        run = simulate(twin, policy, observers=watching, engine=engine, shares=bounded)
        predicted = {name: float(getattr(run.summary, name)) for name in FIGURES}
        row: dict[str, Any] = {"name": arm.name, "plugins": list(arm.plugins), "predicted": predicted}
        if calibrate:
            row["slowed_by"] = factor
            row["is_recorded_run"] = _is_of(lengths, arm)
        if measured is not None and arm.name in measured:
            row["measured"] = {name: measured[arm.name][name] for name in FIGURES}
            found = _of_one_run(predicted).ratios(_of_one_run(row["measured"]))
            row["error"] = {name: ratio - 1 for name, ratio in found.items()}
        if bounded:
            row |= _bound_of(twin, policy, row)
        if run.shares is not None:
            row |= {"shares": msgspec.to_builtins(run.shares), "kv_by_tenths": run.kv_by_tenths}
        rows.append(row)
        if pages is not None:
            least_s = row["bound"]["total_time_s"] if "bound" in row else None
            pages.append(run_of(reader, arm.name, msgspec.to_builtins(run.summary), least_s))
    about = (
        f"fitted step times are {fitted.median_error:.1%} off the profile's in the median,"
        f" {fitted.worst_error:.1%} at worst"
    )
    if drafts is None:
        about += "; lengths, and what drafts were worth, are the recorded run's"
    else:
        about += f"; lengths are the recorded run's, and drafts are worth what a replay of {drafts} says"
    if calibrate:
        about += f"; all are slowed by {factor:.3f}, so that the recorded run takes as long as it did"
    about = "; ".join((about, *twin.notes))
    return rows, about


def _bound_of(twin: Twin, policy: PolicySet, row: Mapping[str, Any]) -> dict[str, Any]:
    """Return an arm's bound, and predicted and measured times over it; nothing if it has none."""
    bounds = list(bounds_of(twin, [policy], [0]).values())
    if not bounds:
        return {}
    least_s = bounds[0].total_time_s
    over = {kind: row[kind][TOTAL_TIME] / least_s for kind in ("predicted", "measured") if kind in row}
    return {"bound": msgspec.to_builtins(bounds[0]), "over_bound": over}


def _is_of(run: Path, arm: Arm) -> bool:
    """Return whether a recorded run had the plug-ins of this arm."""
    return set(arm.plugins) == set(plugins_of(run)).difference(arm.observers)


def _bound_of_recorded(config: Config, run: Path, rows: Sequence[Mapping[str, Any]]) -> float | None:
    """Return the bound of the arm that was recorded, if it is among them."""
    least_s = {row["name"]: row["bound"]["total_time_s"] for row in rows if "bound" in row}
    found = [least_s[arm.name] for arm in arms_of(config) if arm.name in least_s and _is_of(run, arm)]
    return found[0] if found else None


def _of_one_run(figures: Mapping[str, float]) -> Stats:
    return Stats({name: [value] for name, value in figures.items()})


def _read_measured(config: Config, path: Path) -> dict[str, dict[str, float]]:
    """Return what ``seer compare --json`` wrote, by arm.

    Raises:
        ConfigError: it is no such file, or speaks of an arm that CONFIG has not.
    """
    measured = {arm.name: {name: getattr(arm, name) for name in FIGURES} for arm in _MEASURED.read(path)}
    known = [arm.name for arm in arms_of(config)]
    for name in measured:
        if name not in known:
            raise ConfigError(f"--compare {path}: the config has no arm {quote(name)}{nearest(name, known)}")
    return measured


def _print(rows: Sequence[Mapping[str, Any]], about: str) -> None:
    has_bounds = any("bound" in row for row in rows)
    table = Table()
    table.add_column("arm", no_wrap=True)
    table.add_column("")
    for name, (title, _) in FIGURES.items():
        table.add_column(title, justify="right", no_wrap=True)
        if name == TOTAL_TIME and has_bounds:
            table.add_column("over\nbound", justify="right", no_wrap=True)
    for row in rows:
        for kind in ("predicted", "measured", "error"):
            if kind not in row:
                continue
            cells = []
            for name, (_, form) in FIGURES.items():
                form = "+.1%" if kind == "error" else form
                cells.append(format(row[kind][name], form) if name in row[kind] else "")
                if name == TOTAL_TIME and has_bounds:
                    over = row.get("over_bound", {})
                    cells.append(f"{over[kind]:.2f}x" if kind in over else "")
            table.add_row(row["name"] if kind == "predicted" else "", kind, *cells)
    console = table_console()
    print_table(table, keys=2)
    console.print(about)
    if has_bounds:
        _print_shares(rows, console)


def _print_shares(rows: Sequence[Mapping[str, Any]], console: Console) -> None:
    """Print what the predicted arms, and their bounds, spend the time of instances on."""
    console.print("over bound: total time over the least that any schedule takes (docs/explain/bound.md)")
    shares = [
        ShareRow(row["name"], [msgspec.convert(row["shares"], Shares)], [row["kv_by_tenths"]])
        for row in rows
        if "shares" in row
    ]
    bounds = ([msgspec.convert(row["bound"], Bound)] for row in rows if "bound" in row)
    print_table(share_table([*shares, *bound_rows(bounds)], first="arm"))
    console.print("shares of all instances' time, idle time included")
