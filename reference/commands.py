"""docs/reference/commands.md: every command with its help, its options and its example."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator

import click
from seer_cli import COMMANDS, main

from reference.packages import repository_entry_points
from reference.page import Page

__all__ = ["page"]

INTRODUCTION = """\
Every command takes `--help`. Exit status 0 means that all is done. Status 1 means that an engine failed, or
that the command's own check found something. Status 2 means that the call, a file or a config has to be
mended. A status above 128 means that a signal ended the command."""

EXAMPLE = re.compile(r"\x08\n(.*?)(?:\n\n|\Z)", re.S)


def page() -> Page:
    """Return the page."""
    found = Page("commands.md", "Commands", INTRODUCTION)
    for name, command in sorted(commands()):
        found.heading(2, f"`{name}`")
        if not command.help:
            found.flaws.append(f"the command {name!r} has no help: write a docstring")
        found.add(usage(name, command), *prose(command.help or ""))
        context = click.Context(command, info_name=name, **command.context_settings)
        rows = [_row(each, context) for each in command.params]
        found.table(["argument or option", "default", "meaning"], [row for row in rows if row[2]])
        found.add(*prose(command.epilog or ""))
        found.flaws += [
            f"the option {row[0]} of {name!r} has no help: give it one"
            for each, row in zip(command.params, rows, strict=True)
            if isinstance(each, click.Option) and not row[2]
        ]
    return found


def commands() -> Iterator[tuple[str, click.Command]]:
    """Yield each command that does something, with its whole name."""
    tops = {**main.commands, **{point.name: point.load() for point in repository_entry_points(COMMANDS)}}
    for name, command in tops.items():
        yield from _within(f"seer {name}", command)


def _within(name: str, command: click.Command) -> Iterator[tuple[str, click.Command]]:
    if isinstance(command, click.Group):
        for inner, each in command.commands.items():
            yield from _within(f"{name} {inner}", each)
    else:
        yield name, command


def usage(name: str, command: click.Command) -> str:
    """Return the line that shows how the command is called."""
    pieces = command.collect_usage_pieces(click.Context(command, info_name=name, **command.context_settings))
    return f"```text\n{' '.join([name, *pieces])}\n```"


def prose(text: str) -> Iterator[str]:
    """Yield the paragraphs of a help text; one that click is not to wrap is code."""
    for part in re.split(r"\n\n+", inspect.cleandoc(text)):
        if part.startswith("\b"):
            title, _, code = part.removeprefix("\b\n").partition("\n")
            yield title
            yield f"```text\n{inspect.cleandoc(code)}\n```"
        else:
            yield re.sub(r"(?<=[.?!:])  (?=\S)", " ", part)


def _row(parameter: click.Parameter, context: click.Context) -> tuple[str, str, str]:
    """Return the names of a parameter, its default where that is shown, and its help."""
    if isinstance(parameter, click.Option):
        extra = parameter.get_help_extra(context)
        names = ", ".join(f"`{name}`" for name in (*parameter.opts, *parameter.secondary_opts))
        takes = "" if parameter.is_flag else f" `{parameter.make_metavar(context)}`"
        limits = [extra["range"]] if "range" in extra else []
        more = [*limits, *(["required"] if parameter.required else []), *_shown(extra)]
        return names + takes, "; ".join(more), parameter.help or ""
    return f"`{parameter.make_metavar(context)}`", "", ""


def _shown(extra: click.types.OptionHelpExtra | dict[str, str]) -> list[str]:
    return [f"`{extra['default']}`"] if "default" in extra else []
