"""verl's own servers, which are actors of Ray's, as handles of Seer's engine ``remote``.

What verl's servers have no method for is asked by Ray's ``__ray_call__``, as verl does it: a function of this
module runs within the server.  They name what verl 0.9.1 calls its parts; one that it has moved is an error
at the start that says so.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import PurePath
from typing import Any

from seer_remote.fields import SGLANG_SAMPLING, VLLM_SAMPLING, Way, holding
from seer_remote.handles import HandleRequest
from seer_remote.sglang import ALL_TOKENS, UNSEEDED

from seer_verl.sampling import CONTROLS, LEAST

__all__ = ["ANSWERS_S", "KINDS", "KNOWN", "REPEATED", "VerlServer", "handles", "use"]

KNOWN = "0.9.1"
"""The version of verl whose servers have these parts."""

ARGUMENTS = "verl"
"""The attachment with further arguments of ``generate``, each in a list of one, for Ray's references."""

REPEATED = "repetition"
"""The end of a response under vLLM's ``repetition_detection``."""

ANSWERS_S = 60.0
"""How long the scheduler of an engine may take to say what it has."""

_servers: dict[str, VerlServer] = {}


def use(servers: Mapping[str, Any], kind: str) -> list[VerlServer]:
    """Have ``handles`` return these actors of a ``kind`` of server, by their addresses."""
    _servers.clear()
    _servers.update((name.replace("/", "_"), VerlServer(actor, kind)) for name, actor in servers.items())
    return list(_servers.values())


def handles() -> dict[str, VerlServer]:
    """Return the servers in use: ``[engine.remote].handles``."""
    return dict(_servers)


class VerlServer:
    """A server of verl's: a ``Handle``."""

    def __init__(self, actor: Any, kind: str) -> None:
        self._actor, self._kind = actor, kind
        self._inner = KINDS[kind]
        self._ends: frozenset[int] = frozenset()

    async def facts(self) -> Mapping[str, Any]:
        """Ask what it serves."""
        found = await self._run(self._inner.facts)
        self._ends = frozenset(found.pop("ends"))
        ruled_out = found.pop("ruled_out")
        controls = [name for name in CONTROLS[self._kind] if name not in ruled_out]
        names = [f"{ARGUMENTS}.arguments.{name}" for name in self._inner.divided]
        names += [f"{ARGUMENTS}.sampling_params.{name}" for name in holding(self._inner.fields)]
        return {
            **found,
            "controls": controls,
            "whole_controls": [name for name in controls if self._inner.fields.get(name) == "whole"],
            "divided_attachments": names,
        }

    async def load(self) -> Mapping[str, Any]:
        """Ask how many requests it has, and whether verl has paused it."""
        found: Mapping[str, Any] = await self._run(self._inner.load)
        return found

    async def label(self) -> str:
        """Return the step of the weights that it has, as verl names it."""
        return str(await self._run(step_of_server))

    async def generate(self, request: HandleRequest) -> Mapping[str, Any]:
        """Have a chunk written, with what belongs to the prompt besides tokens."""
        given = request.attachments.get(ARGUMENTS, {})
        more = {name: box[0] for name, box in given.get("arguments", {}).items()}
        how = self._inner.sampling(dict(request.sampling), request.seed)
        output = await self._actor.generate.remote(
            prompt_ids=request.token_ids,
            sampling_params={
                "repetition_penalty": 1.0,
                "ignore_eos": False,
                **given.get("sampling_params", {}),
                **how,
                "max_tokens": request.max_tokens,
                "logprobs": True,
            },
            request_id=request.request_id,
            **more,
        )
        tokens = list(output.token_ids)
        fields = output.extra_fields or {}
        return {
            "token_ids": tokens,
            "logprobs": list(output.log_probs or ()),
            "ended": self._ended(output.stop_reason, tokens, request),
            "cached_tokens": fields.get("num_cached_tokens") or 0,
            "versions": (str(fields.get("global_steps")),),
            "attachments": {
                "stop_reason": output.stop_reason,
                "routed_experts": output.routed_experts,
                "num_preempted": output.num_preempted,
                "extra_fields": fields,
            },
        }

    async def abort(self, request_ids: Sequence[str]) -> None:
        """End requests: they return what they have; no cache is cleared, as verl's own call would."""
        await self._run(self._inner.abort, list(request_ids))

    def _ended(self, reason: str | None, tokens: Sequence[int], request: HandleRequest) -> str:
        """Return why a chunk ended: to verl's servers of vLLM an end and a full length are one reason."""
        if reason in ("aborted", "abort"):
            return "abort"
        if reason == REPEATED:
            return "stop"
        if reason != "completed":
            return reason or "abort"
        if len(tokens) < request.max_tokens:
            return "stop"
        ends = set(request.sampling.get("stop_token_ids", ()))
        if not request.sampling.get("ignore_eos"):
            ends |= self._ends
        return "stop" if tokens[-1] in ends else "length"

    async def _run(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return await self._actor.__ray_call__.remote(function, *arguments)


def _version(module: str) -> str:
    return str(getattr(sys.modules.get(module), "__version__", "of an unknown version"))


def step_of_server(server: Any) -> Any:
    """Run in a server: return the step of its weights, None before the first."""
    return server.global_steps


class VllmInner:
    """Functions that run within verl's servers of vLLM."""

    fields: Mapping[str, Way] = VLLM_SAMPLING
    divided = ("image_data", "video_data", "audio_data", "mm_processor_kwargs", "priority")
    """The arguments of ``generate`` that hold over chunks."""

    @staticmethod
    def facts(server: Any) -> dict[str, Any]:
        """Return what it serves, from the configuration of its engine."""
        engine = server.engine
        config = engine.vllm_config
        cache, ranks = config.cache_config, config.parallel_config.data_parallel_size
        generation = config.model_config.try_get_generation_config().get("eos_token_id")
        own = server.model_config.tokenizer.eos_token_id
        ends = {*(generation if isinstance(generation, list) else [generation]), own} - {None}
        return {
            "engine": f"vLLM {_version('vllm')}",
            "model": PurePath(server.model_config.local_path).name,
            "directory": PurePath(server.model_config.local_path).name,
            "max_model_tokens": server.config.max_model_len,
            "vocab_size": config.model_config.get_vocab_size(),
            "kv_tokens": cache.num_gpu_blocks * cache.block_size * ranks,
            "block_tokens": cache.block_size,
            "max_running": config.scheduler_config.max_num_seqs * ranks,
            "shares_prompts": bool(cache.enable_prefix_caching),
            "ends": sorted(ends),
            "ruled_out": [],
        }

    @staticmethod
    def load(server: Any) -> dict[str, Any]:
        """Return how many requests it has."""
        most = server.engine.vllm_config.scheduler_config.max_num_seqs
        requests = len(server.engine.output_processor.request_states)
        return {
            "running": min(requests, most),
            "waiting": max(0, requests - most),
            "kv_usage": 0.0,
            "paused": server._submission_paused,
        }

    @staticmethod
    def abort(server: Any, request_ids: list[str]) -> None:
        """End requests by the ids they came with; Ray calls this in a thread beside the engine's loop."""
        handler = server.engine.output_handler
        if handler is not None:  # or else nothing runs
            asyncio.run_coroutine_threadsafe(server.engine.abort(request_ids), handler.get_loop())

    @staticmethod
    def sampling(how: dict[str, Any], seed: int | None) -> dict[str, Any]:
        """Return sampling parameters by vLLM's names."""
        return how if seed is None else {**how, "seed": seed}


class SglangInner:
    """Functions that run within verl's servers of SGLang."""

    fields: Mapping[str, Way] = SGLANG_SAMPLING
    divided = ("priority",)
    """The arguments of ``generate`` that hold over chunks; with media it makes tokens of text again."""

    @staticmethod
    def facts(server: Any) -> dict[str, Any]:
        """Return what it serves; its scheduler alone says how much KV it has."""
        manager = server.tokenizer_manager
        asked = asyncio.run_coroutine_threadsafe(manager.get_internal_state(), _loop(server))
        states = asked.result(ANSWERS_S)
        given = states[0]
        return {
            "engine": f"SGLang {_version('sglang')}",
            "model": PurePath(server.model_config.local_path).name,
            "directory": PurePath(server.model_config.local_path).name,
            "max_model_tokens": server.config.max_model_len - 1,
            "vocab_size": manager.model_config.vocab_size,
            "kv_tokens": sum(each["memory_usage"]["token_capacity"] for each in states),
            "block_tokens": given.get("page_size") or 1,
            "max_running": (given.get("effective_max_running_requests_per_dp") or 0) * len(states),
            "shares_prompts": not given.get("disable_radix_cache") and len(states) == 1,
            "ends": [],
            "ruled_out": [UNSEEDED] if given.get("enable_deterministic_inference") else [],
        }

    @staticmethod
    def load(server: Any) -> dict[str, Any]:
        """Return how many requests it has."""
        manager = server.tokenizer_manager
        paused = bool(getattr(manager, "is_pause", False))
        return {"running": len(manager.rid_to_state), "waiting": 0, "kv_usage": 0.0, "paused": paused}

    @staticmethod
    def abort(server: Any, request_ids: list[str]) -> None:
        """End requests by their ids, in the loop in which they run."""
        _loop(server).call_soon_threadsafe(_end_in_sglang, server, request_ids)

    @staticmethod
    def sampling(how: dict[str, Any], seed: int | None) -> dict[str, Any]:
        """Return sampling parameters by SGLang's names."""
        found = {dict([LEAST]).get(name, name): value for name, value in how.items()}
        found["top_k"] = found.get("top_k") or (-1 if seed is None else ALL_TOKENS)
        return found if seed is None else {**found, "sampling_seed": seed}


def _loop(server: Any) -> asyncio.AbstractEventLoop:
    """Return the event loop of a server of SGLang; Ray calls functions in a thread beside it."""
    found: asyncio.AbstractEventLoop = server._server_task.get_loop()
    return found


def _end_in_sglang(server: Any, request_ids: list[str]) -> None:
    manager = server.tokenizer_manager
    for each in request_ids:
        if (state := manager.rid_to_state.get(each)) is not None:
            state.abort_sent = False  # or else it is sent once, also to a scheduler that has no such request
            manager.abort_request(each)


KINDS: dict[str, type[VllmInner] | type[SglangInner]] = {"vllm": VllmInner, "sglang": SglangInner}
"""The kinds of servers, by ``rollout.name``."""
