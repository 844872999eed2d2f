"""Routing replay: a mixture of experts takes, in training, the experts that the engine took.

Engine and trainer compute the same weights with other kernels, so near ties of a router fall differently,
and a token is then trained through experts that did not write it.  With the engine's choice replayed the
router's weights of those experts are still the trainer's own, and have their gradient ("rollout routing
replay", R3: Ma et al. 2025, arXiv 2510.11370).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.overrides import TorchFunctionMode

from seer_rl.errors import TrainError

__all__ = ["replayed_routing"]

ROUTER = "topkrouter"
"""How transformers ends the names of the classes that choose experts, in small letters."""

LAYER = re.compile(r"\.layers\.(\d+)\.")


@contextmanager
def replayed_routing(model: Module, experts: Tensor) -> Iterator[None]:
    """Have a model of transformers take these experts, int64 [tokens, layers, experts per token], while it
    computes a batch of as many tokens; a token that has -1 in place of one chooses all of its own.

    Raises:
        TrainError: the model has no routers, or has others than those that chose.
    """
    routers = _routers(model)
    last = max(routers, default=-1)
    if last < 0 or last >= experts.shape[1]:
        raise TrainError(
            "the experts of the responses cannot be replayed: the trainer's model has"
            f" {len(routers)} layers with a router that chooses some, and the engine's has"
            f" {experts.shape[1]} layers"
        )
    with ExitStack() as stack:
        for layer, router in routers.items():
            replay = _Replay(experts[:, layer], int(router.num_experts))
            begun = router.register_forward_pre_hook(partial(_begin, replay))
            stack.callback(begun.remove)
            over = router.register_forward_hook(partial(_end, replay), always_call=True)
            stack.callback(over.remove)
        yield


def _begin(replay: _Replay, *_: Any) -> None:
    replay.__enter__()  # type: ignore[no-untyped-call]


def _end(replay: _Replay, *_: Any) -> None:
    replay.__exit__(None, None, None)  # type: ignore[no-untyped-call]


def _routers(model: Module) -> Mapping[int, Any]:
    """Return a model's routers by the number of their layer."""
    return {
        int(found[1]): module
        for name, module in model.named_modules()
        if type(module).__name__.lower().endswith(ROUTER) and (found := LAYER.search(name))
    }


class _Replay(TorchFunctionMode):
    """Answers a router's last choice, of experts among all; where a router chooses groups of them first, as
    DeepSeek's, that choice is left alone and counts for nothing.
    """

    def __init__(self, experts: Tensor, count: int) -> None:
        super().__init__()
        self._experts, self._count = experts, count

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        found = function(*args, **(kwargs or {}))
        if function not in (torch.topk, Tensor.topk):
            return found
        if args[0].dim() != 2 or args[0].shape[-1] != self._count:  # [tokens, experts]
            return found
        chosen = found[1]
        if chosen.shape != self._experts.shape:
            raise TrainError(
                "the experts of the responses cannot be replayed: the engine took"
                f" {tuple(self._experts.shape)} in a layer, and the trainer's model takes"
                f" {tuple(chosen.shape)}"
            )
        own = (self._experts < 0).any(dim=-1, keepdim=True)
        experts = torch.where(own, chosen, self._experts)
        return torch.return_types.topk((args[0].gather(-1, experts), experts))
