"""``seer sim``: policies side by side on simulated engines, or on vLLM with an emulated accelerator."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click
from seer_cli.common import FiniteRange, debugged, main_options, table_console
from seer_cli.display import Display
from seer_cli.output import check_writable, write_json
from seer_sim.plugin import Settings

from seer_core.errors import ConfigError, quote
from seer_core.plugins.config import make_config, structure
from seer_core.plugins.loading import fill_slots
from seer_core.plugins.slots import check_enabled
from seer_lab.choose import choose_workload
from seer_lab.drawing import importing_to_draw
from seer_lab.lengths import DrawnLengths
from seer_lab.policies import POLICIES, parse_policy
from seer_lab.simulate import ENGINES, SimulatedIteration, simulate
from seer_lab.table import rows_of, table_of, to_json
from seer_lab.workloads import CLUSTERS, Workload

__all__ = ["sim_command"]

TIMES = {
    "sim": "times are simulated",
    "paced": "real vLLM scheduler, emulated accelerator, scripted text; times are the emulated ones",
    "paced-sglang": "real SGLang scheduler, emulated accelerator, scripted text; times are the emulated ones",
}

POLICY_HELP = "\n".join(f"  {policy.name:<20}{policy.about}" for policy in POLICIES.values())


@click.command(
    "sim",
    context_settings={"default_map": {"log_level": "warning"}},
    epilog=f"\b\nPolicies:\n{POLICY_HELP}",
)
@main_options
@click.argument("workload")
@click.option(
    "--policy",
    "policies",
    multiple=True,
    metavar="NAME[=PLUGIN,...]",
    help="One of those below, or a name and its plug-ins; may repeat.  [default: verl, context]",
)
@click.option(
    "--oracle",
    "oracles",
    multiple=True,
    metavar="NAME=PLUGIN,...",
    help="As --policy, with each response's true length as its input.",
)
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of the lengths.")
@click.option(
    "--repeat",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    metavar="N",
    help="Seeds, one after the other; of a trace, iterations.",
)
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Change one value; may repeat.")
@click.option(
    "--scale", type=FiniteRange(0, 1000, min_open=True), help="So much of the paper's groups and instances."
)
@click.option(
    "--lengths",
    multiple=True,
    metavar="KEY=VALUE",
    help="groups, group_size, mean_tokens, cap_tokens, sigma, group_share or prompt_tokens; may repeat.",
)
@click.option("--where", multiple=True, metavar="KEY=VALUE", help="Only lines of a trace that say so.")
@click.option(
    "--on", type=click.Choice(list(CLUSTERS)), help="Whose model and GPUs.  [default: qwen2-vl-72b]"
)
@click.option("--instances", type=click.IntRange(1, 1_000_000), metavar="N", help="How many.  [default: 4]")
@click.option(
    "--pressure",
    type=FiniteRange(1e-3, 1e6),
    help="KV that all responses would fill, over the KV there is.  [default: 3]",
)
@click.option(
    "--engine",
    type=click.Choice(ENGINES),
    default="sim",
    show_default=True,
    help="paced: vLLM's own scheduler, or SGLang's, on an emulated accelerator, for small workloads.",
)
@click.option(
    "--plot", type=click.Path(path_type=Path), help="Draw load and finishes over time; .svg or .png."
)
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Write one object per policy.")
def sim_command(
    workload: str,
    policies: tuple[str, ...],
    oracles: tuple[str, ...],
    seed: int,
    repeat: int,
    overrides: tuple[str, ...],
    engine: str,
    plot: Path | None,
    json_file: Path | None,
    **size: Any,
) -> None:
    """Roll out WORKLOAD on simulated engines under each policy, and compare.

    WORKLOAD is one of the paper's, moonlight, qwen2-vl-72b or kimi-k2; synthetic; a file with lengths of
    yours, JSON lines of {"group", "prompt_tokens", "output_tokens": [...]}; or the directory of a finished
    `seer run`.  --scale is for the paper's, --on, --instances and --pressure are for the others.

    \b
    Example:
      seer sim qwen2-vl-72b --scale 0.25 --policy verl --policy divided --policy context
      seer sim lengths.jsonl --instances 8 --policy verl --policy mine=divided_rollout,my_plugin
      seer sim synthetic --engine paced --policy verl --policy context
    """
    check_writable(json_file, plot, inputs=[Path(workload)])
    overrides = debugged(overrides)
    chosen = [parse_policy(text) for text in policies or ("verl", "context")]
    chosen += [parse_policy(text, has_lengths=True) for text in oracles]
    names = [policy.name for policy in chosen]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(
                f"two policies are called {quote(name)}; give one another name: NAME=PLUGIN,..."
            )
    load = choose_workload(workload, **size)
    if not isinstance(load.lengths, DrawnLengths) and repeat > len(load.lengths):
        raise ConfigError(
            f"--repeat {repeat}: {workload} holds {len(load.lengths)} iterations; repeat as often"
        )
    wanted = make_config({}, overrides, base_dir=Path(), origin="--set").seer.slots
    check_enabled(wanted, list(dict.fromkeys(name for policy in chosen for name in policy.plugins)))
    for policy in chosen:
        fill_slots(load.config(policy.plugins, overrides))
    draw = None if plot is None else _drawing(plot)
    runs = []
    for number in range(repeat):
        for policy in chosen:
            title = policy.name if repeat == 1 else f"{policy.name} ({number + 1}/{repeat})"
            with Display(title) as display:
                runs.append(simulate(load, policy, seed + number, overrides, display, engine))
    rows = rows_of(runs)
    if json_file is not None:
        write_json(json_file, to_json(rows))
    if draw is not None and plot is not None:
        draw(plot, [row.runs[0] for row in rows])
    title = _title(load, seed, overrides)
    if repeat > 1:
        title += f"; medians of {repeat} runs [least, most]"
    console = table_console()
    console.print(title, soft_wrap=True)
    console.print(table_of(rows))
    console.print(
        f"ratio: to {names[0]}; tail: time spent solely on the last tenth of responses; {TIMES[engine]}"
    )
    for policy in chosen:
        if policy.over_issue > 1:
            console.print(
                f"{policy.name}: not strictly synchronous; starts {policy.over_issue} times the groups, puts"
                " off the last ones"
            )


def _title(workload: Workload, seed: int, overrides: tuple[str, ...]) -> str:
    """Say what is rolled out, on what, and how crowded that is."""
    groups = workload.groups(seed)
    engines = structure(workload.config((), overrides).engine["sim"], Settings, "engine.sim")
    responses = sum(len(group.output_tokens) for group in groups)
    tokens = sum(sum(group.output_tokens) for group in groups)
    contexts = tokens + sum(group.prompt_tokens * len(group.output_tokens) for group in groups)
    room = engines.instances * engines.kv_capacity_tokens
    return (
        f"{workload.name}: {responses:,} responses of {len(groups)} groups, {tokens / responses:,.0f} tokens"
        f" on average; {engines.instances} instances of {engines.kv_capacity_tokens:,} KV tokens, which they"
        f" fill {contexts / room:.1f} times"
    )


def _drawing(path: Path) -> Callable[[Path, Sequence[SimulatedIteration]], None]:
    """Import what draws, before any work starts; errors as ``importing_to_draw``."""
    with importing_to_draw(path, "--plot", "--plot"):
        from seer_lab.plots import draw
    return draw
