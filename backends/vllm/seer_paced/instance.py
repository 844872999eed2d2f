"""One paced instance of vLLM: seer_vllm's, around an engine whose worker computes nothing."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from pathlib import Path
from typing import Any

import msgspec
from msgspec import structs
from seer_host.drafts import check_source
from seer_host.instance import Row
from seer_host.wire import Start, Telemetry, Troubled
from seer_vllm.instance import Instance
from vllm import SamplingParams

from seer_core.drafting import DraftHost, SourceSpec, StepTimes
from seer_core.errors import EngineError
from seer_core.ports import ChunkJob
from seer_core.weights import WeightSpec
from seer_paced.checkpoint import write_checkpoint
from seer_paced.emulation import Emulation
from seer_paced.pace import Pace
from seer_paced.runner import PacedRunner
from seer_paced.script import Script
from seer_paced.settings import Settings, block_bytes

__all__ = ["PacedInstance", "engine_args"]


class PacedInstance(Instance):
    """Runs chunks as vLLM schedules them, for as long as a cost model says, to the tokens of a script.

    Args:
        start: its settings are those of ``[engine.paced]``.
        pace: lets time pass; without one the machine's does, at the ``speed`` of the settings.
        script: what is said; without one, what the settings say.
    """

    scripted = True

    def __init__(self, start: Start, pace: Pace | None = None, script: Script | None = None) -> None:
        settings = msgspec.convert(start.settings, Settings)
        self._emulation = emulation = Emulation(settings, pace, script)
        model = write_checkpoint(Path(start.scratch, "model"), settings.vocab_size, settings.max_model_tokens)
        if start.source is not None:
            check_source(start.source, ())  # no method of vLLM's own: these want a model runner
        if start.source is not None and not emulation.script.has_text:
            raise EngineError(
                "drafts of made-up text mean nothing: name a recorded text in [engine.paced].script, or drop"
                " the drafter from [seer].plugins"
            )
        super().__init__(structs.replace(start, settings=engine_args(settings, model)))

    def submit(self, job: ChunkJob) -> None:
        """Queue a chunk, if the script has it."""
        self._said = self._emulation.said(job)
        super().submit(job)
        self._runner.say(self._running[job.id].vllm_id, self._said)

    def step(self) -> Any:
        """Make one step; return the chunks it ended."""
        self._emulation.pace.begin()
        results = super().step()
        self._rest_if_idle()
        return results

    def abort(self, job_id: str) -> None:
        """Drop a running chunk; after the last one, time does not wait for the next."""
        super().abort(job_id)
        self._rest_if_idle()

    @property
    def admitted(self) -> list[str]:
        """The requests that the last step has let in, again or anew."""
        return self._runner.admitted

    def telemetry(self) -> Telemetry:
        """Return what vLLM is doing, and in real time how well the pace is kept."""
        return self._emulation.telemetry(super().telemetry())

    def troubles(self) -> list[Troubled]:
        """Return what drafts and KV pool complain of, and once that the machine cannot keep the pace."""
        return super().troubles() + self._emulation.late()

    def update_weights(self, source: WeightSpec, version: int) -> None:  # type: ignore[override]
        """Forget all KV, which is of other weights; ``source`` is not read."""
        self._weight_version = version
        self.reset_cache()
        self._runner.turn(version)

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
        """End everything vLLM has started, and tell how well the pace was kept."""
        self._emulation.log_pace(self.info.id)
        super().close()
        self._engine.engine_core.shutdown()

    def _rest_if_idle(self) -> None:
        if not self._running:
            self._emulation.pace.rest()

    @property
    def _runner(self) -> PacedRunner:
        runner: PacedRunner = self._engine.collective_rpc(_runner_of)[0]
        return runner

    def _sampling_params(self, job: ChunkJob) -> SamplingParams:
        params = super()._sampling_params(job)
        params.ignore_eos = True
        params.stop_token_ids = [] if self._said.end is None else [self._said.end]
        return params

    def _describe(self, instance_id: str) -> Any:
        emulation = self._emulation
        self._runner.pace_by(emulation.pace, emulation.cost, emulation.extras)
        return emulation.describe(super()._describe(instance_id))

    def _measure_moves(self) -> dict[str, float]:
        if self._connector is None:
            return {}
        return {"fetch_s_per_token": self._emulation.extras.move_s_per_token}

    def _measure(
        self,
        batch: Sequence[int],
        draft_tokens: Sequence[int],
        context_tokens: int | None,
        cell_s: float = inf,
    ) -> StepTimes:
        lengths = draft_tokens if self._drafts else (0,)
        return self._emulation.measure(self.info, batch, lengths, context_tokens)

    def _draft_host(self, source: SourceSpec, times: StepTimes) -> DraftHost:
        return structs.replace(super()._draft_host(source, times), clock=self._emulation.pace.now)


def engine_args(settings: Settings, model: Path) -> dict[str, Any]:
    """Return the arguments of vLLM's ``EngineArgs``: its scheduler, our worker, no tokenizer, no weights."""
    blocks = settings.kv_capacity_tokens // settings.block_tokens + 1  # the first is vLLM's null block
    return {
        "model": str(model.absolute()),
        "skip_tokenizer_init": True,
        "load_format": "dummy",
        "dtype": "bfloat16",
        "block_size": settings.block_tokens,
        "max_num_seqs": settings.max_running,
        "max_num_batched_tokens": settings.max_batched_tokens,
        "max_model_len": settings.max_model_tokens,
        "kv_cache_memory_bytes": blocks * block_bytes(settings.block_tokens),
        "distributed_executor_backend": "uni",
        "enforce_eager": True,
        "worker_cls": "seer_paced.worker.PacedWorker",
    }


def _runner_of(worker: Any) -> PacedRunner:
    runner: PacedRunner = worker.model_runner
    return runner
