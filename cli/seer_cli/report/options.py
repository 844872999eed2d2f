"""Options of commands that write or serve a page; what does so is imported only where one is given."""

from __future__ import annotations

from pathlib import Path

import click

__all__ = ["DASHBOARD_OPTION", "REPORT_OPTION"]

DASHBOARD_OPTION = click.option(
    "--dashboard",
    "dashboard_port",
    type=click.IntRange(0, 65535),
    is_flag=False,
    flag_value=0,
    metavar="[PORT]",
    help="Show the run in a browser while it goes on; without PORT, at a free one.",
)

REPORT_OPTION = click.option(
    "--report",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Write a page that shows them side by side, as `seer report` does.",
)
