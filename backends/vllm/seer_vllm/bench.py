"""A vLLM engine as the worker's profilers measure it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from seer_worker.process.meters import Sizes, Step
from vllm import SamplingParams
from vllm.inputs.engine import tokens_input
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.llm_engine import LLMEngine

from seer_vllm.connector import StoreConnector
from seer_vllm.scheduler import AccountingScheduler

__all__ = ["VllmBench"]

GROUP = "measure"


class VllmBench:
    """Made-up requests for an idle engine."""

    def __init__(
        self,
        engine: LLMEngine,
        step: Callable[[], object],
        drain: Callable[[], None],
        reset_cache: Callable[[], None],
        scheduler: AccountingScheduler,
        connector: StoreConnector | None,
        drafts: bool,
    ) -> None:
        self._engine, self._step, self._drain = engine, step, drain
        self.reset_cache = reset_cache
        self._scheduler = scheduler
        self._connector = connector
        self._ids: dict[str, str] = {}
        self.pooled = connector is not None
        config = engine.vllm_config
        blocks = config.cache_config.num_gpu_blocks
        assert blocks is not None
        self.sizes = Sizes(
            vocab=config.model_config.get_vocab_size(),
            model_tokens=config.model_config.max_model_len,
            running=config.scheduler_config.max_num_seqs,
            step_tokens=config.scheduler_config.max_num_batched_tokens,
            draft_tokens=scheduler.num_spec_tokens if drafts else 0,
            block_tokens=config.cache_config.block_size,
            blocks=blocks - 1,  # the first block is vLLM's null block
            draft_lengths=scheduler.draft_lengths,
        )

    def add(self, name: str, prompt: Sequence[int], max_tokens: int, *, save: bool = False) -> None:
        """Queue a request that is sampled at temperature 1, to its last token."""
        kept = {"group": GROUP, "last": False, "turns": False, "trajectory": ""}
        job = {**kept, "prompt_tokens": len(prompt)} if save else {}
        params = SamplingParams(
            temperature=1.0,
            max_tokens=max_tokens,
            ignore_eos=True,
            logprobs=0,
            flat_logprobs=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
            extra_args={"seed": len(self._ids), **job},
        )
        request = tokens_input(list(prompt), cache_salt=GROUP)
        self._ids[name] = self._engine.add_request(name, request, params)

    def step(self) -> Step:
        """Make one step; return what it computed."""
        self._step()
        return Step(*self._scheduler.scheduled)

    @property
    def busy(self) -> bool:
        """Whether a request has tokens to write."""
        return self._engine.has_unfinished_requests()

    def drop(self, names: Sequence[str]) -> None:
        """Forget requests, ended or not."""
        self._engine.abort_request(list(names))
        self._drain()
        for name in names:
            self._scheduler.settle(self._ids.pop(name))

    def make_up_drafts(self, tokens: int | None) -> None:
        """Draft so many meaningless tokens for every request, until called with None."""
        self._engine.collective_rpc("seer_make_up_drafts", args=(tokens,))

    def forget_saved(self) -> None:
        """Forget the KV that was saved."""
        if self._connector is not None:
            self._connector.requests.forget_group(GROUP)
