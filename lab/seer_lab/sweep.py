"""``sweep``: one comparison of policies for each combination of values, such as pressures and tails."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from itertools import product
from typing import Any

import click
import msgspec
from seer_cli.stats import Spread, ratios, spread

from seer_core.errors import ConfigError, quote
from seer_lab.options import SIZES, check_once, check_policies, check_repeats, keys_of
from seer_lab.policies import PolicySet
from seer_lab.recorded import read_recorded
from seer_lab.simulate import simulate
from seer_lab.workload_choice import choose_workload
from seer_lab.workloads import Workload

__all__ = ["SweptPoint", "SweptWorkload", "parse_axis", "sweep", "swept_workloads"]

Value = str | int | float


class SweptWorkload(msgspec.Struct, frozen=True):
    """A workload with one value of each key that is swept; ``overrides`` are KEY=VALUE of a config."""

    at: Mapping[str, Value]
    workload: Workload
    overrides: tuple[str, ...]


class SweptPoint(msgspec.Struct, frozen=True):
    """The tokens per second of each policy, in the order of the seeds, with one value of each key."""

    at: Mapping[str, Value]
    throughput_tokens_per_s: Mapping[str, Sequence[float]]

    def ratio(self, policy: str) -> Spread:
        """Return a policy's tokens per second over the first policy's, seed by seed."""
        first = next(iter(self.throughput_tokens_per_s.values()))
        return spread(ratios(self.throughput_tokens_per_s[policy], first))

    def to_json(self) -> dict[str, Any]:
        """Return the values, and each policy's figures with the median, least and most of its ratio."""
        figures = {
            name: {"throughput_tokens_per_s": list(each), "ratio_to_first": self.ratio(name)._asdict()}
            for name, each in self.throughput_tokens_per_s.items()
        }
        return {"at": dict(self.at), "policies": figures}


def parse_axis(text: str) -> tuple[str, list[Value]]:
    """Read KEY=VALUE,VALUE,...; a key is an option's name, a key of ``--lengths``, or one of a config.

    Raises:
        ConfigError: there is no key, no value, or a value twice.
    """
    key, _, listed = text.partition("=")
    values: list[Value] = []
    for word in filter(None, listed.split(",")):
        try:
            value = msgspec.json.decode(word, type=int | float | str)
        except msgspec.DecodeError:
            value = word
        if value in values:
            raise ConfigError(f"--over {quote(text)}: {word} is there twice")
        values.append(value)
    if not key or not values:
        raise ConfigError(f"--over {quote(text)}: give KEY=VALUE,VALUE, such as pressure=1,2,4")
    return key, values


def swept_workloads(
    name: str, axes: Mapping[str, Sequence[Value]], overrides: Sequence[str], **size: Any
) -> list[SweptWorkload]:
    """Return the workload of every combination of values; ``size`` is as for ``choose_workload``.

    Raises:
        ConfigError: a key or a value is not known, or a key is among ``size`` or ``overrides`` too.
        InputError, PromptError: the file of a recorded workload cannot be used.
    """
    given = keys_of((*size.get("lengths", ()), *overrides))
    for key in axes:
        if key in given or size.get(key) is not None:
            raise ConfigError(f"{key} is swept and given; leave one of the two out")
    found = []
    read = cache(read_recorded)
    for values in product(*axes.values()):
        at = dict(zip(axes, values, strict=True))
        settings = [f"{key}={value}" for key, value in at.items() if "." in key]
        lengths = [f"{key}={value}" for key, value in at.items() if "." not in key and key not in SIZES]
        sizes = {key: _sized(key, value) for key, value in at.items() if key in SIZES}
        changed = {**size, **sizes, "lengths": (*size.get("lengths", ()), *lengths)}
        check_once((*overrides, *settings), changed)
        found.append(SweptWorkload(at, choose_workload(name, read=read, **changed), (*overrides, *settings)))
    return found


def _sized(key: str, value: Value) -> Any:
    try:
        return SIZES[key].convert(value, None, None)
    except click.BadParameter as error:
        raise ConfigError(f"--over {key}={value}: {error.message}") from error


def sweep(
    workloads: Sequence[SweptWorkload],
    policies: Sequence[PolicySet],
    seeds: Sequence[int],
    progress: Callable[[int], object] = lambda simulated: None,
) -> list[SweptPoint]:
    """Simulate each workload under each policy with each seed; ``progress`` gets the number of rollouts done.

    Raises:
        ConfigError, PluginError, PromptError, StalledError: as ``simulate``, before the first one if a
            plug-in or its settings are wrong.
    """
    for each in workloads:
        check_repeats(each.workload.name, each.workload, len(seeds))
        check_policies(policies, each.workload, each.overrides)
    points, simulated = [], 0
    for each in workloads:
        figures: dict[str, list[float]] = {policy.name: [] for policy in policies}
        for seed in seeds:
            for policy in policies:
                run = simulate(each.workload, policy, seed, each.overrides)
                figures[policy.name].append(run.throughput_tokens_per_s)
                simulated += 1
                progress(simulated)
        points.append(SweptPoint(each.at, figures))
    return points
