"""The table ``[compare]`` of a config, which ``seer compare`` reads."""

from __future__ import annotations

from msgspec import Struct
from seer_host.config_files import Config

from seer_core.errors import ConfigError, quote

__all__ = ["CompareTable", "EmulatedTable", "compare_table"]


class EmulatedTable(Struct, frozen=True):
    """``[compare.emulated]``: further tables, of the same responses on emulated accelerators.

    Their times are virtual, so they are the same on any machine, however busy that is.  Arms, instances and
    their KV are those of the comparison.
    """

    on: tuple[str, ...] = ()
    """The models and GPUs, by the names of ``seer sim --on``, with a table each. An empty list leaves them
    out.
    """
    set: tuple[str, ...] = ()
    """Keys that differ there, each as for ``--set``, such as settings that suit a CPU alone."""


class CompareTable(Struct, frozen=True):
    """``[compare]``: the arms of ``seer compare``, as lists of plug-ins.

    Of ``[seer].plugins`` that no list names, observers and the environment are in every arm.  Others are left
    out, which ``seer compare`` reports.
    """

    prompts: str = "prompts.jsonl"
    """The prompts file, relative to the config file."""
    baseline: tuple[str, ...] = ("group_round_robin",)
    """The plug-ins of the first arm."""
    techniques: tuple[str, ...] = ("divided_rollout", "context_sched", "grouped_spec")
    """The plug-ins that are added to the arms one by one."""
    oracle: tuple[str, ...] = ("divided_rollout", "oracle_longest_first")
    """The plug-ins of an arm that is given the lengths which the baseline found; an empty list leaves the arm
    out.
    """
    emulated: EmulatedTable = EmulatedTable()
    """Further tables, of the same responses on emulated accelerators."""

    def __post_init__(self) -> None:
        """Raise ConfigError where a list names a plug-in twice."""
        for key in ("baseline", "techniques", "oracle"):
            names: tuple[str, ...] = getattr(self, key)
            for name in names:
                if names.count(name) > 1:
                    raise ConfigError(f"[compare].{key} lists {quote(name)} twice; keep one")


def compare_table(config: Config) -> CompareTable:
    """Return the table of a config; the defaults where it has none."""
    table: CompareTable = config.tables.get("compare", CompareTable())
    return table
