"""The command line: ``seer run | compare | plugins | config | doctor``."""

from __future__ import annotations

import click

from seer_core.cli.compare import compare_command
from seer_core.cli.inspect import config_command, doctor_command, plugins_command
from seer_core.cli.run import run_command

__all__ = ["main"]


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(package_name="seer-core", prog_name="seer")
def main() -> None:
    """Roll out prompt groups for synchronous RL: same tokens, less waiting for the longest response."""


for command in (run_command, compare_command, plugins_command, config_command, doctor_command):
    main.add_command(command)
