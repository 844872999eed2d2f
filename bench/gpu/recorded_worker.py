"""A worker of vLLM that writes recorded responses: the model runs, and its sampled tokens give way to theirs.

The script's token replaces the sampler's at one place, behind ``chosen_by_key``, in both model runners, and
drafts are verified against it as against any choice.  Neither scheduler sees a length: a response ends with
the model's end token, where the text has it.  Requests of other seeds keep their own tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

__all__ = ["FIRST_SEED", "WORKER", "RecordedTokens", "save_texts"]

WORKER = "bench.gpu.recorded_worker.RecordedWorker"
"""For vLLM's ``worker_cls``; ``additional_config`` names the file of ``save_texts`` as ``recorded``."""

FIRST_SEED = 1 << 40
"""The seed of the first recorded response; that of response i is i more."""

SAMPLING = ("seer_vllm.sampling", "seer_vllm.second_runner_sampling")
CHOICE = "chosen_by_key"


def save_texts(file: Path, texts: Sequence[tuple[int, Sequence[int]]]) -> None:
    """Write how many tokens the prompt of each response has, and the response's own, its end included."""
    np.savez(
        file,
        prompt_tokens=np.array([prompt for prompt, _ in texts], np.int64),
        lengths=np.array([len(tokens) for _, tokens in texts], np.int64),
        tokens=np.concatenate([np.asarray(tokens, np.int64) for _, tokens in texts]),
    )


class RecordedTokens:
    """The texts of a file of ``save_texts``, on the device of the logits."""

    def __init__(self, file: Path) -> None:
        with np.load(file) as arrays:
            names = ("prompt_tokens", "lengths", "tokens")
            self._prompts, self._lengths, self._tokens = (torch.from_numpy(arrays[each]) for each in names)
        self._starts = self._lengths.cumsum(0) - self._lengths

    def in_place_of(self, chosen: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
        """Return the tokens of the texts, and the chosen ones where there are none.

        All are [rows]: a row's token has this position in its request's whole text, prompt included, and the
        request has this seed.
        """
        device = chosen.device
        if self._tokens.device != device:
            for name in ("_prompts", "_lengths", "_tokens", "_starts"):
                setattr(self, name, getattr(self, name).to(device))
        numbers = seeds.to(device) - FIRST_SEED
        known = (numbers >= 0) & (numbers < len(self._lengths))
        numbers = numbers.clamp(0, len(self._lengths) - 1)
        places = positions.to(device) - self._prompts[numbers]
        known &= (places >= 0) & (places < self._lengths[numbers])
        found = self._tokens[(self._starts[numbers] + places).clamp(0, len(self._tokens) - 1)]
        return torch.where(known, found.to(chosen.dtype), chosen)

    def behind(self, choose: Callable[..., tuple[Tensor, Tensor | None]]) -> Callable[..., Any]:
        """Return ``chosen_by_key`` with these tokens; log-probs are those of the model's own choice."""

        def recorded(
            logits: Tensor,
            temperature: Tensor,
            top_k: Tensor | None,
            top_p: Tensor | None,
            seeds: Tensor,
            positions: Tensor,
            min_p: Tensor | None = None,
        ) -> tuple[Tensor, Tensor | None]:
            chosen, logprobs = choose(logits, temperature, top_k, top_p, seeds, positions, min_p)
            return self.in_place_of(chosen, seeds, positions), logprobs

        return recorded


def _install(file: Path) -> None:
    texts = RecordedTokens(file)
    for name in SAMPLING:
        module = import_module(name)
        setattr(module, CHOICE, texts.behind(getattr(module, CHOICE)))


def __getattr__(name: str) -> type:
    """Make ``RecordedWorker`` of vLLM's worker for this platform, once it is asked for."""
    if name != "RecordedWorker":
        raise AttributeError(name)
    from vllm.platforms import current_platform

    module, kind = ("cpu_worker", "CPUWorker") if current_platform.is_cpu() else ("gpu_worker", "Worker")
    base: type = getattr(import_module(f"vllm.v1.worker.{module}"), kind)

    def __init__(self: Any, vllm_config: Any, *arguments: Any, **named: Any) -> None:
        base.__init__(self, vllm_config, *arguments, **named)
        _install(Path(vllm_config.additional_config["recorded"]))

    globals()[name] = type(name, (base,), {"__init__": __init__})
    made: type = globals()[name]
    return made
