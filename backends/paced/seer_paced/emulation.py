"""An emulated accelerator: steps timed by a cost model, tokens taken from a script."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import structlog
from msgspec import structs
from seer_sim.drafts import Drafts
from seer_sim.profile import step_times
from seer_sim.settings import cost_of
from seer_worker.process.adapter import EndedChunk, Rejected, ScriptedTokens
from seer_worker.wire import Degraded, Start, Telemetry

from seer_core.errors import EngineError
from seer_core.model import InstanceInfo
from seer_core.ports.drafting import StepTimes
from seer_core.ports.engine import ChunkJob
from seer_core.ports.weights import WeightSpec
from seer_paced.emulated_clock import EmulatedClock, SleepingClock
from seer_paced.script import Script, ScriptError, TokenScript, read_script
from seer_paced.settings import TABLE, Settings

__all__ = ["LOGPROB", "EmulatedSteps", "Emulation"]

log = structlog.get_logger("seer")

LOGPROB = -1.0
"""Of every token: there is no model that could give it another."""

TYPICAL_RUNNING = 32
"""Requests of the step whose time an instance reports (``InstanceInfo.step_s``)."""

LATE_SHARE = 0.02
"""An instance may fall behind by so much of the emulated time; more, and a run's times are this machine's."""

LEAST_STEPS = 100
"""Steps before an instance reports that it falls behind."""


class Emulation:
    """The accelerator of one instance, and the time it lives on.

    Args:
        settings: ``[engine.paced]``.
        clock: lets time pass; by default the machine's, at the ``speed`` of the settings.
        script: the tokens; by default those that the settings name.
    """

    def __init__(
        self, settings: Settings, clock: EmulatedClock | None = None, script: TokenScript | None = None
    ) -> None:
        self.settings = settings
        self.cost = cost_of(settings, TABLE)
        self.time: EmulatedClock = SleepingClock(settings.speed) if clock is None else clock
        self.script: TokenScript = _script_of(settings) if script is None else script
        self.weight_version = 0
        """Of which weights the KV is that is computed from now on."""

    def compute_hash(self) -> str:
        """Return a constant; vLLM asks what it finds in its configuration for the key of compiled kernels."""
        return "emulated"

    def load_s(self, tokens: int) -> float:
        """Return the seconds in which so many tokens' KV is loaded from the pool."""
        return self.settings.moves.latency_s + self.save_s(tokens) if tokens else 0.0

    def save_s(self, tokens: int) -> float:
        """Return the seconds in which so many tokens' KV is saved to the pool."""
        return tokens * self.cost.kv_bytes_per_token / self.settings.moves.bandwidth_bytes_per_s

    def draft_s(self, drafted: int, verified: bool) -> float:
        """Return the seconds of drafting for so many requests, after a step that ``verified`` drafts."""
        drafts = self.settings.acceptance
        return drafts.step_s * verified + drafts.request_s * drafted

    def describe(self, info: InstanceInfo) -> InstanceInfo:
        """Return the info with the accelerator's figures."""
        settings, cost, running = self.settings, self.cost, min(TYPICAL_RUNNING, info.max_running)
        return structs.replace(
            info,
            kv_bytes_per_token=round(cost.kv_bytes_per_token),
            step_s=cost.pass_s(running, running, running),
            prefill_s_per_token=cost.pass_s(settings.max_batched_tokens) / settings.max_batched_tokens,
            chunk_s=settings.chunk_s,
            chunk_s_per_token=settings.chunk_s_per_token,
        )


class EmulatedMeters:
    """The ``Meters`` of an emulated engine: what its cost model says."""

    def __init__(self, emulation: Emulation, info: InstanceInfo, shares_kv: bool) -> None:
        self._emulation, self._info, self._shares_kv = emulation, info, shares_kv

    def steps(
        self,
        batch: Sequence[int],
        draft_tokens: Sequence[int],
        context_tokens: int | None,
        cell_s: float,
    ) -> StepTimes:
        """Return the times of the cost model.

        Raises:
            Rejected: no step of these sizes fits.
        """
        emulation = self._emulation
        times = emulation.settings.acceptance
        drafts = Drafts(step_s=times.step_s, request_s=times.request_s)
        try:
            return step_times(emulation.cost, drafts, self._info, batch, draft_tokens, context_tokens)
        except EngineError as error:
            raise Rejected(str(error)) from error

    def moves(self) -> Mapping[str, float]:
        """Return what the settings have of a load."""
        return {"fetch_s_per_token": self._emulation.save_s(1)} if self._shares_kv else {}


class EmulatedSteps:
    """A base, named before an engine's adapter, that does otherwise where steps are emulated."""

    emulated = True
    clock: Callable[[], float] | None = None
    emulation: Emulation
    info: InstanceInfo
    _loaded_version = 0
    _complained = False

    def emulate(self, start: Start) -> None:
        """Complete an engine that has just been made, with an ``emulation``."""
        self.info = self.emulation.describe(self.info)
        self.clock = self.emulation.time.now
        self._shares_kv = start.store is not None

    def submit(self, job: ChunkJob, salt: str, script: ScriptedTokens | None = None) -> None:
        """Queue a chunk with its tokens.

        Raises:
            Rejected: the script lacks it.
        """
        engine: Any = super()
        try:
            script = self.emulation.script.tokens_of(job)
        except ScriptError as error:
            raise Rejected(str(error)) from error
        engine.submit(job, salt, script)

    def step(self) -> list[EndedChunk]:
        """Make a step, in the emulated time."""
        engine: Any = super()
        self.emulation.time.begin_step()
        ended: list[EndedChunk] = engine.step()
        return ended

    def idle(self) -> None:
        """Let the time until the next step count for nothing."""
        self.emulation.time.idle()

    def reset_cache(self) -> None:
        """Drop all cached KV; what is computed from now on is of the weights that were loaded last."""
        engine: Any = super()
        self.emulation.time.begin_step()  # an engine may still make steps of what was dropped
        engine.reset_cache()
        self.emulation.weight_version = self._loaded_version
        self.emulation.time.idle()

    def update_weights(self, source: WeightSpec, version: int) -> str:
        """Return no fingerprint: there are no weights, and ``source`` is not read."""
        self._loaded_version = version
        return ""

    def fingerprint(self) -> str:
        """Return none."""
        return ""

    def sleep(self) -> int:
        """Return the bytes that all KV stands for."""
        return self.info.kv_capacity_tokens * self.info.kv_bytes_per_token

    def wake(self) -> None:
        """Do nothing."""

    def meters(self) -> EmulatedMeters:
        """Return what measures by the cost model."""
        return EmulatedMeters(self.emulation, self.info, self._shares_kv)

    def telemetry(self) -> Telemetry:
        """Add, in real time, how far steps fell behind."""
        engine: Any = super()
        telemetry: Telemetry = engine.telemetry()
        overrun = self.emulation.time.overrun()
        if overrun is None:
            return telemetry
        return structs.replace(telemetry, emulated_s=overrun.emulated_s, overrun_s=overrun.lost_s)

    def degradations(self) -> list[Degraded]:
        """Return once that the machine is too slow."""
        overrun = self.emulation.time.overrun()
        if self._complained or overrun is None or overrun.steps < LEAST_STEPS or overrun.share <= LATE_SHARE:
            return []
        self._complained = True
        return [
            Degraded(
                "pace",
                f"this machine is too slow or too busy for the pace: {overrun.late} of {overrun.steps} steps"
                f" ended late, and {overrun.share:.1%} of the time was lost, so the run's times are not"
                ' valid: lower speed, or write clock = "virtual"',
            )
        ]

    def close(self) -> None:
        """Log how far steps fell behind."""
        engine: Any = super()
        overrun = self.emulation.time.overrun()
        if overrun is not None:
            log.info("emulated", instance=self.info.id, **attrs.asdict(overrun))
        engine.close()


def _script_of(settings: Settings) -> Script:
    recorded = read_script(Path(settings.script), settings.vocab_size) if settings.script else None
    return Script(settings.vocab_size, settings.lengths, recorded)
