"""One paced instance of SGLang: seer_sglang's, around a scheduler whose model computes nothing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import structs
from seer_host.checkpoint import Header
from seer_host.instance import Row
from seer_host.wire import Failed, Finished, Start, Telemetry, Troubled
from seer_sglang.instance import Instance, salt

from seer_core.drafting import StepTimes
from seer_core.errors import EngineError
from seer_core.model import InstanceInfo
from seer_core.ports import ChunkJob
from seer_core.weights import WeightSpec
from seer_paced.checkpoint import write_checkpoint
from seer_paced.emulation import Emulation
from seer_paced.pace import Pace
from seer_paced.script import Saying
from seer_paced.settings import Settings

if TYPE_CHECKING:
    from seer_paced.sglang_forward import PacedLayers

__all__ = ["PacedSglang", "engine_args"]

HEAD_SIZE = 4
"""Of a layer's only head: a token's keys, bfloat16, are a word of 8 bytes, and so are its values."""

EMPTY_STEPS = 16
"""SGLang may plan nothing for some steps while it puts away what has been dropped; more, and it is stuck."""


class PacedSglang(Instance):
    """Runs chunks as SGLang schedules them, for as long as a cost model says, to the tokens of a script.

    Args:
        start: its settings are those of ``[engine.paced]``.
        pace: lets time pass; without one the machine's does, at the ``speed`` of the settings.
        script: what is said; without one, what the settings say.
    """

    scripted = True

    def __init__(self, start: Start, pace: Pace | None = None, script: Saying | None = None) -> None:
        settings = msgspec.convert(start.settings, Settings)
        self._emulation = Emulation(settings, pace, script)
        self._empty_steps = 0
        model = write_checkpoint(
            Path(start.scratch, "model"), settings.vocab_size, settings.max_model_tokens, HEAD_SIZE
        )
        super().__init__(structs.replace(start, settings=engine_args(settings, model)))

    def submit(self, job: ChunkJob) -> None:
        """Queue a chunk, if the script has it."""
        said = self._emulation.said(job)
        super().submit(job)
        req = next(reversed(self._engine.chunks.values())).req
        req.eos_token_ids = None
        req.sampling_params.stop_token_ids = None if said.end is None else {said.end}
        self._forward.say(req, job, said)

    def step(self) -> list[Finished | Failed]:
        """Make one step; return the chunks it ended."""
        self._emulation.pace.begin()
        results = super().step()
        self._rest_if_idle()
        self._empty_steps = 0 if self._engine.computed.requests else self._empty_steps + 1
        if self._engine.chunks and self._empty_steps > EMPTY_STEPS:
            raise EngineError(f"SGLang plans no step for the {len(self._engine.chunks)} chunks that it has")
        return results

    def abort(self, job_id: str) -> None:
        """Drop a running chunk; after the last one, time does not wait for the next."""
        super().abort(job_id)
        self._rest_if_idle()

    def reset_cache(self) -> None:
        """Forget all KV, after the step that SGLang still makes of what was dropped."""
        self._emulation.pace.begin()
        super().reset_cache()
        self._emulation.pace.rest()

    @property
    def admitted(self) -> list[str]:
        """The requests of whose contexts the last step has computed a part."""
        return self._forward.admitted

    def telemetry(self) -> Telemetry:
        """Return what SGLang is doing, and in real time how well the pace is kept."""
        return self._emulation.telemetry(super().telemetry())

    def troubles(self) -> list[Troubled]:
        """Return what the KV pool complains of, and once that the machine cannot keep the pace."""
        return super().troubles() + self._emulation.late()

    def update_weights(self, source: WeightSpec, version: int) -> str:
        """Forget all KV, which is of other weights; ``source`` is not read."""
        self._weight_version = version
        self._salt = salt(version, self._fingerprint())
        self.reset_cache()
        self._forward.turn(version)
        return self._fingerprint()

    def sleep(self) -> int:
        """Forget all KV; return the bytes that it stands for."""
        self.reset_cache()
        return self.info.kv_capacity_tokens * self.info.kv_bytes_per_token

    def wake(self) -> None:
        """Do nothing."""

    def watch(self, on: bool) -> list[Row]:
        """Return nothing: there are no logits."""
        return []

    def close(self) -> None:
        """End the store, and tell how well the pace was kept."""
        self._emulation.log_pace(self.info.id)
        super().close()

    def _rest_if_idle(self) -> None:
        if not self._engine.chunks:
            self._emulation.pace.rest()

    def _check_weights(self, model_path: str, on_cpu: bool) -> dict[str, Header]:
        return {}

    def _fingerprint(self) -> str:
        return ""

    def _describe(self, instance_id: str) -> InstanceInfo:
        from seer_paced.sglang_forward import PacedForward

        self._forward = PacedForward(self._engine, self._emulation)
        return self._emulation.describe(super()._describe(instance_id))

    def _layers(self) -> PacedLayers:
        from seer_paced.sglang_forward import PacedLayers

        return PacedLayers(self._engine.kv_layers, self._engine.scheduler.page_size, self._forward)

    def _measure_moves(self) -> dict[str, float]:
        if self._engine.pooling is None:
            return {}
        return {"fetch_s_per_token": self._emulation.extras.move_s_per_token}

    def _measure(
        self,
        batch: Sequence[int],
        draft_tokens: Sequence[int],
        context_tokens: int | None,
        cell_s: float = math.inf,
    ) -> StepTimes:
        return self._emulation.measure(self.info, batch, (0,), context_tokens)


def engine_args(settings: Settings, model: Path) -> dict[str, Any]:
    """Return the arguments of SGLang's ``ServerArgs``, and what ``seer_sglang`` takes beside them."""
    page = settings.block_tokens
    return {
        "model_path": str(model.absolute()),
        "load_format": "dummy",
        "dtype": "bfloat16",
        "page_size": page,
        "max_running_requests": settings.max_running,
        "max_total_tokens": settings.kv_capacity_tokens + 2 * page,  # what seer_sglang does not promise
        "max_prefill_tokens": settings.max_batched_tokens,
        "chunked_prefill_size": settings.max_batched_tokens,
        "context_length": settings.max_model_tokens,
        "disable_cuda_graph": True,
        "disable_overlap_schedule": True,
        "skip_tokenizer_init": True,
        "random_seed": 0,
        "log_level": "warning",
        "kv_cache_bytes": None,
        "draft_paths": 1,
    }
