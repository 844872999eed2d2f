"""Answers of vLLM's own server and of ``seer serve`` to the same chats, field by field."""

import json
import re
import subprocess
import sys
import warnings
from contextlib import ExitStack
from functools import partial

import httpx
import pytest
from seer_host.ports import reserved_port

from tests.support.eventually import eventually
from tests.support.installed import skip_without

pytestmark = pytest.mark.engine
skip_without("vllm", reason="vLLM is not installed: `make setup` installs it")

PATIENCE_S = 600
END_OF_REASONING = 261
PRINTED = {str(token): -100 for token in range(94, 256)}
"""Leaves printed ASCII: no space, of which JSON may have any number, and no part of a character."""

PARAMETERS = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}, "days": {"enum": [1, 2]}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
WEATHER = {"name": "weather", "description": "The weather of a city", "parameters": PARAMETERS}
STRICT = {"type": "function", "function": {**WEATHER, "strict": True}}
LOOSE = {"type": "function", "function": {"name": "time"}}
NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}
TIME = {"type": "function", "function": {"name": "time", "parameters": NOTHING, "strict": True}}
CALLED = [
    {"role": "user", "content": "how warm is Paris"},
    {
        "role": "assistant",
        "content": None,
        "reasoning": "I look it up",
        "tool_calls": [
            {"id": "c", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}},
            {"id": "d", "type": "function", "function": {"name": "time", "arguments": "{"}},
        ],
    },
    {"role": "tool", "tool_call_id": "c", "content": [{"type": "text", "text": "4 C"}]},
]
NAMED = {"type": "function", "function": {"name": "weather"}}
FORM = {"type": "json_schema", "json_schema": {"name": "w", "schema": PARAMETERS}}
THINKING = {"logit_bias": {**PRINTED, str(END_OF_REASONING): 100}}
QUIET = {"chat_template_kwargs": {"enable_thinking": False}, "logit_bias": PRINTED}
ONE = {"parallel_tool_calls": False}
CHATS = {
    "text": QUIET,
    "reasoning that is cut": {"logit_bias": PRINTED},
    "a tool that the model may call": {"tools": [LOOSE], **QUIET},
    "a strict tool that the model may call": {"tools": [STRICT], **QUIET},
    "a required call": {
        "tools": [STRICT, TIME],
        "tool_choice": "required",
        **ONE,
        **QUIET,
    },
    "a named tool": {"tools": [STRICT, TIME], "tool_choice": NAMED, **ONE, **QUIET},
    "tools that are not called": {"tools": [STRICT], "tool_choice": "none", **QUIET},
    "a required call behind reasoning": {
        "tools": [STRICT],
        "tool_choice": "required",
        **ONE,
        **THINKING,
    },
    "a form behind reasoning": {"response_format": FORM, **THINKING},
    "a form": {"response_format": FORM, **QUIET},
    "a chat with calls": {"messages": CALLED, "tools": [STRICT], **QUIET},
    "reasoning that is left out": {"include_reasoning": False, "logit_bias": PRINTED},
}
CALLS = {chat: ["weather"] for chat in ("a named tool", "a required call behind reasoning")}
CALLS["a required call"] = ["time"]

ONLY_AT_VLLM = {
    "ec_transfer_params",
    "kv_transfer_params",
    "metrics",
    "prompt_logprobs",
    "prompt_text",
    "service_tier",
    "system_fingerprint",
    "choice.routed_experts",
    "message.annotations",
    "message.audio",
    "message.function_call",
    "message.refusal",
    "usage.completion_tokens_details",
    "usage.prompt_tokens_details",
}
ONLY_HERE = {"weight_version"}
"""The table of docs/guides/tools.md has these."""


@pytest.fixture(scope="module")
def small_model(byte_model, tmp_path_factory):
    """Return a directory with a model of two layers, whose weights are random."""
    import torch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from transformers import LlamaConfig, LlamaForCausalLM

        folder = tmp_path_factory.mktemp("small")
        config = LlamaConfig(
            vocab_size=262,
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            max_position_embeddings=2048,
            eos_token_id=257,
            bos_token_id=256,
            initializer_range=0.3,
        )
        torch.manual_seed(0)
        LlamaForCausalLM(config).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (folder / name).write_bytes((byte_model / name).read_bytes())
    return folder


@pytest.fixture(scope="module")
def servers(small_model, tmp_path_factory):
    """Return the addresses of vLLM's server and of ``seer serve``, with the same parsers."""
    folder = tmp_path_factory.mktemp("servers")
    (folder / "seer.toml").write_text(
        f'[seer]\nplugins = ["divided_rollout"]\nengine = "vllm"\n[engine.vllm]\nmodel = "{small_model}"\n'
        'dtype = "float32"\nthreads = 1\nkv_cache_bytes = 33_554_432\nmax_model_tokens = 2048\n'
        "start_timeout_s = 600\n[plugin.divided_rollout]\nchunk_tokens = 16\n"
    )
    (folder / "token").write_text("a" * 32)
    parsers = ["--tool-call-parser", "hermes", "--reasoning-parser", "qwen3"]
    reserved = ExitStack()
    ports = [reserved.enter_context(reserved_port()) for _ in range(2)]
    vllm = ["-m", "vllm.entrypoints.openai.api_server", "--model", str(small_model), "--port", str(ports[0])]
    vllm += ["--served-model-name", "seer", "--dtype", "float32", "--max-model-len", "2048"]
    vllm += ["--enforce-eager", "--enable-auto-tool-choice", "--kv-cache-memory-bytes", "33554432"]
    seer = ["-c", "from seer_main import main; main()", "serve", str(folder / "seer.toml"), "--port"]
    seer += [str(ports[1]), "--token-file", str(folder / "token")]
    urls = [f"http://127.0.0.1:{port}" for port in ports]
    processes = []
    try:
        for name, arguments, url in zip(("vllm", "seer"), (vllm, seer), urls, strict=True):
            log = folder / f"{name}.log"
            with log.open("w") as output:
                command = [sys.executable, *arguments, *parsers]
                processes.append(subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT))
            eventually(partial(answered_or_ended, url, processes[-1]), f"{name} answers", logs=[log])
            assert processes[-1].poll() is None, log.read_text()[-3000:]
        yield urls
    finally:
        reserved.close()
        for process in processes:
            process.terminate()
        for process in processes:
            try:
                process.wait(PATIENCE_S)
            finally:
                process.kill()


def answered_or_ended(url, process):
    return answers(url) or process.poll() is not None


def answers(url):
    try:
        return httpx.get(f"{url}/health", timeout=PATIENCE_S).status_code == 200
    except httpx.TransportError:
        return False


def ask(url, chat, stream):
    body = {
        "model": "seer",
        "messages": [{"role": "user", "content": "how warm is Paris"}],
        "temperature": 0,
        "max_tokens": 120,
        "return_token_ids": True,
        "stream": stream,
        **({"stream_options": {"include_usage": True}} if stream else {}),
        **chat,
    }
    headers = {"Authorization": f"Bearer {'a' * 32}"}
    answer = httpx.post(f"{url}/v1/chat/completions", json=body, headers=headers, timeout=PATIENCE_S)
    assert answer.status_code == 200, answer.text
    return put_together(answer.text) if stream else answer.json()


def put_together(text):
    """Return the whole answer that a stream's events make."""
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert lines.pop() == "[DONE]"
    *events, last = map(json.loads, lines)
    message, choice, calls = {"content": None, "reasoning": None}, {}, []
    whole = {"usage": last["usage"]}
    for event in events:
        assert event["object"] == "chat.completion.chunk"
        whole |= {name: event[name] for name in ("id", "model", "prompt_token_ids") if event.get(name)}
        [piece] = event["choices"]
        for name in ("content", "reasoning"):
            if piece["delta"].get(name):
                message[name] = (message[name] or "") + piece["delta"][name]
        message |= {"role": piece["delta"]["role"]} if piece["delta"].get("role") else {}
        for call in piece["delta"].get("tool_calls") or []:
            if call["index"] == len(calls):
                function = {"name": call["function"]["name"], "arguments": ""}
                calls.append({"id": call["id"], "type": call["type"], "function": function})
            calls[call["index"]]["function"]["arguments"] += call["function"].get("arguments") or ""
        choice["token_ids"] = choice.get("token_ids", []) + (piece.get("token_ids") or [])
        choice |= {name: piece.get(name) for name in ("finish_reason", "stop_reason", "index")}
    message |= {"tool_calls": calls} if calls else {}
    return {**whole, "choices": [{**choice, "message": message}]}


def fields(answer):
    """Return an answer's fields by their paths, without those that no two answers share."""
    [choice] = answer["choices"]
    found = {name: value for name, value in answer.items() if name not in ("choices", "usage")}
    found |= {f"usage.{name}": value for name, value in answer["usage"].items()}
    found |= {f"choice.{name}": value for name, value in choice.items() if name != "message"}
    found |= {f"message.{name}": value for name, value in choice["message"].items()}
    for call in found.get("message.tool_calls", ()):
        assert re.fullmatch("chatcmpl-tool-[0-9a-f]+", call.pop("id"))
    for name in ("id", "created"):
        found.pop(name, None)
    return found


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("chat", CHATS)
def test_an_answer_has_the_fields_of_vllm_s(servers, chat, stream):
    theirs, ours = (fields(ask(url, CHATS[chat], stream)) for url in servers)
    if stream:  # an event has no field that is null
        theirs = {name: value for name, value in theirs.items() if name not in ONLY_AT_VLLM}
        ours = {name: value for name, value in ours.items() if name not in ONLY_HERE}
        for found in (theirs, ours):
            found["message.content"] = found["message.content"] or None
    else:
        assert theirs.keys() - ours.keys() == ONLY_AT_VLLM
        assert ours.keys() - theirs.keys() == ONLY_HERE
    shared = theirs.keys() & ours.keys()
    if not CHATS[chat].get("include_reasoning", True):
        shared -= {"choice.token_ids"}
    assert {name: ours[name] for name in shared} == {name: theirs[name] for name in shared}
    assert [each["function"]["name"] for each in ours.get("message.tool_calls", ())] == CALLS.get(chat, [])
