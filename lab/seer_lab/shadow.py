"""A shadow: the time that steps would have taken under Seer, of requests that another scheduler placed.

Only lengths and times of requests are watched.  From them follow the costs of a server's steps; the steps
are replayed under these costs as they were, which shows the error, and simulated under Seer's policy.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec
from msgspec import structs
from seer_host.json_files import JsonFormat
from seer_host.shadow_records import WatchedRequest

from seer_core.errors import InputError
from seer_lab.lengths import GroupLengths
from seer_lab.policies import PolicySet
from seer_lab.shadow_replay import ServerLimits, StepCosts, fit_costs, replayed_s
from seer_lab.simulate import simulate
from seer_lab.workloads import Workload

__all__ = ["REQUEST_S", "ShadowStep", "read_watched", "shadow"]

POLICY = PolicySet("seer", ("divided_rollout", "length_posterior"), shares_kv=False)
PEAK = 1e12
"""Of simulated machines, whose constants are folded into the fitted ones."""
BLOCK = 16
REQUEST_S = (3e-3, 4e-3, 5e-3, 6e-3, 7e-3)
"""Taken for a request on its way to a server, and for its answer: by one simulation after the other.

A schedule turns on which of two nearly equal events is first, and its time with it by some percent.  So one
simulation is one draw, and the mean of several is the prediction.
"""
ENOUGH = 1 << 40
"""Tokens of KV where they are not given."""


class ShadowStep(msgspec.Struct, frozen=True):
    """A step: measured, replayed as it was, and predicted for Seer."""

    step: int
    requests: int
    measured_s: float
    replayed_s: float
    """Predicted for what the other scheduler did, with the costs of earlier steps."""
    seer_s: float
    """Predicted for Seer, in proportion to what was measured: the mean of several simulations."""
    seer_range_s: tuple[float, float]
    """The least and the most that one of these says."""
    own_costs: bool
    """Whether costs are the step's own, as of the first one: then the replay is no prediction."""

    @property
    def error(self) -> float:
        """The error of the replay: predicted over measured, less 1."""
        return self.replayed_s / self.measured_s - 1

    @property
    def saved(self) -> float:
        """The part of the time that Seer would have saved."""
        return 1 - self.seer_s / self.measured_s


_LINES = JsonFormat[WatchedRequest](
    WatchedRequest, "not a watched request", "name what a shadow has recorded", InputError
)


def read_watched(path: Path) -> list[list[WatchedRequest]]:
    """Return the requests of a record, by step: a file, or a folder with one of each process that watched.

    Raises:
        InputError: it holds none, or something else.
    """
    files = sorted(path.glob("*.jsonl")) if path.is_dir() else [path]
    steps: dict[int, list[WatchedRequest]] = {}
    for file in files:
        for _, request in _LINES.lines(file):
            if request.ended_s > request.began_s and request.tokens > 0:
                steps.setdefault(request.step, []).append(request)
    if not steps:
        raise InputError(f"{path} holds no watched request")
    return [steps[number] for number in sorted(steps)]


def shadow(
    steps: Iterable[Sequence[WatchedRequest]],
    *,
    servers: int | None = None,
    max_running: int = 256,
    kv_tokens: int = 0,
) -> list[ShadowStep]:
    """Return a finding for each step, with the costs of all steps before it.

    ``servers`` are as many as were seen unless given; each runs ``max_running`` requests at a time, and holds
    ``kv_tokens``, without a limit where that is 0.
    """
    found: list[ShadowStep] = []
    before: list[WatchedRequest] = []
    limits = ServerLimits(max_running, kv_tokens)
    for requests in steps:
        costs = fit_costs(before or requests, limits)
        measured = max(each.ended_s for each in requests) - min(each.began_s for each in requests)
        again = replayed_s(requests, costs, limits)
        count = servers or len({each.server for each in requests})
        scale = measured / again
        seer = [scale * each for each in _simulated_s(requests, costs, count, limits)]
        found.append(
            ShadowStep(
                requests[0].step,
                len(requests),
                measured,
                again,
                fmean(seer),
                (min(seer), max(seer)),
                own_costs=not before,
            )
        )
        before += [structs.replace(each, server=f"{each.step} {each.server}") for each in requests]
    return found


def _simulated_s(
    requests: Sequence[WatchedRequest], costs: StepCosts, servers: int, limits: ServerLimits
) -> list[float]:
    """Return how long Seer's policy takes for requests that are all there at the beginning, several times."""
    groups: dict[str, list[WatchedRequest]] = {}
    for each in requests:
        groups.setdefault(each.group, []).append(each)
    longest = max(each.tokens for each in requests)
    lengths = [
        GroupLengths(name, max(1, mine[0].prompt_tokens), tuple(each.tokens for each in mine), longest)
        for name, mine in groups.items()
    ]
    room = (limits.kv_tokens or ENOUGH) // BLOCK * BLOCK
    most = max(each.prompt_tokens for each in requests) + longest + 1
    engine: Mapping[str, Any] = {
        "instances": servers,
        "kv_capacity_tokens": room,
        "block_tokens": BLOCK,
        "max_running": limits.max_running,
        "max_model_tokens": most,
        "cost": {
            "overhead_s": costs.step_s,
            "weight_bytes": 1.0,
            "expert_bytes": 0.0,
            "expert_share": 1.0,
            "kv_bytes_per_token": max(1e-9, costs.context_s * PEAK),
            "flops_per_token": 1e-9,
            "attention_flops": 0.0,
            "prefill_attention_flops": 0.0,
            "bytes_per_s": PEAK,
            "flops_per_s": PEAK,
            "bandwidth_efficiency": 1.0,
            "compute_efficiency": 1.0,
            "position_s": costs.prompt_s,
            "request_s": max(0.0, costs.request_s - costs.prompt_s),
        },
    }
    seer = {"engine": "sim", "kv_pool": "none"}
    loads = (
        Workload("shadow", [lengths], {"seer": seer, "engine": {"sim": {**engine, "request_s": request_s}}})
        for request_s in REQUEST_S
    )
    return [simulate(load, POLICY).summary.total_time_s for load in loads]
