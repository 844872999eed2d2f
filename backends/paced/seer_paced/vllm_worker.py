"""vLLM's worker without a device; vLLM makes it by its name, ``worker_cls``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from seer_vllm.connector import StoreConnector
from seer_vllm.extension import WorkerExtension
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheSpec
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.worker.worker_base import CompilationTimes, WorkerBase

from seer_core.ports.kv import Bytes
from seer_paced.fingerprints import Fingerprints
from seer_paced.settings import block_bytes, head_size
from seer_paced.vllm_runner import EmulatedRunner

__all__ = ["EmulatedWorker"]

LAYER = "emulated"


class EmulatedWorker(WorkerBase, WorkerExtension):
    """Computes nothing; it has Seer's extension, of which it replaces what needs a model."""

    model_runner: EmulatedRunner  # type: ignore[assignment]

    def init_device(self) -> None:
        """Do nothing: there is no device."""

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
        """Make the runner, with memory for fingerprints, which the connector has too."""
        block_tokens = kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size
        kv = Fingerprints(kv_cache_config.num_blocks, block_bytes(block_tokens))
        connector: StoreConnector | None = None
        if self.kv_transfer_config is not None:
            # One of its own and not the process's, for several instances may live here.
            made = KVConnectorFactory.create_connector(
                config=self.vllm_config, role=KVConnectorRole.WORKER, kv_cache_config=kv_cache_config
            )
            assert isinstance(made, StoreConnector)
            connector = made
            connector.register_kv_caches({LAYER: kv.layer})
        self.model_runner = EmulatedRunner(self.vllm_config, kv, block_tokens, connector)

    def compile_or_warm_up_model(self) -> CompilationTimes:
        """Do nothing."""
        return CompilationTimes(0.0, 0.0)

    def get_kv_connector_handshake_metadata(self) -> None:
        """Return nothing: instances are not connected."""

    def get_supported_tasks(self) -> tuple[str, ...]:
        """Return what vLLM asks for."""
        return ("generate",)

    def update_max_model_len(self, max_model_len: int) -> None:
        """Do nothing: the limit was given."""

    def seer_fingerprint(self, version: int = 0) -> str:
        """Return none: there is no model."""
        return ""

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        """Make a step."""
        return self.model_runner.execute(scheduler_output)

    def take_draft_token_ids(self) -> DraftTokenIds | None:
        """Return the drafts for the next step."""
        return self.model_runner.take_drafts()

    def seer_install(self, end_token_ids: Sequence[int]) -> None:
        """Show the extension what drafts."""
        if self.speculative_config is not None:
            self._seer_drafts = self.model_runner.drafter

    def seer_read_kv(self, block_ids: list[int] | None) -> Bytes:
        """Return blocks, uint8 [n, block_bytes], or without numbers those staged."""
        return self.model_runner.read_kv(block_ids)

    def seer_draft(self, method: str, *arguments: Any) -> Any:
        """Call a method of what drafts; its report has emulated seconds."""
        found = super().seer_draft(method, *arguments)
        return (self.model_runner.drafting_s, found[1]) if method == "report" else found
