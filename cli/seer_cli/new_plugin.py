"""``seer new-plugin``: a distribution to start from, whose tests pass before anything is changed."""

from __future__ import annotations

import re
import shutil
from importlib.util import find_spec
from pathlib import Path

import click
from seer_session.assembly import NO_POOL, installed

from seer_cli.common import main_options
from seer_cli.copying import EXAMPLE_SLOTS, files_of
from seer_core.errors import ConfigError, OutputError

__all__ = ["new_plugin_command"]

NAME = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*")


@click.command("new-plugin")
@main_options
@click.argument("name")
@click.option(
    "--slot",
    "slots",
    required=True,
    multiple=True,
    type=click.Choice(sorted(EXAMPLE_SLOTS)),
    help="What it fills; see docs/reference/hooks.md.",
)
@click.option("--path", type=click.Path(path_type=Path), help="Where to write it.  [default: NAME]")
def new_plugin_command(name: str, slots: tuple[str, ...], path: Path | None) -> None:
    """Write a plug-in NAME: package, pyproject.toml, README and tests, to be changed into your own.

    It works as it is: install it, run its tests, enable it in [seer].plugins.  Nothing is overwritten.

    \b
    Example:
      seer new-plugin shortest_first --slot prioritizer
      pip install -e 'shortest_first[test]'
      pytest shortest_first
    """
    if len(slots) > 1:
        raise ConfigError(
            f"--slot is given {len(slots)} times; write a plug-in for {slots[0]!r}, and add other hooks to"
            " its package: one plug-in may fill several slots (docs/reference/hooks.md)"
        )
    [slot] = slots
    _check(name)
    target = Path(name) if path is None else path
    try:
        if target.exists() and (not target.is_dir() or any(target.iterdir())):
            raise OutputError(f"{target} is there already; name another place with --path")
        try:
            for relative, text in files_of(name, slot).items():
                file = target / relative
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(text, "utf-8")
        except OSError:
            shutil.rmtree(target, ignore_errors=True)  # nothing but ours is in it
            raise
    except OSError as error:
        raise OutputError(
            f"cannot write {target}: {error.strerror}; name another place with --path"
        ) from error
    click.echo(f"{target}: plug-in {name!r} for the slot {slot!r}")
    click.echo(f"next: pip install -e '{target}[test]' && pytest {target}")


def _check(name: str) -> None:
    """Refuse names that a package, a config or another plug-in cannot share."""
    suggestion = re.sub(r"\W+|_+", "_", name.lower()).strip("_").lstrip("0123456789_")
    hint = f"; for example {suggestion!r}" if NAME.fullmatch(suggestion) else ""
    if not NAME.fullmatch(name):
        raise ConfigError(f"{name!r} is no name for a plug-in: use lower-case words joined by _{hint}")
    if name == NO_POOL:
        raise ConfigError(f"{name!r} stands for no plug-in at all in a config; choose another name")
    if name in installed():
        raise ConfigError(f"a plug-in called {name!r} is installed already; choose another name")
    if find_spec(f"seer_{name}") is not None:
        raise ConfigError(f"a package called seer_{name} is installed already; choose another name")
