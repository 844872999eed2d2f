"""vLLM's worker without a device; vLLM makes it by its name, ``worker_cls``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from seer_vllm.connector import StoreConnector
from seer_vllm.extension import WorkerExtension
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheSpec
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.worker.worker_base import CompilationTimes, WorkerBase

from seer_paced.fingerprints import Fingerprints
from seer_paced.runner import PacedRunner
from seer_paced.settings import block_bytes, head_size

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = ["PacedWorker"]

LAYER = "paced"


class PacedWorker(WorkerBase, WorkerExtension):
    """Computes nothing.  It brings Seer's extension along, of which it replaces what needs a model."""

    model_runner: PacedRunner  # type: ignore[assignment]

    def init_device(self) -> None:
        """Make the runner."""
        self.model_runner = PacedRunner(self.vllm_config)

    def load_model(self, *, load_dummy_weights: bool = False) -> None:
        """Do nothing: there is no model."""

    def get_kv_cache_spec(self) -> dict[str, KVCacheSpec]:
        """Return one layer whose blocks have room for a fingerprint."""
        block_tokens = self.cache_config.block_size
        return {
            LAYER: FullAttentionSpec(
                block_size=block_tokens,
                num_kv_heads=1,
                head_size=head_size(block_tokens),
                dtype=torch.bfloat16,
            )
        }

    def determine_available_memory(self) -> int:
        """Return what was asked for."""
        kv_bytes = self.cache_config.kv_cache_memory_bytes
        assert kv_bytes is not None
        return kv_bytes

    def initialize_from_config(self, kv_cache_config: KVCacheConfig) -> None:
        """Take memory for fingerprints, and let the connector have it."""
        block_tokens = kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size
        kv = Fingerprints(kv_cache_config.num_blocks, block_bytes(block_tokens))
        self.model_runner.hold(kv, block_tokens)
        if self.kv_transfer_config is not None:
            # One of its own and not the process's, for several instances may live here.
            connector = KVConnectorFactory.create_connector(
                config=self.vllm_config, role=KVConnectorRole.WORKER, kv_cache_config=kv_cache_config
            )
            assert isinstance(connector, StoreConnector)
            connector.register_kv_caches({LAYER: kv.layer})
            self.model_runner.connector = connector

    def compile_or_warm_up_model(self) -> CompilationTimes:
        """Do nothing."""
        return CompilationTimes(0.0, 0.0)

    def get_kv_connector_handshake_metadata(self) -> None:
        """Return nothing: instances do not talk to one another."""

    def get_supported_tasks(self) -> tuple[str, ...]:
        """Return what vLLM asks for."""
        return ("generate",)

    def update_max_model_len(self, max_model_len: int) -> None:
        """Do nothing: the limit was given."""

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        """Make a step."""
        return self.model_runner.execute(scheduler_output)

    def take_draft_token_ids(self) -> DraftTokenIds | None:
        """Return the drafts for the next step."""
        return self.model_runner.take_drafts()

    def seer_install(self) -> None:
        """Let the extension find what drafts."""
        if self.speculative_config is not None:
            self._seer_drafting = self.model_runner.drafter.drafting

    def seer_read_kv(self, block_ids: list[int]) -> NDArray[np.uint8]:
        """Return blocks, uint8 [n, block_bytes]."""
        return self.model_runner.read_kv(block_ids)

    def seer_fingerprint(self) -> str:
        """Return nothing: there are no weights."""
        return ""

    def seer_drafting(self) -> tuple[float, dict[str, float]]:
        """Return the emulated seconds spent on drafts, and the source's figures."""
        _, figures = super().seer_drafting()
        return self.model_runner.drafting_s, figures
