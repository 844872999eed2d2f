"""Seer's methods inside every vLLM worker, called by name through ``collective_rpc``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from msgspec import structs
from seer_worker.process.drafts import SOURCE, Drafting
from seer_worker.process.instance import LogitRow, Rejected
from seer_worker.weights import checkpoint, memory
from seer_worker.wire import Degraded
from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.platforms import current_platform

from seer_core.ports.drafting import DraftContext, SiblingTokens, SourceSpec
from seer_core.ports.engine import ChunkJob
from seer_core.ports.weights import WeightSource, WeightSpec
from seer_vllm import internals, sampling, weights
from seer_vllm.connector import StoreConnector
from seer_vllm.proposer import Proposer

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = ["WorkerExtension"]


class WorkerExtension:
    """Mixed into vLLM's worker class (``worker_extension_cls``)."""

    model_runner: Any
    rank: int
    _seer_sampler: sampling.VllmSampler
    _seer_drafting: Drafting | None = None
    _seer_weights: WeightSource | None = None

    def seer_install(self) -> None:
        """Sample by key, and time the drafts if there are any."""
        runner = self.model_runner
        internals.check_runner(runner)
        self._seer_sampler = sampling.install(runner)
        drafter = getattr(runner, "drafter", None)
        if drafter is None:
            return
        if current_platform.is_cpu():
            from seer_vllm import cpu_attention

            cpu_attention.install()
        # vLLM drafts nonsense for a whole batch of which one request comes near this limit.
        runner.effective_drafter_max_model_len = runner.max_model_len + 2 * runner.num_spec_tokens + 2
        if isinstance(drafter, Proposer):
            self._seer_drafting = drafter.drafting
        else:
            self._seer_wrap(drafter)

    def seer_watch(self, on: bool) -> list[LogitRow]:
        """Keep the logits of every choice from now on, or no longer; return those kept."""
        return self._seer_sampler.watch.turn(on)

    def seer_check(
        self, spec: WeightSpec, wanted: Mapping[str, checkpoint.TensorHeader], dtype: torch.dtype
    ) -> str | None:
        """Open a source of weights and check its tensors; return why they are refused, if they are."""
        self._seer_weights = None
        model_ties = checkpoint.ties(self.model_runner.get_model())
        try:
            self._seer_weights = checkpoint.open_checked(spec, wanted, model_ties, dtype)
        except Rejected as rejection:
            return str(rejection)
        return None

    def seer_load(self, version: int) -> str:
        """Load the weights that were checked; return their fingerprint."""
        source, self._seer_weights = self._seer_weights, None
        assert source is not None
        return weights.load(self, source, version)

    def seer_fingerprint(self) -> str:
        """Return the fingerprint of the weights the worker was started with."""
        return weights.fingerprint(self.model_runner.get_model(), 0)

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

    def seer_read_kv(self, block_ids: list[int]) -> NDArray[np.uint8]:
        """Return blocks of KV, uint8 [n, block_bytes]."""
        connector = get_kv_transfer_group()
        assert isinstance(connector, StoreConnector)
        return connector.read(block_ids)

    def seer_attach(self, spec: SourceSpec, host: DraftContext) -> None:
        """Make the source; in the first worker alone, whose drafts vLLM gives to all."""
        if self.rank == 0:
            assert self._seer_drafting is not None
            host = structs.replace(host, report=self._seer_drafting.degradations.report)
            source = SOURCE.make(spec.path, spec.settings, host)
            self.model_runner.drafter.attach(source, lambda: self.model_runner.input_batch.req_ids)

    def seer_open(self, request_id: str, job: ChunkJob) -> None:
        """Open a chunk that vLLM calls ``request_id``."""
        self.model_runner.drafter.open(request_id, job)

    def seer_close(self, request_ids: list[str]) -> None:
        """Close chunks."""
        for request_id in request_ids:
            self.model_runner.drafter.close(request_id)

    def seer_add_sibling_tokens(self, text: SiblingTokens) -> None:
        """Pass on to drafting what a response has written on another instance."""
        self.model_runner.drafter.add_sibling_tokens(text)

    def seer_forget(self, group_id: str) -> None:
        """Drop what is kept of a group that is over."""
        self.model_runner.drafter.forget(group_id)

    def seer_reset(self) -> None:
        """Forget everything; a method of vLLM's own is made anew."""
        drafter = self.model_runner.drafter
        if isinstance(drafter, Proposer):
            drafter.reset()
        elif self.model_runner.speculative_config.method == "suffix":
            drafter.__init__(self.model_runner.vllm_config)

    def seer_make_up_drafts(self, tokens: int | None) -> None:
        """Draft so many meaningless tokens for every request, until called with None."""
        assert self._seer_drafting is not None
        self._seer_drafting.made_up = tokens

    def seer_drafting(self) -> tuple[float, dict[str, float]]:
        """Return the seconds spent on drafts, and the source's figures."""
        if self._seer_drafting is None:
            return 0.0, {}
        drafter = self.model_runner.drafter
        figures = drafter.stats() if isinstance(drafter, Proposer) else {}
        if self._seer_drafting.failed:
            figures = {"failed": 1.0}
        return self._seer_drafting.seconds, figures

    def seer_degradations(self) -> list[Degraded]:
        """Return what drafting complains of, since the last call."""
        return [] if self._seer_drafting is None else self._seer_drafting.degradations.take()

    def seer_stop_drafting(self) -> None:
        """Stop the source."""
        drafter = getattr(self.model_runner, "drafter", None)
        if isinstance(drafter, Proposer):
            drafter.stop()

    def _seer_wrap(self, drafter: Any) -> None:
        """Put ``Drafting`` around a method of vLLM's own."""
        runner = self.model_runner
        propose = drafter.propose
        drafting = Drafting(runner.num_spec_tokens, runner.model_config.get_vocab_size())

        def timed(*arguments: Any, **named: Any) -> list[list[int]]:
            sampled = next(value for value in arguments if isinstance(value, list))
            return drafting.draft(sampled, lambda: propose(*arguments, **named))

        drafter.propose = timed
        self._seer_drafting = drafting
