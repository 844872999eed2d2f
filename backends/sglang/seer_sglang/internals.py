"""Every name inside SGLang 0.5.23 that this backend relies on, checked when a worker starts.

SGLang promises none of them: what it documents are a server and an ``InstanceClient``, both of which keep the
scheduler in another process.  Each stands here with what breaks without it, so that another SGLang is refused
with one sentence.
"""

from __future__ import annotations

import os
from importlib.metadata import version
from pathlib import Path
from typing import Any

from seer_worker.process.names import Name, complain, flaw_of, lacking

from seer_core.errors import EngineError
from seer_sglang import SUPPORTED_SGLANG
from seer_sglang.doctor import GPU_SETUP, SETUP

__all__ = ["IMPORTED", "SCHEDULER", "check_imports", "check_kernels", "check_scheduler"]

ENGINE = "SGLang"
DEVICES = (Path("/dev/nvidiactl"), Path("/dev/kfd"))
"""There where a driver of NVIDIA's or AMD's is."""

LOOP = "the scheduler cannot be driven step by step"
QUEUED = "no chunk can be given to the scheduler"
ENDED = "chunks do not come back"
SAMPLED = "tokens are not sampled by key"
ACCOUNT = "chunks come without an account of what they cost"
WEIGHTS = "new weights cannot be loaded"
VERIFIED = "drafts are not verified by key"
SPREAD = "a rank on a CPU cannot compute its experts alone"
COMPILED = "instances of several ranks compile a kernel at each start"
TREES = "trees of drafts have no attention on a CPU"
RETRACTED = "drafts take KV memory that chunks were promised, which are put back then"
ASLEEP = "an instance asleep gives no memory of a GPU back"
POOLED = "an instance cannot share KV"
PROMPTS = "the log-probs of prompts are not there"
SEEN = "models do not see the images of prompts"
CAPACITY = "an instance cannot report what it holds"
ROUTED = "the experts of tokens are not there"

_SCHEDULER = "sglang.srt.managers.scheduler:Scheduler"
_REQ = "sglang.srt.managers.schedule_batch:Req"
_BATCH = "sglang.srt.managers.schedule_batch:ScheduleBatch"
_STREAMER = "sglang.srt.managers.scheduler_components.output_streamer:SchedulerOutputStreamer"
_CHANNELS = "sglang.srt.managers.scheduler_components.ipc_channels:SchedulerIpcChannels"
_CONFIG = "sglang.srt.configs.model_config:ModelConfig"
_CACHE = "sglang.srt.mem_cache.unified_radix_cache:UnifiedRadixCache"
_PARAMS = "sglang.srt.mem_cache.base_prefix_cache"
_POOLS = "sglang.srt.mem_cache.memory_pool"
_BATCHES = "sglang.srt.managers.schedule_batch"
_VISION = "sglang.srt.layers.attention.vision"
_WORKER = "sglang.srt.speculative.ngram_worker:NGRAMWorker"

IMPORTED = (
    Name("sglang.srt.runtime_context", "publish", LOOP, ("server_args", "role", "hf_config", "ranks")),
    Name("sglang.srt.runtime_context:SpawnRanks", "world_rank", LOOP),
    Name(_SCHEDULER, "init_ipc_channels", LOOP, ("self", "port_args")),
    Name(_SCHEDULER, "get_next_batch_to_run", LOOP, ("self", "running_batch", "last_batch")),
    Name(_SCHEDULER, "run_batch", LOOP, ("self", "batch")),
    Name(_SCHEDULER, "process_batch_result", LOOP, ("self", "batch", "result")),
    Name(_SCHEDULER, "is_fully_idle", LOOP, ("self",)),
    Name(_SCHEDULER, "flush_cache", "cached KV cannot be forgotten", ("self",)),
    Name(_SCHEDULER, "_add_request_to_queue", QUEUED, ("self", "req", "is_retracted")),
    Name(_SCHEDULER, "abort_request", "chunks cannot be dropped", ("self", "recv_req")),
    Name(_SCHEDULER, "get_output_streamer_class", ENDED, ("self",)),
    Name(_SCHEDULER, "send_abort_output", ENDED, ("self", "abort_req", "req")),
    Name(_STREAMER, "stream_output", ENDED, ("self", "reqs", "return_logprob", "skip_req")),
    Name(_CHANNELS, "send_to_detokenizer", ENDED),
    Name(_CHANNELS, "recv_from_tokenizer", LOOP),
    Name("sglang.srt.managers.scheduler_components.output_sender:SenderWrapper", "send_output", LOOP),
    Name(_REQ, "output_ids_through_stop", ENDED),
    Name(_REQ, "finished", ENDED, ("self",)),
    *(
        Name("sglang.srt.managers.schedule_batch:ReqLogprob", name, PROMPTS)
        for name in (
            "top_logprobs_num",
            "input_token_logprobs_val",
            "input_top_logprobs_val",
            "input_top_logprobs_idx",
        )
    ),
    Name(_BATCH, "return_logprob", PROMPTS),
    Name(_BATCH, "extend_logprob_start_lens", PROMPTS),
    Name(_BATCH, "extend_input_logprob_token_ids", PROMPTS),
    Name("sglang.srt.managers.schedule_batch:FINISH_MATCHED_TOKEN", "to_json", ENDED),
    Name("sglang.srt.managers.schedule_batch:FINISH_LENGTH", "to_json", ENDED),
    Name(_BATCH, "extend_lens", ACCOUNT),
    Name(_BATCH, "forward_mode", ACCOUNT),
    Name(
        "sglang.srt.layers.sampler:Sampler",
        "forward",
        SAMPLED,
        (
            "self",
            "logits_output",
            "sampling_info",
            "return_logprob",
            "top_logprobs_nums",
            "token_ids_logprobs",
            "positions",
        ),
    ),
    Name("sglang.srt.model_executor.model_runner:ModelRunner", "sample", SAMPLED, ("self", "logits_output")),
    Name(_CONFIG, "from_server_args", CAPACITY),
    Name(_CONFIG, "get_num_kv_heads", CAPACITY, ("self", "tensor_parallel_size")),
    *(
        Name(_WORKER, name, VERIFIED, takes)
        for name, takes in (
            ("forward_batch_generation", ("self", "batch")),
            ("_prepare_for_speculative_decoding", ("self", "batch")),
            ("_prepare_draft_tokens", ("self", "batch")),
        )
    ),
    *(
        Name("sglang.srt.speculative.ngram_worker", name, VERIFIED)
        for name in ("eagle_sample", "NgramCorpus")
    ),
    *(
        Name(module, "get_alloc_reserve_per_decode", RETRACTED, ())
        for module in ("sglang.srt.managers.schedule_batch", "sglang.srt.speculative.eagle_utils")
    ),
    Name(
        "sglang.srt.layers.attention.torch_native_backend:TorchNativeAttnBackend",
        "forward_extend",
        TREES,
        ("self", "q", "k", "v", "layer", "forward_batch", "save_kv_cache"),
    ),
    Name(
        "sglang.srt.layers.vocab_parallel_embedding",
        "get_masked_input_and_mask",
        COMPILED,
        (
            "input_",
            "org_vocab_start_index",
            "org_vocab_end_index",
            "num_org_vocab_padding",
            "added_vocab_start_index",
            "added_vocab_end_index",
        ),
    ),
    Name(
        "sglang.srt.layers.moe.fused_moe_native",
        "moe_forward_native",
        SPREAD,
        ("layer", "x", "topk_output", "moe_runner_config"),
    ),
    *(
        Name("sglang.srt.model_loader.loader:DefaultModelLoader", name, WEIGHTS, takes)
        for name, takes in (
            ("restore_weights_before_loading", ("model", "target_device")),
            ("load_weights_only", ("model", "weights", "target_device")),
            ("postprocess_weights", ("model", "target_device")),
        )
    ),
    Name("sglang.srt.model_loader.utils", "set_default_torch_dtype", WEIGHTS, ("dtype",)),
    Name("sglang.srt.managers.io_struct:ReleaseMemoryOccupationReqInput", "tags", ASLEEP),
    Name("sglang.srt.managers.io_struct:ResumeMemoryOccupationReqInput", "tags", ASLEEP),
    Name("sglang.srt.constants", "GPU_MEMORY_TYPE_KV_CACHE", ASLEEP),
    Name("sglang.srt.constants", "GPU_MEMORY_TYPE_WEIGHTS", ASLEEP),
    *(
        Name("sglang.srt.mem_cache.registry", name, POOLED, takes)
        for name, takes in (
            ("register_radix_cache_backend", ("name", "factory")),
            ("get_radix_cache_factory", ("name",)),
            ("create_unified_radix_cache", ("ctx", "cache_class")),
        )
    ),
    *(
        Name(_CACHE, name, POOLED, takes)
        for name, takes in (
            ("match_prefix", ("self", "params")),
            ("init_load_back", ("self", "params")),
            ("load_back_is_cache_owned", ("self",)),
            ("claim_kv_row", ("self", "req")),
            ("prefix_device_indices", ("self", "req")),
            ("insert", ("self", "params")),
        )
    ),
    *(
        Name(f"{_PARAMS}:{kind}", name, POOLED)
        for kind, name in (
            ("MatchPrefixParams", "req"),
            ("MatchResult", "_replace"),
            ("MatchResult", "device_prefix_len"),
            ("MatchResult", "host_hit_length"),
            ("InitLoadBackParams", "host_hit_length"),
            ("InsertParams", "prev_prefix_len"),
            ("InsertResult", "last_device_node"),
        )
    ),
    Name("sglang.srt.mem_cache.common", "evict_from_tree_cache", POOLED, ("tree_cache", "num_tokens")),
    Name(
        "sglang.srt.mem_cache.radix_cache",
        "RadixKey",
        POOLED,
        ("token_ids", "extra_key", "is_bigram", "limit", "cache_salt"),
    ),
    Name(_SCHEDULER, "get_prefill_adder_class", POOLED, ("self",)),
    Name(
        "sglang.srt.managers.schedule_policy:PrefillAdder",
        "add_one_req",
        POOLED,
        ("self", "req", "has_chunked_req", "truncation_align_size"),
    ),
    Name("sglang.srt.managers.schedule_policy:AddReqResult", "CONTINUE", POOLED),
    Name(_REQ, "owned_kv_len", POOLED, ("self",)),
    Name("sglang.srt.managers.schedule_batch", "release_req", ROUTED),
    *(
        Name(f"{_POOLS}:{pool}", "move_kv_cache", ROUTED, ("self", "tgt_loc", "src_loc"))
        for pool in ("MHATokenToKVPool", "MLATokenToKVPool")
    ),
    Name("sglang.srt.mem_cache.pool_host.common", "ALLOC_MEMORY_FUNCS", ROUTED),
    Name("sglang.srt.state_capturer.routed_experts", "get_global_experts_capturer", ROUTED, ()),
    Name(
        "sglang.srt.state_capturer.routed_experts:RoutedExpertsCapturer",
        "get_topk",
        ROUTED,
        ("self", "req_pool_idx", "seqlen", "req_to_token_pool", "start_len"),
    ),
    Name(f"{_BATCHES}:Modality", "IMAGE", SEEN),
    Name(f"{_BATCHES}:MultimodalDataItem", "set_identity", SEEN, ("self", "identity")),
    Name(f"{_BATCHES}:MultimodalInputs", "mrope_positions", SEEN),
    Name(f"{_BATCHES}:MultimodalInputs", "mrope_position_delta", SEEN),
    Name(f"{_BATCHES}:MultimodalProcessorOutput", "build_padded_input_ids", SEEN, ("input_ids", "mm_items")),
    Name("sglang.srt.managers.mm_schedule", "embedding_cache", SEEN),
    Name(_VISION, "apply_rotary_pos_emb", SEEN),
    Name(_VISION, "apply_rotary_pos_emb_native_eager", SEEN),
    Name("sglang.srt.managers.schedule_batch:ReqKvInfo", "kv_committed_len", POOLED),
    Name("sglang.srt.managers.schedule_batch:ReqKvInfo", "holds_kv", POOLED),
    Name(f"{_POOLS}:MHATokenToKVPool", "get_kv_buffer", POOLED, ("self", "layer_id")),
    Name(f"{_POOLS}:MLATokenToKVPool", "get_kv_buffer", POOLED, ("self", "layer_id")),
)
"""What can be looked for before an engine is made."""

SCHEDULER = (
    Name(_SCHEDULER, "tp_worker.model_runner.sampler", SAMPLED),
    Name(_SCHEDULER, "tp_worker.model_runner.model", WEIGHTS),
    Name(_SCHEDULER, "model_config.context_len", CAPACITY),
    Name(_SCHEDULER, "running_batch", LOOP),
    Name(_SCHEDULER, "last_batch", LOOP),
    Name(_SCHEDULER, "waiting_queue", "an instance cannot report its load"),
    Name(_SCHEDULER, "pool_stats_observer.get_pool_stats", "an instance cannot report its load"),
    Name(_SCHEDULER, "max_total_num_tokens", CAPACITY),
    Name(_SCHEDULER, "max_running_requests", CAPACITY),
    Name(_SCHEDULER, "page_size", CAPACITY),
    Name(_SCHEDULER, "chunked_prefill_size", CAPACITY),
    Name(_SCHEDULER, "max_prefill_tokens", CAPACITY),
    Name(_SCHEDULER, "token_to_kv_pool_allocator.get_kvcache", CAPACITY),
    Name(_SCHEDULER, "token_to_kv_pool_allocator.available_size", RETRACTED),
    Name(_SCHEDULER, "token_to_kv_pool_allocator.free", RETRACTED),
    Name(_SCHEDULER, "tree_cache.full_evictable_size", RETRACTED),
    Name(_SCHEDULER, "device", ASLEEP),
    Name(_SCHEDULER, "weight_updater.release_memory_occupation", ASLEEP),
    Name(_SCHEDULER, "weight_updater.resume_memory_occupation", ASLEEP),
    Name(_SCHEDULER, "server_args.enable_memory_saver", ASLEEP),
    Name(_SCHEDULER, "server_args.enable_weights_cpu_backup", ASLEEP),
    Name(_SCHEDULER, "tree_cache.req_to_token_pool.req_to_token", POOLED),
    Name(_SCHEDULER, "tree_cache.token_to_kv_pool_allocator.alloc", POOLED),
)
"""What a scheduler must have."""


def check_kernels() -> bool:
    """Import SGLang's kernels, or what stands in for them, before SGLang does.

    Returns whether there is no GPU.

    Raises:
        EngineError: there are none, or they are not for this machine.
    """
    try:
        import sgl_kernel
    except ImportError as error:
        raise EngineError(f"SGLang's kernels cannot be imported: {error}; {SETUP}") from error
    if not getattr(sgl_kernel, "STAND_IN", False):
        return False
    device = next((str(device) for device in DEVICES if device.exists()), None)
    if device is not None:
        raise EngineError(
            f"there is a GPU ({device}), and the stand-in for machines without one where SGLang's kernels"
            f" should be: pip uninstall seer-sgl-kernel-standin; {GPU_SETUP}"
        )
    os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
    return True


def check_imports() -> None:
    """Look for what SGLang's modules and classes must have.

    Raises:
        EngineError: this SGLang is not the one this backend was written for.
    """
    found = version("sglang")
    if found != SUPPORTED_SGLANG:
        raise EngineError(f"SGLang {found} is not {SUPPORTED_SGLANG}, on whose internals Seer relies")
    complain(ENGINE, (flaw for name in IMPORTED if (flaw := flaw_of(name)) is not None))


def check_scheduler(scheduler: Any, *, drafts: bool = False) -> None:
    """Look for what a scheduler must have, and be.

    Raises:
        EngineError: it has it not, or something would come between logits and keys.
    """
    complain(ENGINE, lacking(scheduler, SCHEDULER))
    for holds, fact in (
        (not scheduler.enable_overlap, "the overlap schedule is on"),
        (drafts or scheduler.spec_algorithm.is_none(), "SGLang speculates"),
    ):
        if not holds:
            raise EngineError(f"keyed sampling cannot be installed: {fact}")
