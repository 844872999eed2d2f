"""Every name inside vLLM 0.32 that this backend relies on, checked when a worker starts.

vLLM promises none of them.  Each stands here with what breaks without it, so that another vLLM is refused
with one sentence, instead of giving a wrong token.  What is public (``LLMEngine``, ``SamplingParams``, a
connector's documented methods) is not repeated.
"""

from __future__ import annotations

from typing import Any

from seer_worker.process.names import Name, complain, flaw_of, lacking

from seer_core.errors import EngineError
from seer_vllm import SUPPORTED_VLLM

__all__ = [
    "CONNECTOR",
    "DRAFTING",
    "IMPORTED",
    "LLM_ENGINE",
    "ON_CPU",
    "RUNNER",
    "SCHEDULER",
    "Name",
    "check_engine",
    "check_imports",
    "check_runner",
    "check_scheduler",
]


ENGINE = "vLLM"
RENDEZVOUS = "the file by which an engine's processes meet stays in the temporary directory"
SAMPLED = "tokens are not sampled by key"
ACCOUNT = "chunks come without an account of what they cost"
PROOF = "nothing proves that a layer answers by the weights just loaded"
SPLIT = "verifying short drafts on a CPU costs three times as much"
VERIFIED = "drafts are not verified by key"
PIECES = "responses that stream come at the ends of chunks"
PADDED = "a new request is padded with drafts of no meaning, beyond the end of its chunk"

_RUNNER = "vllm.v1.worker.gpu_model_runner:GPUModelRunner"
_SCHEDULER = "vllm.v1.core.sched.scheduler:Scheduler"
_DRAFTS = "vllm.v1.spec_decode.metadata:SpecDecodeMetadata"
_ATTENTION = "vllm.v1.attention.backend:CommonAttentionMetadata"
_LINEAR = "vllm.model_executor.layers.linear:UnquantizedLinearMethod"
_HEAD = "vllm.model_executor.layers.vocab_parallel_embedding:UnquantizedEmbeddingMethod"
_RELOAD = "vllm.model_executor.model_loader.reload"

IMPORTED = (
    Name("vllm.v1.executor.uniproc_executor", "get_file_store_init_method", RENDEZVOUS, ()),
    Name("vllm.v1.executor.multiproc_executor", "get_file_store_init_method", RENDEZVOUS, ()),
    Name(
        "vllm.v1.core.kv_cache_utils",
        "_check_enough_kv_cache_memory",
        "too little KV memory is reported in tenths of GiB",
        ("available_memory", "get_needed_memory", "max_model_len", "estimate_max_model_len"),
    ),
    Name(_RUNNER, "_sample", SAMPLED, ("self", "logits", "spec_decode_metadata")),
    Name(
        _RUNNER,
        "_calc_spec_decode_metadata",
        VERIFIED,
        ("self", "num_draft_tokens", "cu_num_scheduled_tokens"),
    ),
    Name("vllm.sampling_params:SamplingParams", "all_stop_token_ids", "min_tokens holds off no end token"),
    Name("vllm.v1.outputs:SamplerOutput", "sampled_token_ids", SAMPLED),
    Name("vllm.v1.outputs:SamplerOutput", "logprobs_tensors", "chunks have no log-probs"),
    Name(
        "vllm.v1.sample.sampler:Sampler",
        "gather_logprobs",
        "log-probs of prompts need a compiler",
        ("logprobs", "num_logprobs", "token_ids"),
    ),
    Name(
        "vllm.v1.request:Request", "get_skip_reading_prefix_cache", "log-probs of prompts lack cached tokens"
    ),
    Name(_DRAFTS, "logits_indices", VERIFIED),
    Name(_SCHEDULER, "schedule", ACCOUNT, ("self", "throttle_prefills")),
    Name(_SCHEDULER, "update_from_output", ACCOUNT, ("self", "scheduler_output", "model_runner_output")),
    Name(
        _SCHEDULER,
        "_preempt_request",
        "no chunk ends early, and KV of preempted requests is not pooled",
        ("self", "request"),
    ),
    Name(_SCHEDULER, "_free_request", "no chunk ends early", ("self", "request")),
    Name("vllm.v1.metrics.stats:PrefillStats", "num_external_cached_tokens", ACCOUNT),
    Name(
        "vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorBase_V1",
        "_get_connector_metadata",
        "no KV is loaded from the pool",
        ("self",),
    ),
    Name("vllm.v1.engine.detokenizer:IncrementalDetokenizer", "output_token_ids", PIECES),
    Name("vllm.v1.engine.logprobs:LogprobsProcessor", "logprobs", PIECES),
    Name(
        "vllm.v1.engine.logprobs:LogprobsProcessor", "prompt_logprobs", "stopped chunks have none of prompts"
    ),
    Name(_LINEAR, "process_weights_after_loading", PROOF, ("self", "layer")),
    Name(_HEAD, "process_weights_after_loading", PROOF, ("self", "layer")),
    Name(f"{_RELOAD}.layerwise", "get_layerwise_info", PROOF, ("layer",)),
    Name(f"{_RELOAD}.types:LayerReloadingInfo", "restore_metadata", PROOF),
)
"""What can be looked for before an engine is made."""

ON_CPU = (
    Name(
        "vllm.v1.attention.backends.cpu_attn:CPUAttentionMetadataBuilder",
        "build",
        SPLIT,
        ("self", "common_prefix_len", "common_attn_metadata", "fast_build"),
    ),
    *(
        Name(_ATTENTION, name, SPLIT)
        for name in (
            "num_reqs",
            "query_start_loc",
            "seq_lens",
            "block_table_tensor",
            "max_query_len",
            "causal",
        )
    ),
)
"""What is looked for besides where drafts are verified on a CPU."""

RUNNER = (
    Name(_RUNNER, "requests", SAMPLED),
    Name(_RUNNER, "input_batch.req_ids", SAMPLED),
    Name(_RUNNER, "input_batch.sampling_metadata", SAMPLED),
    Name(_RUNNER, "input_batch.num_tokens_no_spec", SAMPLED),
    Name(_RUNNER, "input_batch.token_ids_cpu", "penalties and bad words see no earlier tokens"),
    Name(_RUNNER, "kv_caches", "KV that is not finite cannot be cleared"),
)
"""What a model runner must have."""

DRAFTING = (
    Name(_RUNNER, "drafter.propose", "drafts are neither timed nor given up when they fail"),
    Name(_RUNNER, "num_spec_tokens", VERIFIED),
    Name(_RUNNER, "input_ids.np", VERIFIED),
    Name(
        _RUNNER,
        "effective_drafter_max_model_len",
        "a request near the length limit gives its whole batch drafts of zeros",
    ),
)
"""What a model runner with drafts must have besides."""

SCHEDULER = (
    Name(_SCHEDULER, "num_spec_tokens", PADDED),
    Name(_SCHEDULER, "dynamic_sd_lookup", PADDED),
    Name(_SCHEDULER, "max_num_running_reqs", PADDED),
    Name(_SCHEDULER, "connector", "KV is neither saved nor loaded"),
    Name(_SCHEDULER, "kv_cache_config.kv_cache_groups", "an instance cannot report what a token's KV takes"),
)
"""What a scheduler must have."""

LLM_ENGINE = (Name("vllm.v1.engine.llm_engine:LLMEngine", "output_processor.request_states", PIECES),)
"""What an engine must have."""

CONNECTOR = (
    Name(
        "vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorBase_V1",
        "_kv_cache_manager",
        "KV of preempted requests is not pooled",
    ),
)
"""What a scheduler's connector must have."""


def check_imports(*, on_cpu: bool) -> None:
    """Look for what vLLM's modules and classes must have.

    Raises:
        EngineError: this vLLM is not the one this backend was written for.
    """
    import vllm

    if not vllm.__version__.startswith(SUPPORTED_VLLM):
        raise EngineError(f"vLLM {vllm.__version__} is not {SUPPORTED_VLLM}*, on whose internals Seer relies")
    names = (*IMPORTED, *ON_CPU) if on_cpu else IMPORTED
    complain(ENGINE, (flaw for name in names if (flaw := flaw_of(name)) is not None))


def check_runner(runner: Any) -> None:
    """Look for what a model runner must have, and be.

    Raises:
        EngineError: it has it not, or something else would come between logits and keys.
    """
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    if not isinstance(runner, GPUModelRunner):
        raise EngineError(f"vLLM's model runner is {type(runner).__qualname__}, without keyed sampling")
    complain(ENGINE, lacking(runner, (*RUNNER, *DRAFTING) if hasattr(runner, "drafter") else RUNNER))
    for holds, fact in (
        (not getattr(runner, "use_async_scheduling", True), "async scheduling is on"),
        (not runner.model_config.logits_processors, "it would pass logits processors by"),
    ):
        if not holds:
            raise EngineError(f"keyed sampling cannot be installed: {fact}")


def check_engine(engine: Any) -> None:
    """Look for what an engine must have.

    Raises:
        EngineError: it has it not.
    """
    complain(ENGINE, lacking(engine, LLM_ENGINE))


def check_scheduler(scheduler: Any) -> None:
    """Look for what a scheduler must have.

    Raises:
        EngineError: it has it not.
    """
    complain(ENGINE, lacking(scheduler, SCHEDULER))
    if scheduler.connector is not None:
        complain(ENGINE, lacking(scheduler.connector, CONNECTOR))
