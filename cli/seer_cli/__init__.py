"""The command line: ``seer run | status | explain | compare | profile | doctor``, and more.

Distributions add commands of their own.
"""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import Any

import click
from seer_host.installation import COMMAND_EXTRAS, how_to_install
from seer_host.json_files import is_text

from seer_cli.common import interruptible
from seer_cli.compare import compare_command
from seer_cli.explain import explain_command
from seer_cli.export import export_command
from seer_cli.inspect import config_command, doctor_command, plugins_command
from seer_cli.new_plugin import new_plugin_command
from seer_cli.profile import profile_command
from seer_cli.report.command import report_command
from seer_cli.run import run_command
from seer_cli.status import status_command
from seer_core.errors import SeerError, quote

__all__ = ["COMMANDS", "main"]

COMMANDS = "seer.commands"
"""Entry-point group of commands that distributions add, each a ``click.Command``."""


class _Commands(click.Group):
    """Our commands and those of installed distributions, which are imported when first needed."""

    def make_context(self, *arguments: Any, **options: Any) -> click.Context:
        with interruptible():  # to find a command is to import it
            return super().make_context(*arguments, **options)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted({*super().list_commands(ctx), *entry_points(group=COMMANDS).names})

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        own = super().get_command(ctx, name)
        if own is not None:
            return own
        for point in entry_points(group=COMMANDS, name=name):
            owner = point.dist.name if point.dist else point.value
            try:
                command = point.load()
            except Exception as error:
                fault = f"{type(error).__name__}: {error}"
                return _broken(name, f"cannot be imported: {fault}; mend or reinstall {owner}")
            if not isinstance(command, click.Command):
                return _broken(name, f"is no click.Command; report it to the author of {owner}")
            return command
        if name in COMMAND_EXTRAS:
            return _broken(name, f"is not installed; {how_to_install(COMMAND_EXTRAS[name], '`make setup`')}")
        return None

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        for argument in args:
            if not is_text(argument):  # no stream that we print it on would take it
                raise click.UsageError(
                    f"{quote(argument)} is not UTF-8; type it anew, or rename the file", ctx
                )
        return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> object:
        try:
            with interruptible():
                return super().invoke(ctx)
        except SeerError as error:
            if ctx.invoked_subcommand in self.commands:  # our commands report their own, and obey --debug
                raise
            raise click.ClickException(str(error)) from error


def _broken(name: str, why: str) -> click.Command:
    """Return a command that only says why it cannot run, so that the others still can.

    It takes all arguments, those of the command in its place and ``--help`` among them.
    """

    def fail(arguments: tuple[str, ...]) -> None:
        raise click.ClickException(f"command {name!r} {why}")

    return click.Command(
        name,
        callback=fail,
        params=[click.Argument(["arguments"], nargs=-1, type=click.UNPROCESSED)],
        short_help=why,
        add_help_option=False,
        context_settings={"ignore_unknown_options": True},
    )


@click.group(
    cls=_Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100}
)
@click.version_option(package_name="seer-core", prog_name="seer")
def main() -> None:
    """Roll out prompt groups for synchronous RL: same tokens, less waiting for the longest response."""


for command in (
    run_command,
    status_command,
    explain_command,
    export_command,
    report_command,
    compare_command,
    profile_command,
    plugins_command,
    config_command,
    doctor_command,
    new_plugin_command,
):
    main.add_command(command)
