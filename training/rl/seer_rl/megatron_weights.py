"""A rank's weights: its share of Hugging Face's tensors, under Megatron-core's names and joined as there.

Tensor parallelism gives each rank whole heads and equal parts of the other tensors; pipeline parallelism
gives it some of the layers.  A rank's share, under Hugging Face's names, is that of a model with fewer heads,
a narrower MLP and fewer layers, so joining and taking apart need no rank.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import attrs
import torch
from safetensors import safe_open
from torch import Tensor

__all__ = ["Share", "Weights", "file_name", "from_megatron", "index", "read_share", "to_megatron"]

Weights = dict[str, Tensor]

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
CUT_ALONG = {
    EMBEDDING: 0,
    HEAD: 0,
    "self_attn.q_proj.weight": 0,
    "self_attn.k_proj.weight": 0,
    "self_attn.v_proj.weight": 0,
    "self_attn.o_proj.weight": 1,
    "mlp.gate_proj.weight": 0,
    "mlp.up_proj.weight": 0,
    "mlp.down_proj.weight": 1,
}
"""The dimension along which tensor parallelism cuts a tensor; each rank has a copy of the others."""

SAME = {
    "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
    "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
    "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
    "mlp.linear_fc2.weight": "mlp.down_proj.weight",
    "input_layernorm.weight": "input_layernorm.weight",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
}
"""Tensors of a layer that are the same in both, Megatron-core's name first."""


@attrs.frozen
class Share:
    """Which part of a model a rank has: a place in its stage, and a stage of the pipeline."""

    config: Any
    tensor_rank: int
    tensor_parallel: int
    stage: int
    stages: int

    @property
    def layers(self) -> range:
        """The numbers that its layers have in the whole model."""
        each = self.config.num_hidden_layers // self.stages
        return range(self.stage * each, (self.stage + 1) * each)

    @property
    def groups(self) -> int:
        """How many heads of keys it has."""
        return int(self.config.num_key_value_heads) // self.tensor_parallel

    @property
    def first(self) -> bool:
        """Whether it has the embedding."""
        return self.stage == 0

    @property
    def last(self) -> bool:
        """Whether it has the head."""
        return self.stage == self.stages - 1

    def same(self) -> Iterator[tuple[str, str]]:
        """Yield the names of tensors that are the same in both, Megatron-core's first."""
        if self.first:
            yield "embedding.word_embeddings.weight", EMBEDDING
        if self.last:
            yield "decoder.final_layernorm.weight", "model.norm.weight"
            if not self.config.tie_word_embeddings:
                yield "output_layer.weight", HEAD
            elif not self.first:  # the embedding once more, kept equal by Megatron-core
                yield "output_layer.weight", EMBEDDING
        for ours, theirs in self.prefixes():
            for own, other in SAME.items():
                yield ours + own, theirs + other

    def prefixes(self) -> Iterator[tuple[str, str]]:
        """Yield how the names of each layer begin, Megatron-core's first."""
        for number, layer in enumerate(self.layers):
            yield f"decoder.layers.{number}.", f"model.layers.{layer}."

    def names(self) -> list[str]:
        """Return what its stage writes down, under Hugging Face's names: each tensor of the model once."""
        again = {EMBEDDING} if self.config.tie_word_embeddings and not self.first else set()
        names = {theirs for _, theirs in self.same()} - again
        for _, theirs in self.prefixes():
            names |= {f"{theirs}self_attn.{name}_proj.weight" for name in "qkv"}
            names |= {f"{theirs}mlp.{name}_proj.weight" for name in ("gate", "up")}
        return sorted(names)


def read_share(directory: Path, share: Share) -> Weights:
    """Read a rank's part of a model's safetensors, in one file or several.

    Raises:
        OSError: a file cannot be read.
        KeyError: a tensor is missing.
        SafetensorError: a file is none of safetensors.
    """
    with ExitStack() as stack:
        files: dict[str, Any] = {}
        for path in sorted(directory.glob("*.safetensors")):
            file = stack.enter_context(safe_open(path, "pt"))
            files |= dict.fromkeys(file.keys(), file)

        def read(name: str) -> Tensor:
            part = files[name].get_slice(name)
            dimension = _cut_along(name)
            if dimension is None:
                return part[:]  # type: ignore[no-any-return]
            size = part.get_shape()[dimension] // share.tensor_parallel
            mine = slice(share.tensor_rank * size, (share.tensor_rank + 1) * size)
            return part[mine] if dimension == 0 else part[:, mine]  # type: ignore[no-any-return]

        return to_megatron(read, share)


def to_megatron(read: Callable[[str], Tensor], share: Share) -> Weights:
    """Join what Megatron-core computes at once: q, k, v of each group of heads; gate and up."""
    out = {ours: read(theirs) for ours, theirs in share.same()}
    for ours, theirs in share.prefixes():
        size, width = share.config.head_dim, share.config.hidden_size
        parts = [
            read(f"{theirs}self_attn.{name}_proj.weight").view(share.groups, -1, size, width)
            for name in "qkv"
        ]
        out[f"{ours}self_attention.linear_qkv.weight"] = torch.cat(parts, 1).reshape(-1, width)
        both = [read(f"{theirs}mlp.{name}_proj.weight") for name in ("gate", "up")]
        out[f"{ours}mlp.linear_fc1.weight"] = torch.cat(both)
    return out


def from_megatron(
    weights: Mapping[str, Tensor], share: Share, gather: Callable[[Tensor], list[Tensor]]
) -> Weights:
    """Return the whole tensors of a stage under Hugging Face's names, each once.

    ``gather`` returns a tensor of all ranks of the stage, in their order; all of them must call this.
    """
    parts = {theirs: weights[ours] for ours, theirs in share.same()}
    queries = share.config.num_attention_heads // share.config.num_key_value_heads
    for ours, theirs in share.prefixes():
        size, width = share.config.head_dim, share.config.hidden_size
        joined = weights[f"{ours}self_attention.linear_qkv.weight"].view(share.groups, -1, size, width)
        for name, part in zip("qkv", torch.split(joined, [queries, 1, 1], 1), strict=True):
            parts[f"{theirs}self_attn.{name}_proj.weight"] = part.reshape(-1, width)
        gate, up = weights[f"{ours}mlp.linear_fc1.weight"].chunk(2)
        parts[f"{theirs}mlp.gate_proj.weight"], parts[f"{theirs}mlp.up_proj.weight"] = gate, up
    out = {}
    for name in share.names():
        dimension, part = _cut_along(name), parts[name].detach().contiguous()
        if dimension is not None and share.tensor_parallel > 1:
            part = torch.cat(gather(part), dimension)
        out[name] = part.cpu()
    return out


def file_name(stage: int, stages: int) -> str:
    """Return the name of a stage's file, as Hugging Face names them."""
    return "model.safetensors" if stages == 1 else f"model-{stage + 1:05d}-of-{stages:05d}.safetensors"


def index(config: Any, stages: int) -> bytes:
    """Return the index of several files, as Hugging Face has it."""
    files = {
        name: file_name(stage, stages)
        for stage in range(stages)
        for name in Share(config, 0, 1, stage, stages).names()
    }
    return json.dumps({"metadata": {}, "weight_map": files}, indent=2).encode()


def _cut_along(name: str) -> int | None:
    return CUT_ALONG.get(name, CUT_ALONG.get(name.split(".", 3)[-1]))
