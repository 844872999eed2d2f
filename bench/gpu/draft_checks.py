"""Drafts of a group in a real rollout: the same tokens as without, acceptance, and what a step takes."""

from __future__ import annotations

import tempfile
from pathlib import Path

import msgspec

from bench.gpu.check import GpuMachine
from bench.gpu.sessions import EXACT, Row, config_of, given_up, needs_gpu, prompts, roll_out_warm

DRAFT_TOKENS = 8
KINDS: dict[str, bool | None] = {"none": None, "each its own length": False, "one length": True}
"""The drafts of each rollout, and ``uniform_drafts`` for them."""


def drafts_first(machine: GpuMachine) -> list[Row]:
    """Compare rollouts with and without drafts on vLLM's first model runner."""
    return drafts(machine, "first")


def drafts_second(machine: GpuMachine) -> list[Row]:
    """Compare the same on its second."""
    needs_gpu(machine, "vLLM's second model runner")
    return drafts(machine, "second")


def drafts(machine: GpuMachine, runner: str) -> list[Row]:
    """Roll out groups without drafts, with drafts of their own lengths, and with those of one length."""
    from seer_core.ports.drafting import StepTimes

    groups, responses, tokens = (2, 2, 16) if machine.small else (4, 8, 256)
    records = prompts(groups, tokens, responses)
    # With it drafts seem to save time, so that they are verified here whether they pay or not.
    free = StepTimes((1,), (0, DRAFT_TOKENS), ((0.02, 0.01),))
    rows, plain = [], None
    with tempfile.TemporaryDirectory() as folder:
        profile = Path(folder, "profile.json")
        profile.write_bytes(msgspec.json.encode(free))
        for kind, uniform in KINDS.items():
            engine: Row = {"runner": runner} | ({} if uniform is None else {"uniform_drafts": uniform})
            settings = {"draft_tokens": DRAFT_TOKENS, "profile": str(profile)}
            plugins = {} if uniform is None else {"grouped_spec": settings}
            config = config_of(machine, tokens, groups * responses, engine, plugins)
            rolled = roll_out_warm(config, {} if machine.small else EXACT, records)
            plain = plain or rolled
            summary = rolled.summary
            assert not given_up(summary), f"drafts were given up: {summary.degradations}"
            rows.append(
                {
                    "model runner": runner,
                    "drafts": kind,
                    "responses": groups * responses,
                    "unlike those without": rolled.unlike(plain),
                    "drafted tokens": summary.drafted_tokens,
                    "accepted tokens": summary.accepted_tokens,
                    "a response's step, ms": 1e3 * rolled.seconds * groups * responses / summary.steps
                    if summary.steps
                    else None,
                    "tokens/s": rolled.tokens_per_s,
                }
            )
    for row in rows:
        assert not row["unlike those without"], f"a response depends on its drafts: {row}"
        assert row["drafts"] == "none" or row["drafted tokens"], f"nothing was drafted: {row}"
    return rows
