"""docs/reference/settings.md: every key of a config, from the structs that check it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import attrs
from seer_cli.compare_table import CompareTable
from seer_host.config_files import RolloutTable
from seer_host.tables import SeerTable
from seer_rl.config import TrainTable
from seer_session.assembly import MADE_BY, NoSettings
from seer_session.hooks import read_hooks
from seer_sim.cost import CostModel
from seer_verl.settings import VerlSettings

from reference.packages import repository_entry_points
from reference.page import Page, markdown

__all__ = ["page", "plugin_tables"]

INTRODUCTION = """\
A config is a TOML file. Each table below has its keys; an unknown key is refused, and so is a value beyond
its range. `--set TABLE.KEY=VALUE` sets one key from the command line, and `seer config FILE` shows every
value and its origin. "Required" stands where there is no default, "none" where a key that is left out has no
value. An empty unit means a plain count, a share or a name."""


@attrs.frozen
class Table:
    """A table of a config, and the struct that checks it."""

    name: str
    struct: type


def page() -> Page:
    """Return the page."""
    found = Page("settings.md", "Settings", INTRODUCTION)
    plugins = list(plugin_tables())
    families = [
        (
            "A run",
            "",
            [Table("seer", SeerTable), Table("rollout", RolloutTable), Table("compare", CompareTable)],
        ),
        (
            "Launchers",
            "`[seer].launcher` names one of these, or `local`.",
            _of(plugins, "launcher."),
        ),
        ("Engines", "`[seer].engine` names one of these, or several.", _of(plugins, "engine.")),
        ("KV pools", "`[seer].kv_pool` names one of these, or `none`.", _of(plugins, "kv_pool.")),
        ("Plug-ins", _without_settings(), _of(plugins, "plugin.")),
        (
            "Training",
            "`seer train` reads these tables beside those above.",
            [Table("train", TrainTable)],
        ),
    ]
    for title, introduction, tables in families:
        found.heading(2, title)
        found.add(introduction)
        for table in tables:
            _section(found, table.name, table.struct)
            if table.name == "engine.sim":
                _section(found, "engine.sim.cost", CostModel)
    found.heading(2, "verl")
    found.add(f"In verl's own config. {markdown(VerlSettings.__doc__ or '')}")
    found.fields(VerlSettings)
    return found


def plugin_tables() -> Iterator[Table]:
    """Yield the table of each plug-in, named as a config names it; NoSettings where there is none."""
    for point in sorted(repository_entry_points("seer"), key=lambda each: each.name):
        namespace = point.load()
        slots = set(read_hooks(point.name, namespace)) - {"doctor"}
        if slots:
            kind = next((kind for kind, slot in MADE_BY.items() if slot in slots), "plugin")
            yield Table(f"{kind}.{point.name}", getattr(namespace, "Settings", NoSettings))


def _of(tables: Sequence[Table], prefix: str) -> list[Table]:
    return [each for each in tables if each.name.startswith(prefix) and each.struct is not NoSettings]


def _without_settings() -> str:
    names = [each.name.removeprefix("plugin.") for each in plugin_tables() if each.struct is NoSettings]
    return f"Without settings: {', '.join(f'`{name}`' for name in names)}."


def _section(page: Page, name: str, struct: type) -> None:
    """Add a table, and then each table within it."""
    page.heading(3, f"`[{name}]`")
    about = markdown(struct.__doc__ or "").removeprefix(f"`[{name}]`: ")
    page.add(about[:1].upper() + about[1:])
    for field in page.fields(struct):
        if field.struct is not None:
            _section(page, f"{name}.{field.name}", field.struct)
