"""Further tables of a comparison: its responses on emulated accelerators, whose times no load can move."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
from rich.table import Table
from seer_host.config_files import Config
from seer_host.discovery import offered
from seer_host.installation import how_to_install

from seer_cli.comparison import FIGURES, Arm, show_figure
from seer_cli.stats import Stats
from seer_core.errors import PluginError
from seer_core.model import InstanceInfo, PromptGroup

__all__ = [
    "EMULATORS",
    "Emulated",
    "EmulatedArm",
    "Emulator",
    "WrittenResponses",
    "emulated_table",
    "find_emulator",
]

EMULATORS = "seer.emulators"
"""Entry-point group of factories of an ``Emulator``, each called with the ``Config`` before engines start.

A factory raises a ``ConfigError`` where ``[compare.emulated]`` asks for something that it cannot do.
"""

MISSING = "no table of [compare.emulated], for which seer-lab has to be installed: "


class WrittenResponses(msgspec.Struct, frozen=True):
    """The responses of a comparison, its arms, and the instances that wrote them."""

    groups: Sequence[PromptGroup]
    """The prompts, in their order."""
    tokens: Mapping[str, Sequence[int]]
    """The token ids of each response, by request."""
    cut: Mapping[str, bool]
    """Whether the limit on its tokens cut a response, by request."""
    arms: Sequence[Arm]
    """The arms, the baseline first."""
    instances: Sequence[InstanceInfo]
    """What each instance can hold."""


class EmulatedArm(msgspec.Struct, frozen=True):
    """An arm on the emulated accelerator."""

    name: str
    """The arm's name."""
    figures: dict[str, float]
    """Its figures, by the names of ``FIGURES``; times are virtual."""
    bound_s: float | None
    """The least total time that any schedule takes, with drafts if the arm has them; None if unknown."""

    @property
    def over_bound(self) -> float | None:
        """The total time over the bound."""
        return None if self.bound_s is None else self.figures["total_time_s"] / self.bound_s


class Emulated(msgspec.Struct, frozen=True):
    """All arms on one emulated accelerator."""

    on: str
    """The name of the model and its GPUs."""
    title: str
    """A sentence on what is emulated."""
    arms: list[EmulatedArm]
    """The arms, the baseline first."""
    about: list[str]
    """Sentences on the constants and their sources."""

    def to_json(self) -> list[dict[str, Any]]:
        """Return what ``seer compare --json`` writes of each arm."""
        base = _stats(self.arms[0])
        return [
            {
                **arm.figures,
                "bound_s": arm.bound_s,
                "over_bound": arm.over_bound,
                "ratio_to_baseline": _stats(arm).ratios(base),
            }
            for arm in self.arms
        ]


Emulator = Callable[[WrittenResponses], Sequence[Emulated]]
"""Rolls the responses out anew: the same ones give the same tables, on any machine."""


def find_emulator(config: Config) -> Emulator | str:
    """Return what makes the tables that ``[compare.emulated]`` asks for, or a line on why nothing can.

    Raises:
        ConfigError: it asks for something that there is not.
        PluginError: what should make it cannot be imported.
    """
    for point in offered(EMULATORS):
        try:
            make: Callable[[Config], Emulator] = point.load()
        except Exception as error:
            owner = point.dist.name if point.dist else point.value
            raise PluginError(
                f"emulator {point.name!r} cannot be imported: {type(error).__name__}: {error}; mend or"
                f" reinstall {owner}"
            ) from error
        return make(config)
    return MISSING + how_to_install("", "`make setup`")


def emulated_table(emulated: Emulated) -> Table:
    """Return the table of the arms, side by side."""
    table = Table()
    table.add_column("")
    for arm in emulated.arms:
        table.add_column(arm.name, justify="right")
    base = _stats(emulated.arms[0])
    for figure, title in FIGURES.items():
        if not any(arm.figures.get(figure) for arm in emulated.arms):
            continue
        first, *others = emulated.arms
        cells = [show_figure(figure, first.figures[figure])]
        for arm in others:
            cells.append(show_figure(figure, arm.figures[figure], _stats(arm).ratio(figure, base)))
        table.add_row(title, *cells)
        if figure == "total_time_s":
            overs = (arm.over_bound for arm in emulated.arms)
            table.add_row("over its bound", *("" if over is None else f"{over:.2f}x" for over in overs))
    return table


def _stats(arm: EmulatedArm) -> Stats:
    return Stats({figure: [value] for figure, value in arm.figures.items()})
