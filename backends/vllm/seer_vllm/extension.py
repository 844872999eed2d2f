"""What Seer does inside every vLLM worker, called by name through ``collective_rpc``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from msgspec import structs
from seer_host import checkpoint, memory
from seer_host.checkpoint import WEIGHTS
from seer_host.drafts import SOURCE, Drafting
from seer_host.instance import Row
from seer_host.wire import Troubled
from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.platforms import current_platform

from seer_core.drafting import DraftHost, SiblingText, SourceSpec
from seer_core.ports import ChunkJob
from seer_core.weights import WeightSpec
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
    _seer_sampler: sampling.KeyedSampler
    _seer_drafting: Drafting | None = None

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

    def seer_watch(self, on: bool) -> list[Row]:
        """Keep the logits of every choice from now on, or no longer; return those kept."""
        return self._seer_sampler.watch.turn(on)

    def seer_load(self, source: WeightSpec, version: int) -> str:
        """Load the weights of a source; return their fingerprint."""
        return weights.load(self, WEIGHTS.make(source.path, source.settings), version)

    def seer_fingerprint(self) -> str:
        """Return the fingerprint of the weights the worker was started with."""
        return weights.fingerprint(self.model_runner.get_model(), 0)

    def seer_ties(self) -> list[list[str]]:
        """Return the names of parameters that are one and the same."""
        return checkpoint.ties(self.model_runner.get_model())

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

    def seer_attach(self, spec: SourceSpec, host: DraftHost) -> None:
        """Make the source; in the first worker alone, whose drafts vLLM gives to all."""
        if self.rank == 0:
            assert self._seer_drafting is not None
            host = structs.replace(host, tell=self._seer_drafting.troubles.tell)
            source = SOURCE.make(spec.path, spec.settings, host)
            self.model_runner.drafter.attach(source, lambda: self.model_runner.input_batch.req_ids)

    def seer_open(self, request_id: str, job: ChunkJob) -> None:
        """Open a chunk that vLLM calls ``request_id``."""
        self.model_runner.drafter.open(request_id, job)

    def seer_close(self, request_ids: list[str]) -> None:
        """Close chunks."""
        for request_id in request_ids:
            self.model_runner.drafter.close(request_id)

    def seer_learn(self, text: SiblingText) -> None:
        """Learn what a response has written on another instance."""
        self.model_runner.drafter.learn(text)

    def seer_forget(self, group_id: str) -> None:
        """Forget a group."""
        self.model_runner.drafter.forget(group_id)

    def seer_reset(self) -> None:
        """Forget everything; a method of vLLM's own is made anew."""
        drafter = self.model_runner.drafter
        if isinstance(drafter, Proposer):
            drafter.reset()
        elif self.model_runner.speculative_config.method == "suffix":
            drafter.__init__(self.model_runner.vllm_config)

    def seer_make_up_drafts(self, tokens: int | None) -> None:
        """Draft so many tokens of no meaning for every request, until told None."""
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

    def seer_troubles(self) -> list[Troubled]:
        """Return what drafting complains of, since it was last asked."""
        return [] if self._seer_drafting is None else self._seer_drafting.troubles.take()

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
