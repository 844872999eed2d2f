"""``seer plugins``, ``seer config``, ``seer doctor``: what is there, what is set, what is missing."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import msgspec
from rich.table import Table
from seer_host.config_files import Config
from seer_host.tables import SlotsTable
from seer_session.assembly import fill_slots, installed, load_enabled

from seer_cli.common import config_options, load, main_options
from seer_cli.compare_table import compare_table
from seer_cli.doctor import examine
from seer_cli.installed import MEANINGS, describe, offers, slots_of, tier_of
from seer_cli.output import JSON_OPTION, InputPath, check_writable, write_json
from seer_cli.tables import print_table, prose
from seer_core.errors import printable
from seer_core.scheduling.scheduler import CORE

__all__ = ["config_command", "doctor_command", "plugins_command"]

SHOWN = 2000
"""Characters of a value that the table of a config shows."""


@click.command("plugins")
@main_options
@click.argument("config", required=False, type=InputPath())
@JSON_OPTION
def plugins_command(config: Path | None, json_file: Path | None) -> None:
    """List the installed plug-ins, their tiers and slots; with CONFIG, the slots that they own.

    Installing a plug-in enables nothing: imported are those that CONFIG names.  The
    slots and the tier of support are read from the source.

    \b
    Example:
      seer plugins examples/tiny_reasoner/demo.toml
    """
    check_writable(json_file)
    owned: dict[str, tuple[str, ...]] = {}
    passed_over: dict[str, tuple[str, ...]] = {}
    if config is not None:
        loaded = load(config)
        owned, passed_over = slots_of(loaded), _passed_over(loaded)
    rows: list[dict[str, Any]] = [
        {
            **describe(name),
            "tier": tier_of(name),
            "enabled": name in owned,
            "slots": list(owned[name] if name in owned else offers(name)),
            "passed_over": list(passed_over.get(name, ())),
        }
        for name in installed()
    ]
    if json_file is not None:
        write_json(json_file, rows)
    table = Table("plug-in", "distribution", "version", "tier", "enabled", prose("slots"))
    for row in rows:
        enabled = "yes" if row["enabled"] else ("no" if config is not None else "")
        slots = [*row["slots"], *(f"not {slot}: passed over" for slot in row["passed_over"])]
        cells = (row["name"], row["distribution"], row["version"], row["tier"], enabled, ", ".join(slots))
        table.add_row(*cells)
    print_table(table)
    for tier, meaning in MEANINGS.items():
        click.echo(f"{tier}: {meaning}")
    click.echo("docs/reference/support.md: where each has run")


@click.command("config")
@main_options
@config_options
@JSON_OPTION
def config_command(config: Config, json_file: Path | None) -> None:
    """Show every effective value of CONFIG and where it comes from.

    The keys [seer.slots] show which plug-in fills a slot, also where CONFIG leaves that open.

    \b
    Example:
      seer config examples/tiny_reasoner/demo.toml --set plugin.divided_rollout.chunk_tokens=512
    """
    check_writable(json_file)
    others = {f"seer.slots.{slot}": names for slot, names in fill_slots(config).passed_over.items()}
    rows = [
        {
            "key": key,
            "value": value,
            "origin": config.origins.get(key, "default"),
            **({"passed_over": list(others[key])} if others.get(key) else {}),
        }
        for key, value in _effective(config)
    ]
    if json_file is not None:
        write_json(json_file, rows)
    table = Table(prose("key"), prose("value"), prose("origin"))
    for row in rows:
        value = msgspec.json.encode(row["value"]).decode()
        if "passed_over" in row:
            value += f" (passed over: {', '.join(row['passed_over'])})"
        cells = (row["key"], value, row["origin"])
        table.add_row(*(printable(cell, SHOWN) for cell in cells))
    print_table(table)


@click.command("doctor")
@main_options
@click.argument("config", required=False, type=InputPath())
@JSON_OPTION
def doctor_command(config: Path | None, json_file: Path | None) -> None:
    """Say what this machine lacks, for which part, and how to get it; exit status 1 if anything.

    With CONFIG, only the core and the plug-ins that it enables are examined; without it also what training
    with TRL, verl, slime or SkyRL takes, which counts as lacking only where it is there and broken.

    \b
    Example:
      seer doctor examples/tiny_reasoner/demo.toml
    """
    check_writable(json_file)
    checks = examine(load(config) if config is not None else None)
    if json_file is not None:
        write_json(json_file, msgspec.to_builtins(checks))
    table = Table("part", "", prose("finding"), prose("remedy"))
    for check in checks:
        finding, remedy = (printable(text, keep="\n") for text in (check.finding, check.remedy))
        table.add_row(check.part, "ok" if check.ok else "MISSING", finding, remedy)
    print_table(table)
    if not all(check.ok for check in checks):
        sys.exit(1)


def _effective(config: Config) -> Iterator[tuple[str, Any]]:
    seer = msgspec.to_builtins(config.seer) | {"slots": _who_fills(config)}
    further = {"compare": compare_table(config), **config.tables}
    for name, table in {"seer": seer, "rollout": config.rollout, **further}.items():
        yield from _flat(name, msgspec.to_builtins(table))
    for kind, plugin in load_enabled(config):
        yield from _flat(f"{kind}.{plugin.name}", msgspec.to_builtins(plugin.settings))


def _who_fills(config: Config) -> dict[str, str | list[str]]:
    """Return who fills each slot: a name, or several where one wraps the next."""
    filled: dict[str, list[str]] = {}
    for slot in fill_slots(config).slots:
        filled.setdefault(slot.name, []).append(slot.owner)
    return {
        slot: owners[0] if len(owners := filled.get(slot, [CORE])) == 1 else owners
        for slot in SlotsTable.__struct_fields__
    }


def _passed_over(config: Config) -> dict[str, tuple[str, ...]]:
    """Return, by plug-in, the slots that it offers to fill and others do."""
    passed_over: dict[str, tuple[str, ...]] = {}
    for slot, names in fill_slots(config).passed_over.items():
        for name in names:
            passed_over[name] = (*passed_over.get(name, ()), slot)
    return passed_over


def _flat(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from _flat(f"{name}.{key}", inner)
    else:
        yield name, value
