"""Calls of owners to their servers, and answers that are wrong, by dialect."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

__all__ = ["OwnerCalls", "SglangCalls", "VllmCalls"]

Calls = Sequence[tuple[str, dict[str, Any]]]
OTHER = 5
"""The number of weights that are not those of a run without faults."""


class OwnerCalls(Protocol):
    """The paths and bodies of a dialect."""

    dialect: str
    generate: str
    ready: str

    def of(self, fault: str, checkpoint: Callable[[int], str]) -> tuple[Calls, Calls]:
        """Return the calls that begin a fault, and those that end it; none where servers have no such."""
        ...

    def change(self, answer: dict[str, Any], fault: str) -> None:
        """Change the answer to a chunk."""


class VllmCalls:
    """The calls and answers of ``vllm serve``, and of stand-ins for it."""

    dialect = "vllm"
    generate = "/inference/v1/generate"
    ready = "/health"

    def of(self, fault: str, checkpoint: Callable[[int], str]) -> tuple[Calls, Calls]:
        """See ``OwnerCalls``."""

        def load(weights: int) -> tuple[str, dict[str, Any]]:
            kwargs = {"weights_path": checkpoint(weights)}
            return "/collective_rpc", {"method": "reload_weights", "kwargs": kwargs}

        def call(version: str) -> tuple[str, dict[str, Any]]:
            return "/update_weight_version", {"new_version": version}

        match fault:
            case "weights in mid-chunk":
                return (call("other"), load(OTHER)), (load(0), call("default"))
            case "pause":
                return (("/pause", {}),), (("/resume", {}),)
            case "sleep":
                return (("/sleep?level=0", {}),), (("/wake_up?tags=scheduling", {}),)
            case "cache reset":
                return (("/reset_prefix_cache", {}),), ()
        return (), ()

    def change(self, answer: dict[str, Any], fault: str) -> None:
        """See ``OwnerCalls``."""
        [choice] = answer["choices"]
        match fault:
            case "wrong id":
                answer["request_id"] = "generate-tokens-of-another"
            case "lost token":
                choice["token_ids"] = choice["token_ids"][:-1]
            case "more tokens":
                choice["token_ids"] += [1] * 50
                choice["logprobs"]["content"] += choice["logprobs"]["content"][:1] * 50
            case "bad token":
                choice["token_ids"][-1] = 1 << 30
            case "no choice":
                answer["choices"] = []


class SglangCalls:
    """The calls and answers of SGLang servers."""

    dialect = "sglang"
    generate = "/generate"
    ready = "/ready"

    def of(self, fault: str, checkpoint: Callable[[int], str]) -> tuple[Calls, Calls]:
        """See ``OwnerCalls``."""

        def paused(*between: tuple[str, dict[str, Any]]) -> Calls:
            return ("/pause_generation", {"mode": "retract"}), *between, ("/continue_generation", {})

        def load(weights: int, version: str) -> tuple[str, dict[str, Any]]:
            body = {"model_path": checkpoint(weights), "weight_version": version}
            return "/update_weights_from_disk", body

        match fault:
            case "weights in mid-chunk":
                return paused(load(OTHER, "other")), paused(load(0, "default"))
            case "pause":
                begin, end = paused()
                return (begin,), (end,)
            case "cache reset":
                return paused(("/flush_cache", {})), ()
        return (), ()

    def change(self, answer: dict[str, Any], fault: str) -> None:
        """See ``OwnerCalls``."""
        found = answer["meta_info"]
        pairs = found["output_token_logprobs"]
        match fault:
            case "wrong id":
                found["id"] = "another"
            case "lost token":
                pairs.pop()
            case "more tokens":
                pairs += pairs[:1] * 50
            case "bad token":
                pairs[-1][1] = 1 << 30
            case "no choice":
                del answer["meta_info"]
