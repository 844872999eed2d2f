"""Every name inside vLLM that this backend relies on, checked when a worker starts.

vLLM promises none of them.  Each stands here with what breaks without it, so that another vLLM is refused
with one sentence, instead of giving a wrong token.  What is public (``LLMEngine``, ``SamplingParams``, a
connector's documented methods) is not repeated.
"""

from __future__ import annotations

from typing import Any

from seer_worker.process.names import Name, complain, flaw_of, lacking

from seer_core.errors import EngineError
from seer_vllm import SUPPORTED_VLLM, VERSIONS

__all__ = [
    "ADAPTERS",
    "CONNECTOR",
    "DRAFTING",
    "IMPORTED",
    "LLM_ENGINE",
    "ON_CPU",
    "PRELOADED",
    "ROUTING",
    "ROUTING_SCHEDULER",
    "RUNNER",
    "SCHEDULER",
    "SECOND_DRAFTING",
    "SECOND_IMPORTED",
    "SECOND_RUNNER",
    "Name",
    "check_adapters",
    "check_engine",
    "check_imports",
    "check_routing",
    "check_runner",
    "check_scheduler",
    "check_second_runner",
]


ENGINE = "vLLM"
RENDEZVOUS = "the file by which an engine's processes meet stays in the temporary directory"
SAMPLED = "tokens are not sampled by key"
ACCOUNT = "chunks come without an account of what they cost"
PROOF = "nothing proves that a layer answers by the weights just loaded"
UNROUTED = "responses have no routed experts"
SPLIT = "verifying short drafts on a CPU costs three times as much"
VERIFIED = "drafts are not verified by key"
EXPERTS = "a rank on a CPU takes its experts for all"
ROUNDING = "log-probs on a CPU depend on what else a step computes"
STATES = "the responses of gated delta nets on a CPU depend on the batch"
PIECES = "responses that stream come at the ends of chunks"
RAGGED = "the drafts of a step have no common length, and steps no full CUDA graph"
UNDRAFTED = "there are no drafts"
REPEATED = "each instance does again what one process could do for all"
PADDED = "a new request is padded with drafts of no meaning, beyond the end of its chunk"

_RUNNER = "vllm.v1.worker.gpu_model_runner:GPUModelRunner"
_SECOND = "vllm.v1.worker.gpu.model_runner:GPUModelRunner"
_SAMPLER = "vllm.v1.worker.gpu.sample.sampler:Sampler"
_VERIFIER = "vllm.v1.worker.gpu.spec_decode.rejection_sampler:RejectionSampler"
_SCHEDULER = "vllm.v1.core.sched.scheduler:Scheduler"
_DRAFTS = "vllm.v1.spec_decode.metadata:SpecDecodeMetadata"
_ATTENTION = "vllm.v1.attention.backend:CommonAttentionMetadata"
_DELTA_NETS = "vllm.model_executor.layers.mamba.ops.cpu.gdn_attention"
_POSITIONS = "vllm.v1.attention.backends.gdn_attn:GDNAttentionMetadata"
_LINEAR = "vllm.model_executor.layers.linear:UnquantizedLinearMethod"
_HEAD = "vllm.model_executor.layers.vocab_parallel_embedding:UnquantizedEmbeddingMethod"
_REGISTRY = "vllm.model_executor.models.registry"
_RELOAD = "vllm.model_executor.model_loader.reload"

IMPORTED = (
    Name("vllm.v1.executor.uniproc_executor", "get_file_store_init_method", RENDEZVOUS, ()),
    Name("vllm.v1.executor.multiproc_executor", "get_file_store_init_method", RENDEZVOUS, ()),
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
    Name(_SCHEDULER, "update_draft_token_ids", RAGGED, ("self", "draft_token_ids")),
    Name(
        _SCHEDULER,
        "_preempt_request",
        "no chunk ends early, and KV of preempted requests is not pooled",
        ("self", "request"),
    ),
    Name("vllm.config:VllmConfig", "use_v2_model_runner", "steps are planned ahead that cannot be"),
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
    Name(f"{_RELOAD}.layerwise", "get_numel_loaded", PROOF, ("weight_loader", "args")),
    Name(f"{_RELOAD}.layerwise", "make_online_process_loader", PROOF, ("layer", "param_name")),
    Name(f"{_RELOAD}.types:LayerReloadingInfo", "can_load", PROOF, ("self",)),
    Name(f"{_RELOAD}.meta", "SKIP_TENSORS", PROOF),
    Name("vllm.model_executor.layers.attention", "is_deferred_attention_layer", PROOF, ("layer",)),
    Name(
        "vllm.model_executor.layers.attention_layer_base:AttentionLayerBase",
        "get_attn_backend",
        "instances share KV of another order",
        ("self",),
    ),
)
"""What can be looked for before an engine is made."""


def kv_check() -> Name:
    """Return the name of the function by which this vLLM refuses too little KV memory."""
    import vllm

    return Name(
        f"vllm.v1.core.kv_cache_{'utils' if vllm.__version__.startswith('0.32.') else 'planning'}",
        "_check_enough_kv_cache_memory",
        "too little KV memory is reported in tenths of GiB",
        ("available_memory", "get_needed_memory", "max_model_len", "estimate_max_model_len"),
    )


PRELOADED = (
    Name("vllm.logger", "configure_logging_if_needed", REPEATED, ("config",)),
    Name("vllm.config.logging", "LoggingConfig", REPEATED),
    Name("vllm.platforms.interface:Platform", "register_triton_kernel_overrides", REPEATED, ()),
    Name(f"{_REGISTRY}:_ModelRegistry", "models", REPEATED),
    Name(f"{_REGISTRY}:_ModelRegistry", "register_model", REPEATED, ("self", "model_arch", "model_cls")),
    Name(f"{_REGISTRY}:_LazyRegisteredModel", "load_model_cls", REPEATED, ("self",)),
    Name("vllm.plugins", "load_general_plugins", REPEATED, ()),
)
"""What can be done once for all instances that are forked from one process."""


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
    Name(
        _DELTA_NETS,
        "_cpu_gdn_attention_nonspec",
        STATES,
        ("layer", "attn_metadata_i", "mixed_qkv", "b", "a", "core_attn_out"),
    ),
    Name(_DELTA_NETS, "is_arm_bf16", STATES, ()),
    Name("torch.cpu", "_is_avx512_bf16_supported", STATES, ()),
    Name("torch.cpu", "_is_amx_tile_supported", ROUNDING, ()),
    Name("vllm.envs", "VLLM_CPU_ATTN_SPLIT_KV", ROUNDING),
    Name(
        "vllm._custom_ops",
        "fused_sigmoid_gating_delta_rule_update_spec_cpu",
        STATES,
        (
            "A_log",
            "dt_bias",
            "q",
            "k",
            "v",
            "a",
            "b",
            "initial_state_source",
            "spec_state_indices",
            "num_accepted_tokens",
            "cu_seqlens",
            "use_qk_l2norm_in_kernel",
        ),
    ),
    *(
        Name(_POSITIONS, name, STATES)
        for name in (
            "num_decodes",
            "num_decode_tokens",
            "num_prefills",
            "num_prefill_tokens",
            "has_initial_state",
            "non_spec_state_indices_tensor",
            "non_spec_query_start_loc",
        )
    ),
    Name(
        "vllm.model_executor.layers.fused_moe.experts.cpu_moe:CPUUnquantizedExperts",
        "apply",
        EXPERTS,
        (
            "self",
            "output",
            "hidden_states",
            "w1",
            "w2",
            "topk_weights",
            "topk_ids",
            "activation",
            "global_num_experts",
            "expert_map",
        ),
    ),
)
"""What is looked for besides on a CPU."""

RUNNER = (
    Name(_RUNNER, "requests", SAMPLED),
    Name(_RUNNER, "input_batch.req_ids", SAMPLED),
    Name(_RUNNER, "input_batch.sampling_metadata", SAMPLED),
    Name(_RUNNER, "input_batch.num_tokens_no_spec", SAMPLED),
    Name(_RUNNER, "input_batch.token_ids_cpu", "penalties and bad words see no earlier tokens"),
    Name(_RUNNER, "input_batch.generators", "a server on a CPU dies of seeds where prefill takes steps"),
    Name(_RUNNER, "kv_caches", "KV that is not finite cannot be cleared"),
)
"""What the first model runner must have."""

DRAFTING = (
    Name(_RUNNER, "drafter.propose", "drafts are neither timed nor given up when they fail"),
    Name(_RUNNER, "num_spec_tokens", VERIFIED),
    Name(_RUNNER, "input_ids.np", VERIFIED),
    Name(_RUNNER, "_dummy_run", "steps of servers with drafts are not measured"),
    Name(
        _RUNNER,
        "effective_drafter_max_model_len",
        "a request near the length limit gives its whole batch drafts of zeros",
    ),
)
"""What the first model runner must have besides, with drafts."""

SECOND_IMPORTED = (
    Name(_SAMPLER, "add_request", SAMPLED, ("self", "req_idx", "sampling_params")),
    Name(
        _SAMPLER,
        "sample",
        SAMPLED,
        (
            "self",
            "logits",
            "expanded_idx_mapping",
            "idx_mapping",
            "idx_mapping_np",
            "pos",
            "input_ids",
            "expanded_local_pos",
            "seq_lens_upper_bound_np",
            "return_logprobs",
        ),
    ),
    Name(
        _VERIFIER,
        "_verify",
        VERIFIED,
        (
            "self",
            "logits",
            "draft_logits",
            "draft_sampled",
            "pos",
            "cu_num_logits",
            "idx_mapping",
            "idx_mapping_np",
            "expanded_idx_mapping",
            "expanded_local_pos",
            "seq_lens_upper_bound_np",
            "verify_draft_sampled",
        ),
    ),
    Name(_SECOND, "take_draft_token_ids", UNDRAFTED, ("self",)),
    Name("vllm.v1.outputs:DraftTokenIds", "draft_token_ids", UNDRAFTED),
    Name(
        "vllm.v1.worker.gpu.spec_decode.speculator:BaseSpeculator",
        "propose",
        UNDRAFTED,
        (
            "self",
            "input_batch",
            "attn_metadata",
            "slot_mappings",
            "last_hidden_states",
            "aux_hidden_states",
            "num_sampled",
        ),
    ),
)
"""What can be looked for in classes of the second model runner; on a CPU they are imported only with it."""

SECOND_RUNNER = (
    *(
        Name(_SECOND, f"sampler.sampling_states.{name}", SAMPLED)
        for name in (
            "seeds.np",
            "seeds.gpu",
            "temperature.np",
            "temperature.gpu",
            "top_k.np",
            "top_k.gpu",
            "top_p.np",
            "top_p.gpu",
            "min_p.np",
            "min_p.gpu",
            "vocab_size",
        )
    ),
    Name(_SECOND, "req_states.all_token_ids.gpu", "penalties and bad words see no earlier tokens"),
    Name(_SECOND, "num_speculative_steps", VERIFIED),
    Name(_SECOND, "rejection_sampler", VERIFIED),
    Name(_SECOND, "speculator", UNDRAFTED),
    Name(_SECOND, "kv_caches", "KV that is not finite cannot be cleared"),
)
"""What the second model runner must have."""

SECOND_DRAFTING = (
    Name(_SECOND, "speculator.num_query_per_req", UNDRAFTED),
    Name(_SECOND, "speculator.num_extra_query_per_req", UNDRAFTED),
    Name(_SECOND, "speculator.supports_mm_inputs", UNDRAFTED),
    Name(_SECOND, "speculator.draft_logits", UNDRAFTED),
    Name(_SECOND, "req_states.total_len.gpu", UNDRAFTED),
)
"""What the second model runner must have besides, with drafts."""

_CAPTURER = "aux_output_connector._capturer"
ROUTING = (
    *(
        Name(_SECOND, f"{_CAPTURER}.{name}", UNROUTED)
        for name in ("shape_per_token", "output_dtype_name", "snapshot_routing_data")
    ),
    Name(_SECOND, "block_tables.slot_mappings", UNROUTED),
    Name(_SECOND, "kv_cache_config.num_blocks", UNROUTED),
)
"""What the second model runner must have besides, where the experts of responses are wanted."""

ROUTING_SCHEDULER = tuple(
    Name(_SCHEDULER, name, UNROUTED) for name in ("aux_output_connector", "kv_cache_manager.get_block_ids")
)
"""What a scheduler must have there."""

SCHEDULER = (
    Name(_SCHEDULER, "num_spec_tokens", PADDED),
    Name(_SCHEDULER, "dynamic_sd_lookup", PADDED),
    Name(_SCHEDULER, "max_num_running_reqs", PADDED),
    Name(_SCHEDULER, "connector", "KV is neither saved nor loaded"),
    Name(_SCHEDULER, "kv_cache_config.kv_cache_groups", "an instance cannot report what a token's KV takes"),
)
"""What a scheduler must have."""

_ENGINE = "vllm.v1.engine.llm_engine:LLMEngine"
LLM_ENGINE = (
    Name(_ENGINE, "output_processor.request_states", PIECES),
    Name(_ENGINE, "engine_core.engine_core.batch_queue", "an idle engine may still be computing a step"),
    Name(
        _ENGINE,
        "engine_core.engine_core.model_executor.register_failure_callback",
        "an idle instance does not notice that a rank has ended",
    ),
)
"""What an engine must have."""

ADAPTERS = tuple(
    Name("vllm.lora.worker_manager:WorkerLoRAManager", f"_adapter_manager.{name}", "no adapter is loaded")
    for name in ("modules", "packed_modules", "model", "add_adapter", "activate_adapter")
)
"""What the keeper of adapters beside the model must have."""

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
        raise EngineError(f"vLLM {vllm.__version__} is not {VERSIONS}, on whose internals Seer relies")
    names = (*IMPORTED, kv_check(), *(ON_CPU if on_cpu else ()))
    complain(ENGINE, (flaw for name in names if (flaw := flaw_of(name)) is not None))


def check_runner(runner: Any) -> None:
    """Look for what vLLM's first model runner must have, and be.

    Raises:
        EngineError: it has it not, or something else would come between logits and keys.
    """
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    _check_kind(runner, GPUModelRunner)
    complain(ENGINE, lacking(runner, (*RUNNER, *DRAFTING) if hasattr(runner, "drafter") else RUNNER))
    _refuse_between(runner)


def check_second_runner(runner: Any) -> None:
    """Look for what vLLM's second model runner must have, and be.

    Raises:
        EngineError: it has it not, or something else would come between logits and keys.
    """
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner
    from vllm.v1.worker.gpu.sample.sampler import Sampler
    from vllm.v1.worker.gpu.spec_decode.rejection_sampler import RejectionSampler

    _check_kind(runner, GPUModelRunner)
    complain(ENGINE, (flaw for name in SECOND_IMPORTED if (flaw := flaw_of(name)) is not None))
    complain(ENGINE, lacking(runner, SECOND_RUNNER))
    if runner.speculator is not None:
        complain(ENGINE, lacking(runner, SECOND_DRAFTING))
    _refuse_between(runner)
    for part, kind in ((runner.sampler, Sampler), (runner.rejection_sampler, RejectionSampler)):
        if part is not None and type(part) is not kind:
            raise EngineError(f"keyed sampling cannot take the place of {type(part).__qualname__}")


def _check_kind(runner: Any, kind: type) -> None:
    if not isinstance(runner, kind):
        raise EngineError(f"vLLM's model runner is {type(runner).__qualname__}, without keyed sampling")


def _refuse_between(runner: Any) -> None:
    if runner.model_config.logits_processors:
        raise EngineError("keyed sampling cannot be installed: it would pass logits processors by")


def check_routing(runner: Any) -> None:
    """Look for what the second model runner must have where the experts of responses are wanted.

    Raises:
        EngineError: it has it not.
    """
    complain(ENGINE, lacking(runner, ROUTING))


def check_engine(engine: Any) -> None:
    """Look for what an engine must have.

    Raises:
        EngineError: it has it not.
    """
    complain(ENGINE, lacking(engine, LLM_ENGINE))


def check_adapters(manager: Any) -> None:
    """Look for what the keeper of adapters must have.

    Raises:
        EngineError: it has it not.
    """
    complain(ENGINE, lacking(manager, ADAPTERS))


def check_scheduler(scheduler: Any, *, routing: bool = False) -> None:
    """Look for what a scheduler must have, also for the experts of responses.

    Raises:
        EngineError: it has it not.
    """
    complain(ENGINE, lacking(scheduler, (*SCHEDULER, *ROUTING_SCHEDULER) if routing else SCHEDULER))
    if scheduler.connector is not None:
        complain(ENGINE, lacking(scheduler.connector, CONNECTOR))
