"""``seer profile``: how long the engine's steps take, for the policy that decides how much to draft."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import attrs
import click
import msgspec
from rich.table import Table
from seer_host.config_files import Config
from seer_session.assembly import assemble
from seer_session.runtime import Runtime

from seer_cli.common import config_options, main_options, run_async
from seer_cli.output import check_writable, write_json
from seer_cli.profiles import Profile, make_profile, measure_tables
from seer_cli.tables import print_table
from seer_core.errors import ConfigError
from seer_core.plugins.slots import Assembly
from seer_core.ports.drafting import StepTimes
from seer_core.ports.engine import PlainFleet

__all__ = ["profile_command"]

BATCH = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
DRAFT_TOKENS = (0, 1, 2, 4, 6, 8, 12, 16)


@click.command("profile")
@main_options
@config_options
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    default="profile.json",
    show_default=True,
    help="The file for the times of steps.",
)
@click.option(
    "--batch", type=click.IntRange(min=1), multiple=True, help="A batch size to measure; may repeat."
)
@click.option(
    "--draft-tokens", type=click.IntRange(min=0), multiple=True, help="Drafts per request; may repeat."
)
@click.option(
    "--context",
    type=click.IntRange(min=1),
    multiple=True,
    help="Tokens of context of each request; may repeat.  [default: the engine's choice]",
)
@click.option("--together", is_flag=True, help="Measure all instances at the same time, and take their mean.")
def profile_command(
    config: Config,
    out: Path,
    batch: tuple[int, ...],
    draft_tokens: tuple[int, ...],
    context: tuple[int, ...],
    together: bool,
) -> None:
    """Measure how long decoding steps of CONFIG's engine take: T(batch, draft tokens).

    Starts one instance with CONFIG's drafter, if it has one, makes steps of every size that it can run, and
    writes the medians as JSON.  Name the file in the drafter's settings, and instances start without
    measuring by themselves.  `seer twin` predicts whole runs from it; for that, measure several --context,
    and --together where instances share a machine.

    \b
    Example:
      seer profile examples/tiny_reasoner/demo.toml --out profile.json
      seer run examples/tiny_reasoner/demo.toml --set plugin.grouped_spec.profile=profile.json ...
    """
    check_writable(out)
    if len(config.seer.engines) > 1:
        raise ConfigError(
            f"[seer].engine names {' and '.join(config.seer.engines)}, whose steps take different times;"
            f" profile one of them: --set seer.engine={config.seer.engines[0]}"
        )
    assembly = assemble(config)
    drafts = assembly.strategies.drafter is not None
    if not drafts and any(draft_tokens):
        raise ConfigError(
            "--draft-tokens: no plug-in of [seer].plugins drafts; add one that does, or leave the option out"
        )
    lengths = (draft_tokens or DRAFT_TOKENS) if drafts else ()
    grid = tuple(sorted(set(batch or BATCH))), tuple(sorted({0, *lengths}))
    profile = run_async(_measure(config, assembly, *grid, sorted(set(context)) or [None], together))
    write_json(out, msgspec.to_builtins(profile))
    for times in profile.tables:
        _print(times)
    click.echo(f"milliseconds per step; written to {out}")


async def _measure(
    config: Config,
    assembly: Assembly,
    batch: tuple[int, ...],
    draft_tokens: tuple[int, ...],
    contexts: Sequence[int | None],
    together: bool,
) -> Profile:
    fleet = assembly.fleet
    engines = list(fleet.engines) if together else list(fleet.engines)[:1]
    [name] = config.seer.engines
    some = PlainFleet(engines, fleet.clock, fleet.model, fleet.tokenizer)
    click.echo(f"starting {len(engines)} {name} instance(s) ...", err=True)
    async with Runtime(attrs.evolve(assembly, fleet=some), config.seer, config.rollout) as runtime:
        click.echo("measuring ...", err=True)
        return make_profile(
            await measure_tables(engines, batch, draft_tokens, contexts),
            list(runtime.alive.values()),
            engine=name,
            instances=len(fleet.engines),
            together=together,
        )


def _print(times: StepTimes) -> None:
    context = f"{times.context_tokens} tokens of context" if times.context_tokens else None
    table = Table("batch", *(f"{tokens} drafted" for tokens in times.draft_tokens), title=context)
    for batch, row in zip(times.batch, times.seconds, strict=True):
        table.add_row(str(batch), *(f"{seconds * 1e3:.2f}" for seconds in row))
    print_table(table)
