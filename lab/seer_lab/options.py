"""Options that ``seer sim`` and ``seer sweep`` share: which policies, on which workload."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click
from seer_cli.common import FiniteRange, set_option
from seer_cli.output import InputPath
from seer_host.config_files import make_config
from seer_session.assembly import fill_slots
from seer_session.factories import check_enabled

from seer_core.errors import ConfigError, quote
from seer_lab.lengths import DrawnLengths
from seer_lab.policies import POLICIES, RECOMMENDED, PolicySet, parse_policy
from seer_lab.workloads import CLUSTERS, Workload

__all__ = [
    "POLICY_HELP",
    "SIZES",
    "check_no_turns",
    "check_once",
    "check_policies",
    "check_repeats",
    "check_unbounded",
    "choose_policies",
    "drafts_option",
    "keys_of",
    "workload_options",
]

SIZES: Mapping[str, click.ParamType[Any]] = {
    "scale": FiniteRange(0, 1000, min_open=True),
    "instances": click.IntRange(1, 1_000_000),
    "gpus": click.IntRange(1, 1024),
    "pressure": FiniteRange(1e-3, 1e6),
    "tool_times": FiniteRange(0, 1000),
    "turn_tokens": FiniteRange(0, 1000, min_open=True),
    "join": click.IntRange(1, 10_000),
}
"""Options with one number each, and which numbers they take."""

SAID_TWICE = (
    ("pressure", "engine.sim.kv_capacity_tokens"),
    ("instances", "engine.sim.instances"),
    ("on", "engine.sim.preset"),
    ("model", "engine.sim.cost"),
)
"""Options, and the key of a config that each sets."""

DEFAULT = ("verl", "divided", "context", RECOMMENDED)
"""The policies of a table where none is named: the baseline, and what each step adds to it."""

NAME_WIDTH = max(map(len, POLICIES)) + 2

POLICY_HELP = "\b\nPolicies:\n" + "\n".join(
    f"  {policy.name:<{NAME_WIDTH}}{policy.about}{' (recommended)' if policy.name == RECOMMENDED else ''}"
    for policy in POLICIES.values()
)

Command = TypeVar("Command", bound=Callable[..., Any])

OPTIONS = (
    click.argument("workload"),
    click.option(
        "--policy",
        "policies",
        multiple=True,
        metavar="NAME[=PLUGIN,...]",
        help="One of those below, or a name and its plug-ins, SLOT:PLUGIN for each slot that several could"
        f" fill; may repeat.  [default: {', '.join(DEFAULT)}]",
    ),
    click.option(
        "--oracle",
        "oracles",
        multiple=True,
        metavar="NAME=PLUGIN,...",
        help="As --policy, with each response's true length as its input.",
    ),
    click.option(
        "--seed",
        type=click.IntRange(min=0),
        default=0,
        show_default=True,
        help="Seed of the lengths; of a trace, its iteration.",
    ),
    click.option(
        "--repeat",
        type=click.IntRange(min=1),
        default=1,
        show_default=True,
        metavar="N",
        help="Number of seeds, from --seed on; of a trace, of iterations.",
    ),
    set_option,
    click.option("--scale", type=SIZES["scale"], help="Share of the paper's groups and instances."),
    click.option(
        "--lengths",
        multiple=True,
        metavar="KEY=VALUE",
        help="groups, group_size, mean_tokens, cap_tokens, sigma, group_share or prompt_tokens; may repeat.",
    ),
    click.option("--where", multiple=True, metavar="KEY=VALUE", help="Only lines of a trace that say so."),
    click.option(
        "--tokenizer",
        type=InputPath(),
        metavar="DIR",
        help="A model's directory: its tokenizer counts the tokens of logs that hold texts.",
    ),
    click.option(
        "--on",
        type=click.Choice(list(CLUSTERS)),
        help="Model and GPUs of the instances.  [default: qwen2-vl-72b]",
    ),
    click.option(
        "--model",
        type=InputPath(),
        metavar="DIR",
        help="A model's directory, or its config.json: instances of it, in place of --on.",
    ),
    click.option(
        "--gpu", metavar="NAME", help="With --model: h100, h200, h800, a100 or b200.  [default: h100]"
    ),
    click.option(
        "--gpus", type=SIZES["gpus"], metavar="N", help="With --model: GPUs of an instance.  [default: 1]"
    ),
    click.option(
        "--reached",
        type=InputPath(),
        metavar="FILE",
        help="With --model: what engines reach of the GPU, by `seer fit --json`.  [default: typical]",
    ),
    click.option(
        "--instances", type=SIZES["instances"], metavar="N", help="Number of instances.  [default: 4]"
    ),
    click.option(
        "--pressure",
        type=SIZES["pressure"],
        help="KV that all responses would fill, over the KV there is.  [default: 3]",
    ),
    click.option(
        "--tool-times",
        type=SIZES["tool_times"],
        metavar="FACTOR",
        help="Recorded tools take so many times as long.",
    ),
    click.option(
        "--turn-tokens",
        type=SIZES["turn_tokens"],
        metavar="FACTOR",
        help="Recorded turns, and the answers of their tools, have so many times the tokens.",
    ),
    click.option(
        "--join",
        type=SIZES["join"],
        metavar="N",
        help="So many recorded trajectories make one, as a longer task has more turns.",
    ),
)


drafts_option = click.option(
    "--drafts",
    "drafts_file",
    type=InputPath(),
    metavar="FILE",
    help="Recorded responses, as for `seer replay`: drafts from siblings are worth what they are there.",
)


def check_unbounded(drafts_file: Path | None, *, bounded: bool) -> None:
    """Raise ConfigError where a bound is asked for that nothing gives."""
    if bounded and drafts_file is not None:
        raise ConfigError("--bound has no least time for drafts of recorded text; leave out --drafts")


def check_no_turns(load: Workload, drafts_file: Path | None) -> None:
    """Raise ConfigError where recorded turns are to have recorded drafts, which only responses do."""
    if drafts_file is not None and load.has_turns:
        raise ConfigError("--drafts does not go with recorded turns; leave it out")


def workload_options(command: Command) -> Command:
    """Add the options, in their order."""
    for option in reversed(OPTIONS):
        command = option(command)
    return command


def choose_policies(policies: Sequence[str], oracles: Sequence[str]) -> list[PolicySet]:
    """Return the policies that the command line names, by default veRL's and those of Seer's scheduling.

    Raises:
        ConfigError: one is unknown, or two have the same name.
    """
    chosen = [parse_policy(text) for text in policies or DEFAULT]
    chosen += [parse_policy(text, has_lengths=True) for text in oracles]
    names = [policy.name for policy in chosen]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(
                f"two policies are called {quote(name)}; give one another name: NAME=PLUGIN,..."
            )
    return chosen


def check_policies(chosen: Sequence[PolicySet], load: Workload, overrides: Sequence[str]) -> None:
    """Load every policy's plug-ins with their settings, so that a mistake is found before work begins.

    Raises:
        ConfigError, PluginError: a plug-in is missing, or its settings are wrong.
    """
    wanted = make_config({}, overrides, base_dir=Path(), origin="--set").seer.slots
    check_enabled(wanted, list(dict.fromkeys(name for policy in chosen for name in policy.plugins)))
    for policy in chosen:
        fill_slots(load.config(policy.plugins, (*policy.overrides, *overrides)))


def keys_of(changes: Iterable[str]) -> set[str]:
    """Return the keys of texts KEY=VALUE."""
    return {change.partition("=")[0].strip() for change in changes}


def check_once(overrides: Sequence[str], size: Mapping[str, object]) -> None:
    """Raise ConfigError if an option and ``--set`` both give one thing; ``size`` has the options."""
    for option, key in SAID_TWICE:
        if size.get(option) is not None and key in keys_of(overrides):
            raise ConfigError(f"--{option} and --set {key} give the same thing; leave one of them out")


def check_repeats(name: str, load: Workload, repeat: int) -> None:
    """Raise ConfigError if a recorded workload has fewer iterations than ``repeat``."""
    if not isinstance(load.lengths, DrawnLengths) and repeat > len(load.lengths):
        held = len(load.lengths)
        many = (
            f"{held} iterations; --repeat {held} takes all" if held > 1 else "1 iteration; leave --repeat out"
        )
        raise ConfigError(f"--repeat {repeat}: {name} holds {many}")
