"""Collects the fields of requests that clients, and vLLM's server, have; the result is client_fields.json.

    .venv-clients/bin/python serving/server/tests/client_fields.py
    .venv/bin/python serving/server/tests/client_fields.py

Either environment renews the lists of what it has.  The fields of Codex stand here: it is no Python.
"""

import json
import os
import sys
from importlib.metadata import packages_distributions, version
from pathlib import Path

os.environ |= {"HF_HUB_OFFLINE": "1", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}

STORED = Path(__file__).with_suffix(".json")

CODEX = (
    *("client_metadata", "include", "input", "instructions", "model", "parallel_tool_calls"),
    *("prompt_cache_key", "reasoning", "service_tier", "store", "stream", "text", "tool_choice", "tools"),
)
"""The fields of ``ResponsesApiRequest`` of Codex 0.9x, in ``codex-rs/codex-api/src/common.rs``."""

OF_LITELLM = {"extra_headers", "max_retries"}
"""These are for litellm itself, and not sent."""


def openai():
    """Return the fields of OpenAI's own client."""
    from openai.types import completion_create_params as completions
    from openai.types.chat import completion_create_params as chats
    from openai.types.chat.chat_completion_stream_options_param import ChatCompletionStreamOptionsParam
    from openai.types.responses import response_create_params as responses

    return {
        "chats": {*chats.CompletionCreateParamsBase.__annotations__, "stream"},
        "completions": {*completions.CompletionCreateParamsBase.__annotations__, "stream"},
        "responses": {*responses.ResponseCreateParamsBase.__annotations__, "stream"},
        "stream_options": set(ChatCompletionStreamOptionsParam.__annotations__),
    }


def litellm():
    """Return the fields that litellm passes on to a server like vLLM's, and to OpenAI's."""
    from litellm import get_supported_openai_params as supported

    providers = {"chats": ("hosted_vllm", "openai"), "completions": ("text-completion-openai",)}
    return {
        path: {name for each in named for name in supported(model="seer", custom_llm_provider=each) or ()}
        - OF_LITELLM
        for path, named in providers.items()
    }


def inspect_ai():
    """Return the fields of a request by inspect that has all of its settings."""
    from inspect_ai.model import GenerateConfig, ResponseSchema
    from inspect_ai.model._openai import openai_completion_params
    from inspect_ai.util import JSONSchema

    given = dict.fromkeys(("max_tokens", "seed", "num_choices", "top_logprobs", "prompt_logprobs"), 1)
    given |= dict.fromkeys(("frequency_penalty", "presence_penalty", "temperature", "top_p"), 1.0)
    given |= {"stop_seqs": ["a"], "logit_bias": {1: 1.0}, "logprobs": True, "parallel_tool_calls": True}
    given |= {
        "reasoning_effort": "low",
        "response_schema": ResponseSchema(name="a", json_schema=JSONSchema()),
    }
    params = openai_completion_params("seer", GenerateConfig(**given), tools=True)
    return {"chats": {*params, *params.pop("extra_body", ()), "messages"} - {"extra_body"}}


def lm_eval():
    """Return the fields of lm-eval's requests."""
    from lm_eval.models.openai_completions import LocalChatCompletion, LocalCompletionsAPI

    class Named:
        model, _max_gen_toks = "seer", 1

    def fields(kind, messages, **more):
        return set(kind._create_payload(Named(), messages, gen_kwargs={"until": ["a"]}, **more))

    completions = fields(LocalCompletionsAPI, "a", generate=True) | fields(LocalCompletionsAPI, "a")
    return {"chats": fields(LocalChatCompletion, [{}], generate=True), "completions": completions}


def vllm():
    """Return the fields of vLLM's server."""
    from vllm.entrypoints.generate.base.protocol import StreamOptions
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest
    from vllm.entrypoints.openai.responses.protocol import ResponsesRequest

    kinds = {"chats": ChatCompletionRequest, "completions": CompletionRequest, "responses": ResponsesRequest}
    return {path: set(kind.model_fields) for path, kind in {**kinds, "stream_options": StreamOptions}.items()}


def collect():
    """Renew the lists of the packages that are here."""
    stored = json.loads(STORED.read_text()) if STORED.exists() else {}
    stored["codex"] = {"version": "0.9x", "responses": sorted(CODEX)}
    # Seer's own environment may have older clients.
    reads = (openai, litellm, inspect_ai, lm_eval) if Path(sys.prefix).name == ".venv-clients" else (vllm,)
    for read in reads:
        [distribution, *_] = packages_distributions()[read.__name__]
        fields = {path: sorted(names) for path, names in read().items()}
        stored[read.__name__] = {"version": version(distribution), **fields}
    STORED.write_text(json.dumps(dict(sorted(stored.items())), indent=1) + "\n")


if __name__ == "__main__":
    collect()
