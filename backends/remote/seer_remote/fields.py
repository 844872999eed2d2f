"""Which fields of vLLM's and SGLang's requests hold over a response's chunks, each of which is a request.

Each field that the engines have is decided on here.  One that is not is sent with the whole response, in one
request; tests compare the tables with the engines' own classes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

__all__ = ["SGLANG", "SGLANG_SAMPLING", "VLLM", "VLLM_SAMPLING", "Way", "divided", "holding"]

Way = Literal["chunks", "whole", "translated", "seer", "refused"]
"""What becomes of a field: it goes with each ``chunks``, since it depends on a token and those before it, or
on the prompt; it holds within one request, so the response is ``whole``; it is ``translated`` for each chunk;
``seer`` sends it itself; or it is ``refused``, for the answer would read otherwise.
"""

VLLM_SAMPLING: Mapping[str, Way] = {
    "n": "refused",
    "presence_penalty": "whole",
    "frequency_penalty": "whole",
    "repetition_penalty": "chunks",
    "temperature": "chunks",
    "watermarking": "whole",
    "top_p": "chunks",
    "top_k": "chunks",
    "min_p": "chunks",
    "seed": "seer",
    "stop": "whole",
    "stop_token_ids": "chunks",
    "ignore_eos": "chunks",
    "max_tokens": "seer",
    "min_tokens": "translated",
    "logprobs": "seer",
    "prompt_logprobs": "whole",
    "prompt_logprob_token_ids": "whole",
    "prompt_logprob_start": "whole",
    "logprob_token_ids": "whole",
    "flat_logprobs": "chunks",
    "detokenize": "chunks",
    "skip_special_tokens": "chunks",
    "spaces_between_special_tokens": "chunks",
    "include_stop_str_in_output": "chunks",
    "output_kind": "refused",
    "stream_interval": "chunks",
    "skip_clone": "chunks",
    "structured_outputs": "whole",
    "logit_bias": "chunks",
    "allowed_token_ids": "chunks",
    "extra_args": "whole",
    "bad_words": "whole",
    "skip_reading_prefix_cache": "chunks",
    "thinking_token_budget": "whole",
    "repetition_detection": "whole",
    "routed_experts_prompt_start": "whole",
    "trace_decode_token_ids": "whole",
}
"""vLLM's ``SamplingParams``, but for what it sets itself.  Penalties count what a request has written.
``bad_words`` are looked for in that alone, and one that begins in a chunk and ends in the next is missed.
"""

VLLM: Mapping[str, Way] = {
    "token_offsets": "whole",
    "features": "chunks",
    "content_parts": "chunks",
    "model": "chunks",
    "reasoning_ended": "whole",
    "reasoning_parser_kwargs": "whole",
    "return_token_ids": "chunks",
    "session_id": "chunks",
    "user": "chunks",
    "priority": "chunks",
    "cache_salt": "translated",
    "kv_transfer_params": "whole",
    "ec_transfer_params": "whole",
    "request_id": "seer",
    "token_ids": "seer",
    "sampling_params": "seer",
    "output_mode": "refused",
    "stream": "refused",
    "stream_options": "refused",
}
"""vLLM's ``GenerateRequest``, and two fields of its completions."""

SGLANG_SAMPLING: Mapping[str, Way] = {
    "max_new_tokens": "seer",
    "stop": "whole",
    "stop_token_ids": "chunks",
    "stop_regex": "whole",
    "temperature": "chunks",
    "top_p": "chunks",
    "top_k": "chunks",
    "min_p": "chunks",
    "frequency_penalty": "whole",
    "presence_penalty": "whole",
    "repetition_penalty": "whole",
    "min_new_tokens": "translated",
    "n": "refused",
    "beam_width": "refused",
    "json_schema": "whole",
    "regex": "whole",
    "ebnf": "whole",
    "structural_tag": "whole",
    "ignore_eos": "chunks",
    "skip_special_tokens": "chunks",
    "spaces_between_special_tokens": "chunks",
    "no_stop_trim": "chunks",
    "stream_interval": "chunks",
    "logit_bias": "chunks",
    "sampling_seed": "seer",
    "custom_params": "whole",
    "watermark": "whole",
}
"""SGLang's ``SamplingParams``, but for what it sets itself.  Its repetition penalty, unlike vLLM's, counts
what a request has written, without the prompt.
"""

SGLANG: Mapping[str, Way] = {
    "modalities": "chunks",
    "mm_hashes": "chunks",
    "mm_content_hashes": "chunks",
    "use_audio_in_video": "chunks",
    "video_config": "chunks",
    "lora_path": "chunks",
    "lora_id": "chunks",
    "priority": "chunks",
    "extra_key": "translated",
    "routing_key": "chunks",
    "conversation_id": "chunks",
    "session_id": "chunks",
    "no_logs": "chunks",
    "custom_labels": "chunks",
    "log_metrics": "chunks",
    "return_routed_experts": "chunks",
    "return_text_in_logprobs": "chunks",
}
"""Those of SGLang's ``GenerateReqInput`` that do not make a response whole.  Images, videos and sounds do:
of most models SGLang turns the token ids beside them into text and that into tokens again, and those of what
a response has written may be others then.
"""


def divided(fields: Mapping[str, Way], sampling: Mapping[str, Way]) -> tuple[str, ...]:
    """Return the attachments, fields of requests, under which responses are divided.

    Those that Seer sends itself are refused by name where a chunk is sent.
    """
    own = [name for name, way in fields.items() if way in ("chunks", "translated")]
    return (*own, *(f"sampling_params.{name}" for name in holding(sampling)))


def holding(sampling: Mapping[str, Way]) -> list[str]:
    """Return the sampling parameters that hold over chunks as they are."""
    return [name for name, way in sampling.items() if way == "chunks"]
