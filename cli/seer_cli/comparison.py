"""The comparison: the same prompts and seeds under a baseline and under each cumulative technique."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import attrs
import msgspec
from seer_host.config_files import Config
from seer_host.machine_probe import MachineProbe
from seer_session.assembly import fill_slots, installed, load, unknown_plugin
from seer_session.results import RolloutResult, Summary
from seer_session.runtime import Runtime

from seer_cli.compare_table import compare_table
from seer_cli.finished_arms import ArmOutcome, FinishedArms
from seer_cli.machine import FIXED_WORK, mean_wall_s
from seer_cli.stats import Stats
from seer_core.errors import ConfigError
from seer_core.model import PromptGroup
from seer_core.ports.kv import KVPool
from seer_core.ports.policy import Observer
from seer_core.scheduling.scheduler import Slot

__all__ = [
    "FIGURES",
    "Arm",
    "ArmResult",
    "arms_of",
    "compare",
    "left_out",
    "show_figure",
    "with_lengths",
]

FIGURES = {
    "throughput_tokens_per_s": "tokens per second",
    "total_time_s": "total time, s",
    "tail_time_s": "tail time, s",
    "preemptions": "preemptions",
    "recomputed_tokens": "recomputed tokens",
    "pool_tokens": "tokens from the KV pool",
    "chunks": "chunks",
    "migrations": "migrations",
    "acceptance_length": "tokens per request and step",
    "drafting_share": "step time spent drafting",
    "overrun_share": "steps overran their pace by",
}
"""Fields of ``Summary`` that a comparison shows, each as a ratio to the baseline too, and their titles."""

FORMS = {"acceptance_length": ".2f", "drafting_share": ".1%", "overrun_share": ".1%", FIXED_WORK: ".2f"}
"""How figures are shown, other than numbers without and times with one decimal."""

WITHOUT_RATIO = ("acceptance_length", "drafting_share", "overrun_share")

Probe = Callable[[], Awaitable[MachineProbe | None]]
Watch = Callable[["Arm", int], AbstractContextManager[Sequence[Slot[Observer]]]]


class Arm(msgspec.Struct, frozen=True):
    """One configuration of a comparison: a name, the plug-ins that decide, and whether instances share KV.

    ``observers`` are plug-ins that only watch or answer turns: the same in every arm.
    """

    name: str
    plugins: tuple[str, ...]
    has_lengths: bool = False
    shares_kv: bool = True
    observers: tuple[str, ...] = ()

    @property
    def enabled(self) -> tuple[str, ...]:
        """All its plug-ins."""
        return (*self.plugins, *self.observers)


def show_figure(figure: str, value: float, ratio: float | None = None) -> str:
    """Return a figure as tables show it, with its ratio to the baseline where that says something."""
    form = FORMS.get(figure, ",.1f" if figure.endswith("time_s") else ",.0f")
    return format(value, form) + ("" if ratio is None or figure in WITHOUT_RATIO else f" ({ratio:.2f}x)")


@attrs.define(eq=False)
class ArmResult:
    """One arm's summaries, one per repeat, and whether its tokens were the baseline's.

    ``probes`` has how fast the machine was before and after each repeat, where it was measured.  ``written``
    is the outcome with which all others are compared, if it is of this arm.
    """

    arm: Arm
    summaries: list[Summary] = attrs.Factory(list)
    differing: list[str] = attrs.Factory(list)
    probes: list[tuple[MachineProbe, MachineProbe]] = attrs.Factory(list)
    written: ArmOutcome | None = None

    @property
    def tokens_equal(self) -> bool:
        """Whether no response differed from the baseline's in any repeat."""
        return not self.differing

    @property
    def stats(self) -> Stats:
        """The arm's figures, repeat by repeat."""
        values = {name: [float(getattr(each, name)) for each in self.summaries] for name in FIGURES}
        if self.summaries and len(self.probes) == len(self.summaries):
            values[FIXED_WORK] = [mean_wall_s(each) for each in self.probes]
        return Stats(values)

    def to_json(self, baseline: ArmResult) -> dict[str, object]:
        """Return the object that ``seer compare --json`` writes for this arm."""
        return {
            "name": self.arm.name,
            "plugins": list(self.arm.enabled),
            **self.stats.to_json(),
            "tokens": self.summaries[0].tokens,
            "tokens_equal_to_baseline": self.tokens_equal,
            "repeats": len(self.summaries),
            "ratio_to_baseline": self.stats.ratios(baseline.stats),
            "probes": msgspec.to_builtins(self.probes),
        }


def arms_of(config: Config) -> list[Arm]:
    """Return the arms of ``[compare]``: the baseline, each technique on top of the last, the oracle.

    A technique that is not in ``[seer].plugins`` is left out, so that ``-p no:NAME`` works here too; a
    misspelt one is an error.  Plug-ins of ``[seer].plugins`` that only watch, or are the environment, are in
    every arm; for others that no arm has see ``left_out``.

    Raises:
        ConfigError: no technique is left to compare, or one is not installed.
    """
    table = compare_table(config)
    techniques = []
    for name in table.techniques:
        if name in config.seer.plugins:
            techniques.append(name)
        elif name not in installed() and "compare.techniques" in config.origins:
            raise unknown_plugin(name, "[compare].techniques")
    if not techniques:
        raise ConfigError(
            "no technique to compare: none of [compare].techniques is in [seer].plugins; add one to both"
        )
    observers = tuple(name for name in _unnamed(config) if _in_every_arm(config, name))
    arms = [Arm("baseline", table.baseline, shares_kv=False, observers=observers)]
    for count, name in enumerate(techniques, 1):
        arms.append(Arm(f"+ {name}", tuple(techniques[:count]), observers=observers))
    if table.oracle:
        arms.append(Arm("oracle", table.oracle, has_lengths=True, observers=observers))
    return arms


def left_out(config: Config) -> list[str]:
    """Return the plug-ins of ``[seer].plugins`` that decide something, and that no arm has."""
    return [name for name in _unnamed(config) if not _in_every_arm(config, name)]


def _unnamed(config: Config) -> list[str]:
    """Return the plug-ins of ``[seer].plugins`` of which ``[compare]`` says nothing."""
    table = compare_table(config)
    named = {*table.baseline, *table.techniques, *table.oracle}
    return [name for name in config.seer.plugins if name not in named]


def _in_every_arm(config: Config, name: str) -> bool:
    plugin = load(name, config.plugin.get(name, {}), f"plugin.{name}")
    return set(plugin.hooks) <= {"observer", "environment"}


async def compare(
    runtime: Runtime,
    config: Config,
    groups: Sequence[PromptGroup],
    *,
    repeat: int = 1,
    watch: Watch = lambda arm, number: nullcontext(()),
    finished: FinishedArms | None = None,
    probe: Probe | None = None,
) -> list[ArmResult]:
    """Roll out ``groups`` under every arm, ``repeat`` times, on the same engines, caches cold.

    The baseline goes without the KV pool, as what it stands for does.  The arms' order turns by one with
    each repeat, so that a drift of the machine hits all alike.
    ``watch`` makes, per arm and repeat, a context in which it runs and whose observers see it.  What
    ``finished`` has is not run again, and what is run goes there.  ``probe`` measures the machine's speed
    before, between and after the arms; None where it cannot.
    """
    finished = finished or FinishedArms()
    results = {arm.name: ArmResult(arm) for arm in arms_of(config)}
    kv_pool = runtime.kv_pool
    arms = [result.arm for result in results.values()]
    first: ArmOutcome | None = None
    before = None if probe is None else await probe()
    for number in range(repeat):
        turn = number % len(arms)
        for arm in [*arms[turn:], *arms[:turn]]:
            outcome = finished.get(arm.name, number)
            if outcome is None:
                chosen = with_lengths(groups, first) if arm.has_lengths and first is not None else groups
                with watch(arm, number) as observers:
                    pool = kv_pool if arm.shares_kv else None
                    rolled_out = await _roll_out(runtime, config, arm, chosen, observers, pool)
                after = None if probe is None else await probe()
                probes = None if before is None or after is None else (before, after)
                outcome, before = _outcome(arm, number, rolled_out, probes), after
                finished.keep(outcome)
            first = first or outcome
            result = results[arm.name]
            result.written = result.written or (outcome if outcome is first else None)
            if outcome.probes is not None:
                result.probes.append(outcome.probes)
            result.summaries.append(outcome.summary)
            differing = {name for name, ids in first.tokens.items() if outcome.tokens.get(name) != ids}
            result.differing = sorted(differing.union(result.differing))
    return list(results.values())


def _outcome(
    arm: Arm, number: int, result: RolloutResult, probes: tuple[MachineProbe, MachineProbe] | None
) -> ArmOutcome:
    completions = result.completions
    return ArmOutcome(
        arm.name,
        number,
        result.summary,
        {each.request_id: list(each.token_ids) for each in completions},
        {each.request_id: each.finish_reason == "length" for each in completions},
        probes=probes,
    )


async def _roll_out(
    runtime: Runtime,
    config: Config,
    arm: Arm,
    groups: Sequence[PromptGroup],
    observers: Sequence[Slot[Observer]],
    kv_pool: Slot[KVPool] | None,
) -> RolloutResult:
    strategies = fill_slots(config.with_plugins(arm.enabled))
    strategies = attrs.evolve(strategies, observers=(*strategies.observers, *observers))
    await runtime.use(strategies, kv_pool)
    await runtime.reset_caches()
    return await runtime.rollout(groups).wait()


def with_lengths(groups: Sequence[PromptGroup], outcome: ArmOutcome) -> list[PromptGroup]:
    """Return the groups with the length of each response, for an oracle.

    A response that was cut counts one token more, since it would have gone on.
    """
    lengths = {name: len(ids) + outcome.cut[name] for name, ids in outcome.tokens.items()}
    return [
        msgspec.structs.replace(
            group, known_lengths=tuple(lengths[f"{group.id}/{index}"] for index in range(group.n))
        )
        for group in groups
    ]
