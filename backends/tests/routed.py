"""Routed experts of real engines: those of responses, and those that transformers' own model chooses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from seer_host.routed_experts import ROUTED_EXPERTS, unpacked

from seer_core.ports.engine import ChunkOutput

__all__ = ["choice_of", "joined"]


def choice_of(model: Path) -> Callable[[Sequence[int]], np.ndarray]:
    """Return a function: the experts that a mixture chooses for a text but its last token.

    They are int [positions, layers, experts per token], ascending in each layer.
    """
    import torch
    import transformers

    mixture = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    experts = mixture.config.num_experts_per_tok

    def chosen(text: Sequence[int]) -> np.ndarray:
        with torch.no_grad():
            logits = mixture(torch.tensor([text[:-1]]), output_router_logits=True).router_logits
        return np.stack([layer.topk(experts).indices.sort().values.numpy() for layer in logits], axis=1)

    return chosen


def joined(rounds: Sequence[Sequence[ChunkOutput]]) -> list[np.ndarray]:
    """Return the experts of each response, joined over its chunks, which are one in each round."""
    responses = []
    for outputs in zip(*rounds, strict=True):
        parts = [unpacked(output.attachments[ROUTED_EXPERTS]) for output in outputs]
        ends = np.cumsum([len(experts) for _, experts in parts])
        assert [start for start, _ in parts] == [0, *ends[:-1]]
        responses.append(np.concatenate([experts for _, experts in parts]))
    return responses
