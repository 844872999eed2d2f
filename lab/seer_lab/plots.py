"""Figures of simulations over time, drawn with matplotlib (the extra ``plot``)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from seer_cli.output import replacing

from seer_lab.chunk_bars import TAIL_SHARE
from seer_lab.simulate import SimulatedIteration
from seer_lab.timeline import InstanceTimeline, LoadSample

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["draw"]

POINTS = 300
"""Moments at which loads are read off: about as many as a figure can show."""


def draw(path: Path, runs: Sequence[SimulatedIteration]) -> None:
    """Draw KV in use, requests running, finishes, and each instance's KV in use over time.

    Raises:
        OutputError: the file cannot be written.
    """
    figure = Figure(figsize=(12, 8 + 1.2 * len(runs)), layout="constrained")
    FigureCanvasAgg(figure)
    rows = figure.add_gridspec(3 + len(runs), 1, height_ratios=[2, 2, 2, *[1.2] * len(runs)])
    kv = figure.add_subplot(rows[0])
    running = figure.add_subplot(rows[1], sharex=kv)
    finished = figure.add_subplot(rows[2], sharex=kv)
    end_s = max(run.summary.total_time_s for run in runs)
    for number, run in enumerate(runs):
        name, colour = run.policy.name, f"C{number % 10}"
        times = [run.summary.total_time_s * point / POINTS for point in range(POINTS + 1)]
        loads = [_at(each, times) for each in run.instances]
        across = list(zip(*loads, strict=True))
        kv.plot(times, [sum(one.kv_usage for one in all_) / len(all_) for all_ in across], colour, label=name)
        running.plot(times, [sum(one.running for one in all_) for all_ in across], colour, label=name)
        _finishes(finished, run, colour)
        _instances(figure.add_subplot(rows[3 + number], sharex=kv), run, loads)
    kv.set(ylabel="KV in use", ylim=(0, 1.02), title=runs[0].workload)
    kv.legend(loc="upper right")
    running.set(ylabel="requests running")
    finished.set(ylabel="finished", ylim=(0, 1.02))
    finished.axhline(TAIL_SHARE, color="grey", linewidth=0.5)
    kv.set_xlim(0, end_s)
    figure.axes[-1].set_xlabel("seconds (simulated)")
    with replacing(path) as new:
        figure.savefig(new)


def _at(instance: InstanceTimeline, times: Sequence[float]) -> list[LoadSample]:
    """Return an instance's load at each of ``times``, which rise."""
    samples, index = instance.samples, 0
    loads = []
    for time_s in times:
        while index + 1 < len(samples) and samples[index + 1].at_s <= time_s:
            index += 1
        loads.append(samples[index])
    return loads


def _finishes(axes: Axes, run: SimulatedIteration, colour: str) -> None:
    times = run.finish_times_s
    axes.step(times, [(number + 1) / len(times) for number in range(len(times))], colour, where="post")


def _instances(axes: Axes, run: SimulatedIteration, loads: Sequence[Sequence[LoadSample]]) -> None:
    """Draw one line of colour per instance: the darker, the more of its KV is in use."""
    image = [[sample.kv_usage for sample in line] for line in loads]
    axes.imshow(
        image,
        aspect="auto",
        interpolation="nearest",
        cmap="Blues",
        vmin=0,
        vmax=1,
        extent=(0.0, run.summary.total_time_s, len(loads) - 0.5, -0.5),
    )
    axes.set(ylabel=f"{run.policy.name}\ninstance", yticks=[0, len(loads) - 1])
