"""From what the command line says to a workload."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec
from seer_host.json_files import UNREADABLE, JsonFormat, is_text
from seer_host.tables import nearest, structure
from seer_sim.machines import TYPICAL, Reached
from seer_sim.sizes import read_sizes

from seer_core.errors import ConfigError, quote
from seer_lab.lengths import DrawnLengths, GroupLengths, joined, with_longer_turns
from seer_lab.recorded import RecordedLengths, read_recorded
from seer_lab.step_rows import gpu_of
from seer_lab.workloads import (
    CLUSTERS,
    SYNTHETIC,
    WORKLOADS,
    Cluster,
    Workload,
    cluster_of,
    crowded,
    scaled,
)

__all__ = ["PRESSURE", "choose_workload", "read_reached"]

DRAWN = "is drawn, not recorded"
INSTANCES = 4
MOST_RESPONSES = 10_000_000
"""Ten times as many as have ever been simulated."""

PRESSURE = 3.0
"""Where a user says nothing: between the paper's 1.8 (Moonlight) and 3.9 (Qwen2-VL-72B)."""


class _Fitted(msgspec.Struct, frozen=True):
    """The part of ``seer fit --json`` that a cost model is made of."""

    reached: Reached


_FITTED = JsonFormat[_Fitted](_Fitted, "no fit", "write one with `seer fit --json`", ConfigError)


def read_reached(path: Path) -> Reached:
    """Read what engines reach of a GPU's peaks from the file of a `seer fit --json`.

    Raises:
        ConfigError: it is no such file.
    """
    return _FITTED.read(path).reached


def choose_workload(
    name: str,
    *,
    where: Sequence[str] = (),
    lengths: Sequence[str] = (),
    scale: float | None = None,
    on: str | None = None,
    model: Path | None = None,
    gpu: str | None = None,
    gpus: int | None = None,
    reached: Path | None = None,
    instances: int | None = None,
    pressure: float | None = None,
    tool_times: float | None = None,
    turn_tokens: float | None = None,
    join: int | None = None,
    tokenizer: Path | None = None,
    read: Callable[..., RecordedLengths] = read_recorded,
) -> Workload:
    """Return the workload of that name, ``synthetic``, or one of recorded lengths from a file.

    ``lengths`` are KEY=VALUE for ``DrawnLengths``; ``on``, ``instances`` and ``pressure`` are for workloads
    that bring no engines of their own, ``scale`` is for those that do.  ``model``, a directory with a
    config.json, ``gpu``, ``gpus`` and the fit in ``reached`` describe engines in place of ``on``; these have
    the KV that their GPUs hold, unless ``pressure`` says otherwise.  ``tool_times`` and ``turn_tokens``
    are factors for recorded turns, ``join`` is how many recorded trajectories make one.  ``read`` reads a
    file, and gets ``where`` and ``tokenizer``.

    Raises:
        ConfigError: something is not known, or does not go together.
        InputError, PromptError: the file cannot be used.
    """
    factors = {"tool-times": tool_times, "turn-tokens": turn_tokens, "join": join}
    if name in WORKLOADS:
        _not_for(name, DRAWN, **factors)
        _not_for(
            name,
            "brings its own engines; change them by --set",
            on=on,
            model=model,
            gpu=gpu,
            gpus=gpus,
            reached=reached,
            instances=instances,
            pressure=pressure,
        )
        _not_for(name, DRAWN, where=where, tokenizer=tokenizer)
        workload = WORKLOADS[name]
        drawn = _changed(workload.lengths, lengths)
        workload = msgspec.structs.replace(workload, lengths=drawn)
        return workload if scale is None else scaled(workload, scale)
    _not_for(name, "has no size of its own; use --instances", scale=scale)
    known = (*WORKLOADS, "synthetic")
    if name != "synthetic" and not _exists(name):
        raise ConfigError(f"{quote(name)} is neither a workload nor a file{nearest(name, known)}")
    if on is not None and on not in CLUSTERS:
        raise ConfigError(f"--on {on}: no such engines{nearest(on, CLUSTERS)}")
    cluster = _cluster(on, model, gpu, gpus, reached)
    if pressure is None and model is None:
        pressure = PRESSURE
    if name == "synthetic":
        _not_for(name, DRAWN, where=where, tokenizer=tokenizer, **factors)
        drawn = _changed(SYNTHETIC, lengths)
        return crowded(name, drawn, cluster, instances or INSTANCES, pressure)
    _not_for(name, "has lengths of its own", lengths=lengths)
    recorded = read(name, where, tokenizer)
    iterations, notes = recorded.iterations, recorded.notes
    if any(group.turns for groups in iterations for group in groups):
        times = 1.0 if tool_times is None else tool_times
        iterations = with_longer_turns(joined(iterations, join or 1), turn_tokens or 1.0, times)
        notes = (*notes, _about_turns(iterations))
    else:
        _not_for(name, "has no recorded turns", **factors)
    found = crowded(Path(name).name, iterations, cluster, instances or INSTANCES, pressure)
    return msgspec.structs.replace(found, notes=notes)


def _cluster(
    on: str | None, model: Path | None, gpu: str | None, gpus: int | None, reached: Path | None
) -> Cluster:
    """Return the instances that options describe."""
    if model is None:
        _not_for("engines without --model", "have GPUs of their own", gpu=gpu, gpus=gpus, reached=reached)
        return CLUSTERS[on or "qwen2-vl-72b"]
    _not_for("--model", "describes the engines", on=on)
    name = gpu or "h100"
    fitted = TYPICAL if reached is None else read_reached(reached)
    return cluster_of(read_sizes(model), gpu_of(name), name.upper(), gpus or 1, fitted)


def _about_turns(iterations: Sequence[Sequence[GroupLengths]]) -> str:
    """Return a sentence about recorded turns."""
    trajectories = [turns for groups in iterations for group in groups for turns in group.turns]
    turns = [turn for each in trajectories for turn in each]
    tools_s = [turn.tool_s for turn in turns if turn.tool_s is not None]
    written = sum(turn.model_tokens for turn in turns) / len(trajectories)
    answered = sum(turn.answer_tokens for turn in turns) / len(trajectories)
    return (
        f"a response is a trajectory of {len(turns) / len(trajectories):.1f} turns on average, with"
        f" {written:,.0f} tokens of the model's and {answered:,.0f} of its tools', which take"
        f" {fmean(tools_s or [0.0]):.3g} s; tokens per s are the model's"
    )


def _exists(name: str) -> bool:
    try:
        return Path(name).exists()
    except (OSError, ValueError):  # no name of a file
        return False


def _changed(lengths: Any, changes: Sequence[str]) -> DrawnLengths:
    fields: dict[str, Any] = msgspec.structs.asdict(lengths)
    for change in changes:
        key, equals, value = change.partition("=")
        if not equals or not is_text(change):
            raise ConfigError(f"--lengths {quote(change)}: give KEY=VALUE, such as sigma=1.2")
        try:
            fields[key] = msgspec.json.decode(value)
        except UNREADABLE:
            fields[key] = value
    drawn = structure(fields, DrawnLengths, "lengths")
    if drawn.mean_tokens > drawn.cap_tokens:
        raise ConfigError(
            f"--lengths: mean_tokens = {drawn.mean_tokens:g} exceeds cap_tokens = {drawn.cap_tokens};"
            " lower it"
        )
    if drawn.groups * drawn.group_size > MOST_RESPONSES:
        raise ConfigError(
            f"--lengths: {drawn.groups:,} groups of {drawn.group_size:,} are more than {MOST_RESPONSES:,}"
            " responses; lower groups or group_size"
        )
    return drawn


def _not_for(name: str, why: str, **options: object) -> None:
    for option, value in options.items():
        if value is not None and value != ():
            raise ConfigError(f"--{option} does not go with {name}, which {why}")
