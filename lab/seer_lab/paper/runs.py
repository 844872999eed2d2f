"""Which simulations the paper's figures need, and running them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import active_children, get_context
from statistics import fmean

import msgspec
import structlog
from seer_cli.stats import ratios

from seer_lab.lengths import DrawnLengths
from seer_lab.policies import POLICIES
from seer_lab.simulate import SimulatedIteration, simulate
from seer_lab.workloads import WORKLOADS, Workload, scaled

__all__ = ["FIGURES", "PaperArm", "Runs", "arm_of", "mean", "ratio", "run_arms", "workload_of"]


class PaperArm(msgspec.Struct, frozen=True):
    """A workload under a policy; ``group_size`` 0 stands for the workload's own."""

    workload: str
    policy: str
    group_size: int = 0


def arm_of(workload: str, policy: str, group_size: int) -> PaperArm:
    """Return the arm with groups of that size; one and the same if that is the workload's own."""
    lengths = WORKLOADS[workload].lengths
    assert isinstance(lengths, DrawnLengths)
    return PaperArm(workload, policy, 0 if group_size == lengths.group_size else group_size)


Runs = Mapping[PaperArm, Sequence[SimulatedIteration]]
"""The simulations of each arm, one per seed, in the order of the seeds."""

FIGURES: Mapping[str, Callable[[SimulatedIteration], float]] = {
    "total_time_s": lambda run: run.summary.total_time_s,
    "tail_time_s": lambda run: run.summary.tail_time_s,
    "throughput": lambda run: run.throughput_tokens_per_s,
    "kept_throughput": lambda run: run.summary.tokens / run.summary.total_time_s,
    "preemptions": lambda run: run.summary.preemptions,
    "idle_share": lambda run: run.idle_share,
    "late_start": lambda run: run.late_start_share,
    "acceptance_length": lambda run: run.draft_acceptance_length,
    "mean_tokens": lambda run: run.summary.mean_tokens,
}


def mean(runs: Runs, arm: PaperArm, figure: str) -> float:
    """Return a figure's mean over the seeds."""
    return fmean(FIGURES[figure](run) for run in runs[arm])


def ratio(runs: Runs, arm: PaperArm, base: PaperArm, figure: str) -> float:
    """Return the mean over the seeds of a figure's ratio to that of ``base``, seed by seed."""
    of = FIGURES[figure]
    return fmean(ratios(map(of, runs[arm]), map(of, runs[base])))


def workload_of(arm: PaperArm, scale: float | None = None) -> Workload:
    """Return the arm's workload: as many requests in groups of its size; smaller with ``scale``."""
    workload = WORKLOADS[arm.workload]
    lengths = workload.lengths
    assert isinstance(lengths, DrawnLengths)
    if size := arm.group_size:
        groups = lengths.groups * lengths.group_size // size
        lengths = msgspec.structs.replace(lengths, groups=groups, group_size=size)
        name = f"{workload.name} in groups of {size}"
        workload = msgspec.structs.replace(workload, name=name, lengths=lengths)
    return workload if scale is None else scaled(workload, scale)


def run_arms(
    arms: Iterable[PaperArm],
    seeds: Sequence[int],
    scale: float | None = None,
    overrides: Sequence[str] = (),
    *,
    jobs: int = 1,
    report: Callable[[str], None] = lambda line: None,
) -> dict[PaperArm, list[SimulatedIteration]]:
    """Simulate each arm once per seed, ``jobs`` at a time; the result does not depend on ``jobs``.

    ``overrides`` are KEY=VALUE of a config; ``report`` receives a line for each simulation that is done.
    """
    wanted = [(arm, seed) for arm in dict.fromkeys(arms) for seed in seeds]
    done: dict[tuple[PaperArm, int], SimulatedIteration] = {}
    with ProcessPoolExecutor(jobs, get_context("spawn")) as pool:
        waiting = {pool.submit(_run, arm, seed, scale, overrides): (arm, seed) for arm, seed in wanted}
        try:
            for future in as_completed(waiting):
                arm, seed = waiting[future]
                run = done[arm, seed] = future.result()
                report(
                    f"{len(done)}/{len(wanted)} {run.workload}, {arm.policy}, seed {seed}:"
                    f" {run.summary.total_time_s:,.0f} s simulated in {run.wall_s:.1f} s"
                )
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for process in active_children():  # or leaving would wait for what is running and what is next
                process.terminate()
            raise
    return {arm: [done[arm, seed] for seed in seeds] for arm, _ in wanted}


def _run(arm: PaperArm, seed: int, scale: float | None, overrides: Sequence[str]) -> SimulatedIteration:
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    return simulate(workload_of(arm, scale), POLICIES[arm.policy], seed, overrides)
