"""Seer's methods inside every vLLM worker, called by name through ``collective_rpc``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import structlog
import torch
from seer_worker.process.adapter import LogitRow, Rejected
from seer_worker.weights import checkpoint, memory
from seer_worker.weights.adapters import Adapter, Merged
from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group
from vllm.platforms import current_platform

from seer_core.ports.drafting import DraftContext, SourceSpec
from seer_core.ports.kv import Bytes
from seer_core.ports.weights import WeightSource, WeightSpec
from seer_vllm import (
    adapters,
    internals,
    parts,
    routing,
    sampling,
    second_runner_sampling,
    speculator,
    weights,
)
from seer_vllm.connector import StoreConnector
from seer_vllm.proposer import OwnMethod, Proposer
from seer_vllm.runners import FIRST, SECOND

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = ["WorkerExtension"]

log = structlog.get_logger("seer")


class WorkerExtension:
    """Mixed into vLLM's worker class (``worker_extension_cls``)."""

    model_runner: Any
    vllm_config: Any
    rank: int
    _seer_sampler: sampling.VllmSampler | second_runner_sampling.SecondRunnerSampler
    _seer_drafts: OwnMethod | Proposer
    _seer_experts: routing.SlotExperts
    _seer_weights: WeightSource | Adapter | None = None

    def seer_install(self, end_token_ids: Sequence[int]) -> str | None:
        """Sample by key, and time the drafts if there are any; return which model runner it is."""
        runner = self.model_runner
        if current_platform.is_cpu() and self.vllm_config.parallel_config.enable_expert_parallel:
            from seer_vllm import cpu_experts

            cpu_experts.install()
        if current_platform.is_cpu() and self.vllm_config.model_config.is_hybrid:
            from seer_vllm import cpu_delta_nets

            cpu_delta_nets.install()
        if self.vllm_config.use_v2_model_runner:
            internals.check_second_runner(runner)
            self._seer_sampler = second_runner_sampling.install(runner)
            if runner.speculator is not None:
                self._seer_drafts = speculator.install(runner)
            if self.vllm_config.aux_output_config.enabled:
                internals.check_routing(runner)
                self._seer_experts = runner.aux_output_connector = routing.SlotExperts(runner)
                if has_kv_transfer_group():
                    connector = get_kv_transfer_group()
                    assert isinstance(connector, StoreConnector)
                    connector.take_along(self._seer_experts.blocks)
            return SECOND
        internals.check_runner(runner)
        self._seer_sampler = sampling.install(runner, end_token_ids)
        drafter = getattr(runner, "drafter", None)
        if drafter is None:
            return FIRST
        if current_platform.is_cpu():
            from seer_vllm import cpu_attention

            cpu_attention.install()
        # vLLM drafts nonsense for a whole batch of which one request comes near this limit.
        runner.effective_drafter_max_model_len = runner.max_model_len + 2 * runner.num_spec_tokens + 2
        if isinstance(drafter, Proposer):
            drafter.batch_ids = lambda: runner.input_batch.req_ids
            self._seer_drafts = drafter
        else:
            self._seer_drafts = OwnMethod(drafter, runner.vllm_config)
        return FIRST

    def seer_watch(self, on: bool) -> list[LogitRow]:
        """Keep the logits of every choice from now on, or no longer; return those kept."""
        return self._seer_sampler.watch.turn(on)

    def seer_check(
        self,
        spec: WeightSpec,
        wanted: Mapping[str, checkpoint.TensorHeader],
        dtype: torch.dtype,
        base: WeightSpec,
    ) -> str | None:
        """Open a source of weights and check its tensors; return why they are refused, if they are."""
        self._seer_weights = None
        beside = self._seer_adapters
        try:
            if spec.adapter_config is not None and beside is not None:
                self._seer_weights = checkpoint.open_adapter(spec, wanted, dtype)
                beside.check(self._seer_weights)
                return None
            with adapters.unwrapped(self.model_runner.get_model()) as model:
                model_ties = checkpoint.ties(model)
            self._seer_weights = checkpoint.open_checked(spec, wanted, model_ties, dtype, base)
        except Rejected as rejection:
            self._seer_weights = None
            return str(rejection)
        return None

    def seer_load(self, version: int) -> str:
        """Load the weights that were checked; return their fingerprint."""
        source, self._seer_weights = self._seer_weights, None
        beside = self._seer_adapters
        if isinstance(source, Adapter):
            assert beside is not None
            beside.load(source)
            return self.seer_fingerprint(version)
        assert source is not None
        with adapters.unwrapped(self.model_runner.get_model()):
            found = weights.load(self, source, version)
        if beside is not None:
            beside.drop()
        return source.joined(found) if isinstance(source, Merged) else found

    def seer_fingerprint(self, version: int = 0) -> str:
        """Return the fingerprint of the weights in the model, an adapter's among them."""
        beside = self._seer_adapters
        with adapters.unwrapped(self.model_runner.get_model()) as model:
            whole = weights.fingerprint(model, version)
        return whole if beside is None else beside.joined(whole)

    @property
    def _seer_adapters(self) -> adapters.Adapters | None:
        """The keeper of adapters beside the model; None without LoRA."""
        if self.vllm_config.lora_config is None:
            return None
        if not hasattr(self, "_seer_beside"):
            self._seer_beside = adapters.Adapters(self.model_runner.lora_manager)
        return self._seer_beside

    @torch.inference_mode()
    def seer_clear_kv(self) -> None:
        """Write zeros over all KV memory."""
        for layer in self.model_runner.kv_caches:
            for part in layer if isinstance(layer, list | tuple) else [layer]:
                part.zero_()

    def seer_release_kv(self) -> None:
        """Give all KV memory, in main memory, back to the system until it is written again."""
        for layer in self.model_runner.kv_caches:
            for part in layer if isinstance(layer, list | tuple) else [layer]:
                memory.release(part)

    def seer_used_bytes(self) -> int:
        """Return the memory in use: this process's, or all of the device."""
        return memory.used_bytes(self.model_runner.device)

    def seer_read_kv(self, block_ids: list[int] | None) -> Bytes:
        """Return blocks of KV, or without numbers those staged, uint8 [n, block_bytes]."""
        connector = get_kv_transfer_group()
        assert isinstance(connector, StoreConnector)
        return connector.read(block_ids)

    def seer_read_kv_part(self, block_ids: list[int], into: Bytes) -> str | None:
        """Write this rank's part of blocks into uint8 [n, block_bytes]; return why it cannot.

        An error of one rank would leave the answers of the others in vLLM's queues, for the next call.
        """
        connector = get_kv_transfer_group()
        assert isinstance(connector, StoreConnector)
        try:
            connector.read_part(block_ids, into)
        except Exception as error:
            log.exception("kv_not_read", rank=self.rank)
            return f"{type(error).__name__}: {error}"
        return None

    def seer_kv_order(self) -> str:
        """Return a name of the order of KV within blocks."""
        return parts.kv_order(self.vllm_config)

    def seer_read_experts(
        self, block_ids: Sequence[int], first: int, count: int
    ) -> NDArray[np.integer[Any]] | None:
        """Return the experts of tokens, int [count, layers, experts per token]; all ranks have the same."""
        return self._seer_experts.read(block_ids, first, count) if self.rank == 0 else None

    def seer_attach(self, spec: SourceSpec, host: DraftContext) -> None:
        """Make the source; in the first worker alone, whose drafts vLLM gives to all."""
        if self.rank == 0:
            self.seer_draft("attach", spec, host)

    def seer_draft(self, method: str, *arguments: Any) -> Any:
        """Call a method of what drafts in this worker."""
        return getattr(self._seer_drafts, method)(*arguments)

    def seer_make_up_drafts(self, tokens: int | None) -> None:
        """Draft so many meaningless tokens for every request, until called with None."""
        self._seer_drafts.drafting.made_up = tokens
