"""What paced instances have in common, whoever schedules: a script, costs, and a pace that is kept or not."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import attrs
import structlog
from msgspec import structs
from seer_host.instance import Refusal
from seer_host.wire import Telemetry, Troubled
from seer_sim.drafts import Drafts
from seer_sim.profile import step_times

from seer_core.drafting import StepTimes
from seer_core.errors import EngineError
from seer_core.model import InstanceInfo
from seer_core.ports import ChunkJob
from seer_paced.pace import Pace, RealPace
from seer_paced.script import Said, Saying, Script, ScriptError, read_script
from seer_paced.settings import Settings, cost_of, extras_of

__all__ = ["LOGPROB", "Emulation"]

log = structlog.get_logger("seer")

LOGPROB = -1.0
"""Of every token: there is no model that could give it another."""

TYPICAL_RUNNING = 32
"""Requests of the step whose time an instance tells (``InstanceInfo.step_s``)."""

LATE_SHARE = 0.02
"""An instance may fall behind by so much of the emulated time; more, and a run's times are this machine's."""

LEAST_STEPS = 100
"""Before them an instance does not complain of its pace."""


class Emulation:
    """The accelerator and the text of one instance.

    Args:
        settings: ``[engine.paced]``.
        pace: lets time pass; without one the machine's does, at the ``speed`` of the settings.
        script: what is said; without one, what the settings say.
    """

    def __init__(self, settings: Settings, pace: Pace | None = None, script: Saying | None = None) -> None:
        self.settings = settings
        self.cost = cost_of(settings)
        self.extras = extras_of(settings, self.cost)
        self.pace = RealPace(settings.speed) if pace is None else pace
        self.script: Saying = _script_of(settings) if script is None else script
        self._complained = False

    def said(self, job: ChunkJob) -> Said:
        """Return what a chunk writes.

        Raises:
            Refusal: the script has it not.
        """
        try:
            return self.script.said(job)
        except ScriptError as error:
            raise Refusal(str(error)) from error

    def describe(self, info: InstanceInfo) -> InstanceInfo:
        """Return what an instance says of itself, with the accelerator's figures."""
        cost, running = self.cost, min(TYPICAL_RUNNING, info.max_running)
        return structs.replace(
            info,
            kv_bytes_per_token=round(cost.kv_bytes_per_token),
            step_s=cost.pass_s(running, running, running),
            prefill_s_per_token=cost.pass_s(self.settings.max_batched_tokens)
            / self.settings.max_batched_tokens,
            chunk_s=self.settings.chunk_s,
            chunk_s_per_token=self.settings.chunk_s_per_token,
        )

    def measure(
        self,
        info: InstanceInfo,
        batch: Sequence[int],
        draft_tokens: Sequence[int],
        context_tokens: int | None,
    ) -> StepTimes:
        """Return what the cost model says.

        Raises:
            Refusal: no step of these sizes fits.
        """
        drafts = Drafts(step_s=self.settings.draft_step_s, request_s=self.settings.draft_request_s)
        try:
            return step_times(self.cost, drafts, info, batch, draft_tokens, context_tokens)
        except EngineError as error:
            raise Refusal(str(error)) from error

    def telemetry(self, told: Telemetry) -> Telemetry:
        """Return what an instance is doing, in real time with how well the pace is kept."""
        if not isinstance(self.pace, RealPace):
            return told
        overrun = self.pace.overrun()
        return structs.replace(told, paced_s=overrun.paced_s, overrun_s=overrun.lost_s)

    def late(self) -> list[Troubled]:
        """Return once that the machine cannot keep the pace."""
        if self._complained or not isinstance(self.pace, RealPace):
            return []
        overrun = self.pace.overrun()
        if overrun.steps < LEAST_STEPS or overrun.share <= LATE_SHARE:
            return []
        self._complained = True
        return [
            Troubled(
                "pace",
                f"this machine is too slow or too busy for the pace: {overrun.late} of {overrun.steps} steps"
                f" ended late, and {overrun.share:.1%} of the time was lost, so the run's times are not"
                ' valid: lower speed, or write clock = "virtual"',
            )
        ]

    def log_pace(self, instance_id: str) -> None:
        """Tell how well the pace was kept."""
        if isinstance(self.pace, RealPace):
            log.info("paced", instance=instance_id, **attrs.asdict(self.pace.overrun()))


def _script_of(settings: Settings) -> Script:
    recorded = read_script(Path(settings.script), settings.vocab_size) if settings.script else None
    return Script(settings.vocab_size, settings.lengths, recorded)
