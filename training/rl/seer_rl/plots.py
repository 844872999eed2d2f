"""Reward and phase times of a run, drawn with matplotlib (the extra ``plot``)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from seer_cli.output import replacing

__all__ = ["draw"]

PHASES = ("rollout", "sleep", "rewards", "training", "weights", "checkpoint", "evaluation")


def draw(path: Path, records: Sequence[Mapping[str, Any]]) -> None:
    """Draw the lines of ``metrics.jsonl``: the reward above, and below the seconds of each phase.

    Raises:
        OutputError: the file cannot be written.
    """
    figure = Figure(figsize=(9, 6), layout="constrained")
    FigureCanvasAgg(figure)
    reward, seconds = figure.subplots(2, 1, sharex=True)
    # An iteration's responses are of the weights of its own number.
    iterations = [record["iteration"] for record in records]
    reward.plot(iterations, [record["reward_mean"] for record in records], ".-", label="training")
    held_out = [each for record in records for each in record["evaluations"]]
    if held_out:
        versions = [each["weight_version"] for each in held_out]
        reward.plot(versions, [each["reward_mean"] for each in held_out], "o", label="held-out prompts")
        reward.legend()
    reward.set(ylabel="mean reward")
    below = [0.0] * len(records)
    for phase in PHASES:
        tops = [record.get(f"{phase}_s", 0.0) for record in records]
        if any(tops):
            seconds.bar(iterations, tops, bottom=below, label=phase)
            below = [low + top for low, top in zip(below, tops, strict=True)]
    seconds.legend()
    seconds.set(xlabel="iterations done before", ylabel="seconds")
    seconds.xaxis.set_major_locator(MaxNLocator(integer=True))
    with replacing(path) as new:
        figure.savefig(new, format="png")
