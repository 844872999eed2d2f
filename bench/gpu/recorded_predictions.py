"""Predictions of the rollouts of ``recorded_checks``, on simulated and on emulated instances.

Their steps take the times that both instances had together, made-up requests in both, right after an arm.  An
instance whose neighbour idles is faster, which no prediction has.
"""

from __future__ import annotations

from typing import Any

from bench.gpu.check import GpuMachine, Missing
from bench.gpu.recorded_checks import ARMS, FOUND
from bench.gpu.recorded_part import part_of, workload_of
from bench.gpu.sessions import Row


def step_times(machine: GpuMachine) -> list[Row]:
    """Return the times of the steps that arms measured."""
    rows = []
    for name, found in FOUND.items():
        if "profile" not in found:
            continue
        first = found["profile"]
        for table in (first, *first["more"]):
            for batch, seconds in zip(table["batch"], table["seconds"], strict=True):
                for drafted, each_s in zip(table["draft_tokens"], seconds, strict=True):
                    sizes = {"requests": batch, "drafted": drafted, "context": table["context_tokens"]}
                    rows.append({"instances of": name, **sizes, "a step, ms": 1e3 * each_s})
    if not rows:
        raise Missing("no arm has measured its steps")
    return rows


def predictions(machine: GpuMachine) -> list[Row]:
    """Predict the arms that were measured, on simulated instances and on emulated ones."""
    from seer_lab.policies import POLICIES
    from seer_lab.simulate import simulate

    plain, drafting = (
        FOUND.get(name, {}).get("profile") for name in ("veRL's policy", "posterior with drafts")
    )
    rows = []
    for name, policy in ARMS.items():
        profile = drafting if policy.endswith("+sd") else plain
        if name not in FOUND or profile is None:
            continue
        measured, load = FOUND[name], twin_of(machine, profile, policy)
        row: Row = {"arm": name}
        for figure, key in (("total", "total, s"), ("tail", "tail, s")):
            row[f"{figure}, measured, s"] = measured[key]
        for engine, called in (("sim", "simulated"), ("paced", "emulated")):
            summary = simulate(load, POLICIES[policy], engine=engine).summary
            for figure, value in (("total", summary.total_time_s), ("tail", summary.tail_time_s)):
                row[f"{figure}, {called}, s"] = value
                row[f"{figure}, {called}, off"] = value / measured[f"{figure}, s"] - 1
        rows.append(row)
    if not rows:
        raise Missing("no arm has ended whose steps were measured")
    return rows


def twin_of(machine: GpuMachine, profile: Row, policy: str) -> Any:
    """Return the workload of this part on instances whose steps take the times of a profile."""
    import msgspec
    from seer_cli.profiles import Profile
    from seer_lab.fit import fit

    measured = msgspec.convert(profile, Profile)
    fitted, info = fit(measured), measured.info
    assert info is not None
    limits = ("kv_capacity_tokens", "block_tokens", "max_running", "max_model_tokens")
    sim: Row = {
        **{limit: getattr(info, limit) for limit in limits},
        "chunk_s": info.chunk_s,
        "chunk_s_per_token": info.chunk_s_per_token,
        "cost": msgspec.structs.asdict(fitted.cost),
    }
    return workload_of(part_of(machine), sim, {"step_s": fitted.drafts_s}, policy)
