"""``seer run``: roll out a prompts file and write what comes of it."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal

import click
import msgspec
from seer_host.config_files import Config
from seer_journal import DiskJournal, Safety
from seer_journal.records import Begun
from seer_session.assembly import assemble
from seer_session.prompts import PromptsFile, read_prompts
from seer_session.results import Summary
from seer_session.runtime import Runtime

from seer_cli.common import config_options, degradation_line, main_options, run_async
from seer_cli.controls import RunControls
from seer_cli.dashboard_run import watched
from seer_cli.display import Display
from seer_cli.display_frame import standing
from seer_cli.installed import describe
from seer_cli.output import RUN_FILES, InputPath, check_apart, check_writable, write_json
from seer_cli.output_dir import OutputDir
from seer_cli.report.options import DASHBOARD_OPTION
from seer_cli.request_wording import counted
from seer_core.errors import InputError, SeerError, printable
from seer_core.model.arrays import packed
from seer_core.plugins.slots import Assembly
from seer_core.ports.kv import PoolStats
from seer_core.ports.policy import Observer
from seer_core.scheduling.scheduler import CORE

__all__ = ["run_command"]

Ending = tuple[Summary, PoolStats | None]
"""A rollout's summary, and what the pool did meanwhile."""


@click.command("run")
@main_options
@config_options
@click.option("--prompts", required=True, type=InputPath(), help="JSON lines: one prompt group each.")
@click.option("--out", required=True, type=click.Path(path_type=Path), help="Directory for the results.")
@click.option(
    "--resume", is_flag=True, help="Go on with the run in --out where it ended; begin if there is none."
)
@click.option("--overwrite", is_flag=True, help="Replace the results of an earlier run in --out.")
@click.option(
    "--journal",
    "safety",
    type=click.Choice(["disk", "system", "none"]),
    default="disk",
    show_default=True,
    help="Where tokens are before their response counts as finished: on disk, or with the operating system,"
    " which a power failure takes along; none: the run cannot be resumed.",
)
@DASHBOARD_OPTION
@click.option(
    "--iteration",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    metavar="N",
    help="Number of the training step; enters the seeds that are not in the file.",
)
@click.option("--skip-bad", is_flag=True, help="Leave out bad prompt lines, list them, roll out the rest.")
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Write the summary here too.")
def run_command(
    config: Config,
    prompts: Path,
    out: Path,
    resume: bool,
    overwrite: bool,
    safety: Safety | Literal["none"],
    dashboard_port: int | None,
    iteration: int,
    skip_bad: bool,
    json_file: Path | None,
) -> None:
    """Roll out the prompts of a file under CONFIG.

    \b
    Writes into --out, as the responses finish:
      completions.jsonl  tokens, text, log-probs, finish reason, chunks, instances
      trace.jsonl        every event and every decision; replays
      summary.json       throughput, tail time, preemptions, recomputed tokens, ...
      journal/           all tokens so far, until the run has finished

    A run that ended early, by SIGKILL or a power failure too, goes on with the same command and --resume:
    what the journal has is not computed again, and the responses are those of a run without an
    interruption, token for token.  Engines, their number and the plug-ins may differ then; prompts, seeds,
    sampling and weights may not.

    The same prompts with the same --iteration repeat their responses, with another they do not.

    Ctrl-C (exit status 130), SIGTERM (143) and SIGHUP (129) keep what has finished, and the summary says so.

    \b
    Example:
      seer run examples/tiny_reasoner/demo.toml \\
          --prompts examples/tiny_reasoner/prompts.jsonl --out out/first
    """
    if resume and overwrite:
        raise click.UsageError("--resume goes on with a run, --overwrite replaces it; choose one")
    if resume and safety == "none":
        raise click.UsageError("--resume needs the journal; leave --journal=none out")
    check_apart(json_file, *(out / name for name in RUN_FILES))
    assembly = assemble(config)
    fleet = assembly.fleet
    read = read_prompts(
        prompts,
        config.rollout,
        fleet.model,
        fleet.tokenizer,
        seed=config.seer.seed,
        iteration=iteration,
        skip_bad=skip_bad,
    )
    for bad in read.skipped:
        click.echo(f"skipped {printable(str(prompts))}:{bad.line}: {bad.reason}", err=True)
    if resume and (finished := OutputDir.finished(out)) is not None:
        _require_same(out, finished, config, read, iteration)
        OutputDir.remove_journal(out)
        if json_file is not None:
            write_json(json_file, finished)
        click.echo(f"the run in {printable(str(out))} has finished; nothing is left to do")
        return
    check_writable(json_file)
    with OutputDir(out, _requested(read), overwrite=overwrite, resume=resume) as output:
        open_journal = partial(output.open_journal, _facts(config, read, iteration), safety)
        if resume and (journal := open_journal()) is not None:
            journal.check(read.groups)
            _report_found(journal, _requested(read))
        with watched(dashboard_port, out.name) as watching:
            rolling = _roll_out(config, assembly, read, iteration, output, open_journal, json_file, *watching)
            summary, pool_stats = run_async(rolling)
    _print(summary, pool_stats, out)


def _require_same(
    out: Path, finished: Mapping[str, Any], config: Config, read: PromptsFile, iteration: int
) -> None:
    """Raise InputError if the finished run of a directory is not the one that is asked for."""
    digest = _digest(read)
    for name, before, now in (
        ("[seer].seed", finished.get("seed"), config.seer.seed),
        ("--iteration", finished.get("iteration"), iteration),
        ("the digest of prompts and sampling", finished.get("prompts_digest", digest), digest),
    ):
        if before != now:
            raise InputError(
                f"the run in {out} has finished, and is another one: {name} was {before} and is {now} now;"
                " restore it, or name another directory"
            )


def _facts(config: Config, read: PromptsFile, iteration: int) -> dict[str, str]:
    """Return what must be the same in a run that goes on with another, beside its groups and weights."""
    names = msgspec.json.encode(sorted(group.id for group in read.groups))
    return {
        "[seer].seed": str(config.seer.seed),
        "--iteration": str(iteration),
        "the digest of the prompts": hashlib.sha256(names).hexdigest()[:16],
    }


def _report_found(journal: DiskJournal, requested: int) -> None:
    if journal.found_tokens:
        click.echo(
            f"the journal has {journal.found_responses} of {requested} responses whole, and"
            f" {journal.found_tokens:,} tokens in all; going on from there",
            err=True,
        )


def _remind(journal: DiskJournal | None) -> None:
    """Say how to go on with a run that ended early."""
    if journal is not None and not journal.failed:
        with contextlib.suppress(OSError):  # after SIGHUP the terminal is gone
            click.echo("go on with this run: the same command with --resume", err=True)


async def _roll_out(
    config: Config,
    assembly: Assembly,
    read: PromptsFile,
    iteration: int,
    output: OutputDir,
    open_journal: Callable[[], DiskJournal | None],
    json_file: Path | None,
    observers: Sequence[Observer],
    controls: RunControls,
) -> Ending:
    """Roll out, and write down what has finished and how it ended, however it ends."""
    display = Display("rollout")
    assembly = assembly.with_observer(output.trace, display, *observers, owner=CORE)
    engine = " and ".join(config.seer.engines)
    click.echo(f"starting {len(assembly.fleet.engines)} {engine} instances ...", err=True)
    kv_pool = None if assembly.kv_pool is None else assembly.kv_pool.strategy
    async with Runtime(assembly, config.seer, config.rollout) as runtime:
        before = None if kv_pool is None else kv_pool.stats()
        journal = output.journal or open_journal()
        rollout = runtime.rollout(read.groups, keep=False, journal=journal)
        controls.attach(runtime)
        output.begin(rollout.unread())
        output.status.enter("rolling out")
        wanted = _requested(read)

        def progress() -> str:
            done = f"{wanted - len(rollout.unfinished)} of {wanted} responses"
            return "; ".join([done, *standing(display.progress)])

        def finish(ended: str, error: str | None = None) -> Ending:
            for completion in rollout.unread():
                output.completion(completion)
            summary = rollout.result.summary
            stats = None if kv_pool is None or before is None else kv_pool.stats().since(before)
            how = {"ended": ended, "error": error, "requested": wanted, "iteration": iteration}
            document = {**how, **_document(config, read, summary, stats)}
            output.summary(document)
            if json_file is not None:
                write_json(json_file, document)
            return summary, stats

        try:
            with display:
                async with output.status.beating(progress):
                    async for completion in rollout:
                        output.completion(completion)
        except asyncio.CancelledError:
            if journal is not None:
                await rollout.pause()  # the journal gets what chunks under way have
            finish("interrupted")
            _remind(journal)
            raise
        except Exception as error:
            with contextlib.suppress(SeerError):  # the first error is the one to report
                finish("failed", str(error))
            _remind(journal)
            raise
        return finish("finished")


def _digest(read: PromptsFile) -> str:
    """Return what stands for all groups: their prompts, sizes, seeds and how tokens are drawn."""
    groups = sorted((Begun.of(group, 0, {}) for group in read.groups), key=attrgetter("group_id"))
    packed_groups = msgspec.json.encode(groups, enc_hook=packed, order="deterministic")
    return hashlib.sha256(packed_groups).hexdigest()[:16]


def _requested(read: PromptsFile) -> int:
    return sum(group.n for group in read.groups)


def _document(
    config: Config, read: PromptsFile, summary: Summary, pool_stats: PoolStats | None
) -> dict[str, Any]:
    return {
        **msgspec.to_builtins(summary),
        "engine": config.seer.engine,
        "kv_pool": {"name": config.seer.kv_pool, **msgspec.to_builtins(pool_stats or {})},
        "plugins": [describe(name) for name in config.seer.plugins],
        "seed": config.seer.seed,
        "prompts_digest": _digest(read),
        "skipped_prompts": msgspec.to_builtins(read.skipped),
    }


def _print(summary: Summary, pool_stats: PoolStats | None, out: Path) -> None:
    click.echo(
        f"{summary.requests} responses of {summary.groups} groups, {summary.tokens:,} tokens in"
        f" {summary.total_time_s:.1f} s ({summary.throughput_tokens_per_s:,.0f} tok/s);"
        f" the last tenth took {summary.tail_time_s:.1f} s"
    )
    click.echo(
        f"{summary.chunks} chunks, {summary.migrations} migrations, {summary.preemptions} preemptions,"
        f" {summary.recomputed_tokens:,} tokens recomputed, {summary.instances_lost} instances lost"
    )
    if failed := summary.finish_reasons.get("error", 0):
        click.echo(f"{counted(failed, 'response')} FAILED: `error` in completions.jsonl has the reasons")
    if given_up := summary.finish_reasons.get("aborted", 0):
        click.echo(f"{counted(given_up, 'response')} given up before the end")
    if summary.turns:
        click.echo(
            f"{summary.turns:,} turns answered by the environment, with {summary.environment_tokens:,}"
            f" tokens; {summary.environment_s / summary.turns:.2f} s for each"
        )
    if summary.resumed_tokens:
        click.echo(
            f"{summary.resumed_tokens:,} of the tokens came from the journal and were not computed again"
        )
    if summary.exactness != "exact":
        click.echo(f"sampling was {summary.exactness}, not exact: other chunks give other tokens")
    if summary.quantization:
        click.echo(f"log-probs are those of weights quantised by {', '.join(summary.quantization)}")
    if summary.instances_failed:
        click.echo(f"{summary.instances_failed} instances GIVEN UP; see instance_failed above")
    if pool_stats is not None and pool_stats.put_bytes:
        click.echo(
            f"KV of {summary.pool_tokens:,} tokens came from the pool, of {summary.cached_tokens:,} from the"
            f" instance itself; {summary.prefilled_tokens:,} tokens were prefilled"
        )
        click.echo(
            f"pool: {_mib(pool_stats.used_bytes)} of {_mib(pool_stats.capacity_bytes)} in use,"
            f" {pool_stats.hit_blocks:,} of {pool_stats.asked_blocks:,} blocks found"
            f" ({pool_stats.hit_blocks / max(1, pool_stats.asked_blocks):.1%}),"
            f" {_mib(pool_stats.put_bytes)} in, {_mib(pool_stats.got_bytes)} out,"
            f" {pool_stats.released_blocks:,} blocks released, {pool_stats.evicted_blocks:,} evicted,"
            f" {pool_stats.torn_blocks:,} torn"
        )
    if pool_stats is not None and pool_stats.disk_capacity_bytes:
        click.echo(
            f"its disk: {_mib(pool_stats.disk_used_bytes)} of {_mib(pool_stats.disk_capacity_bytes)} in use,"
            f" {_mib(pool_stats.disk_put_bytes)} in, {_mib(pool_stats.disk_got_bytes)} out,"
            f" {pool_stats.disk_errors:,} errors"
        )
    if summary.drafted_tokens:
        click.echo(
            f"{summary.drafted_tokens:,} tokens drafted, {summary.accepted_tokens:,} accepted:"
            f" {summary.acceptance_length:.2f} tokens per request and step;"
            f" {summary.drafting_share:.1%} of the step time spent drafting"
        )
    if summary.overrun_share:
        click.echo(f"steps overran the pace that they emulate by {summary.overrun_share:.1%}")
    if summary.degradations:
        click.echo(degradation_line(summary.degradations))
    click.echo(f"results in {printable(str(out))}")


def _mib(size: int) -> str:
    return f"{size / 2**20:,.0f} MiB"
