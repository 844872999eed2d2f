"""Families whose layers a CPU computes otherwise or not at all, each with a tiny model: whole, and moved."""

from __future__ import annotations

import tempfile
from pathlib import Path

from bench.gpu.check import GpuMachine
from bench.gpu.instance_checks import environment_of, pair_config
from bench.gpu.sessions import MODEL, Rolled, Row, prompts, roll_out, session_of

__all__ = ["FAMILIES", "families"]

FAMILIES = (
    "DeepSeek-V3",
    "Qwen3-Next",
    "Nemotron-H",
    "Falcon-H1",
    "gpt-oss",
    "Gemma-3",
    "GLM-4-MoE",
    "Qwen3-MoE",
)
"""Latent attention, gated delta nets, Mamba-2, sinks, sliding windows, mixtures; a dry run has the last."""


def families(machine: GpuMachine) -> list[Row]:
    """Roll out each family on one instance, one response at a time and all at once, and on two with a pool.

    Raises:
        AssertionError: a response of a family that starts differs.
    """
    from seer_testing.families import write_family

    from seer_core.errors import SeerError

    rows = []
    for name in FAMILIES[-1:] if machine.small else FAMILIES:
        with tempfile.TemporaryDirectory() as folder:
            model = write_family(Path(folder) / "model", name, 1, MODEL)
            row: Row = {"family": name}
            try:
                row |= _ways(machine._replace(model=model))
            except SeerError as error:
                row["refused"] = str(error).splitlines()[0]
        rows.append(row)
    rows.sort(key=lambda row: "refused" in row)
    found = [row["family"] for row in rows if row.get("unlike in a batch") or row.get("unlike where moved")]
    assert not found, f"responses of {', '.join(found)} differ: {rows}"
    return rows


def _ways(machine: GpuMachine) -> Row:
    groups, responses, tokens = (2, 2, 32) if machine.small else (6, 4, 256)
    records = prompts(groups, tokens, responses)
    rolled: dict[bool, Rolled] = {}
    alone: dict[str, list[int]] = {}
    for pool in (False, True):
        config = pair_config(machine, 2 if pool else 1, tokens, pool)
        with session_of(config, environment_of(machine)) as session:
            if not pool:
                for record in records:
                    alone |= roll_out(session, [record]).tokens
            rolled[pool] = roll_out(session, records)
    whole, moved = rolled[False], rolled[True]
    return {
        "responses": groups * responses,
        "unlike in a batch": sum(whole.tokens[name] != tokens for name, tokens in alone.items()),
        "unlike where moved": moved.unlike(whole),
        "moves": moved.summary.migrations,
        "tokens from the pool": moved.summary.pool_tokens,
        "exactness": whole.summary.exactness,
        "refused": "",
    }
