"""Drawn cases for the sampler's two paths: each row of logits, with its own sampling, is a case.

Needs torch, and nothing of Seer but the sampler.
"""

from __future__ import annotations

import os
from typing import Any

import torch

KINDS = ((), ("top_p",), ("top_k",), ("min_p",), ("top_k", "top_p"), ("top_k", "top_p", "min_p"))
"""Which cuts the rows of a draw may have."""
NEAR = 1e-5
"""How far a log-prob may be off, absolutely below 1 and relatively above."""


def interpret() -> None:
    """Let Triton run kernels in its interpreter; before Triton is imported."""
    os.environ["TRITON_INTERPRET"] = "1"


def draw(seed: int, rows: int, vocab: int, dtype: str = "float32", device: str = "cpu") -> dict[str, Any]:
    """Return arguments of ``fused_choices``: logits with ties, masks and zeros of both signs."""
    random = torch.Generator().manual_seed(seed)

    def uniform(*shape: int) -> torch.Tensor:
        return torch.rand(shape, generator=random)

    def sometimes(share: float, value: Any, other: torch.Tensor) -> torch.Tensor:
        return torch.where(uniform(rows) < share, value, other)

    def below(limit: int, *shape: int) -> torch.Tensor:
        return torch.randint(limit, shape, generator=random)

    logits = torch.randn(rows, vocab, generator=random) * (0.3 + 8 * uniform(rows, 1) ** 2)
    logits = torch.where(uniform(rows, 1) < 0.3, logits.mul(2).round().div(2), logits)
    logits = torch.where(uniform(rows, 1) < 0.05, logits * 1e3, logits)
    masked = uniform(rows, vocab) < sometimes(0.6, 0.0, uniform(rows) ** 0.1)[:, None]
    masked[torch.arange(rows), below(vocab, rows)] = False
    logits = logits.masked_fill(masked, -torch.inf).to(getattr(torch, dtype))
    temperature = sometimes(0.4, 1.0, sometimes(0.2, 0.0, 0.05 + 2 * uniform(rows)))
    kind = KINDS[seed % len(KINDS)]
    cuts = {
        "top_k": sometimes(0.3, vocab, 1 + below(vocab, rows)),
        "top_p": sometimes(0.3, 1.0, 1e-6 + (1 - 1e-6) * uniform(rows)),
        "min_p": sometimes(0.3, 0.0, sometimes(0.1, 1.0, uniform(rows) ** 3)),
    }
    values = {
        "logits": logits,
        "temperature": temperature,
        **{name: values if name in kind else None for name, values in cuts.items()},
        "seeds": below(2**63 - 1, rows),
        "positions": below(40_000, rows),
    }
    return {name: None if value is None else value.to(device) for name, value in values.items()}


def differences(
    seed: int,
    rows: int,
    vocab: int,
    dtype: str = "float32",
    device: str = "cpu",
    tile: tuple[int, int] | None = None,
) -> dict[str, Any]:
    """Return how many tokens of the kernels are not PyTorch's, and how far their log-probs are off.

    ``tokens`` are the kernels'.  ``not_cpu`` counts those that PyTorch on a CPU would not choose either.
    """
    from seer_worker.sampling.fused import BLOCK, fused_choices
    from seer_worker.sampling.keyed import keyed_choices

    case = draw(seed, rows, vocab, dtype, device)
    tokens, logprobs = fused_choices(**case, tile=tile or (1, BLOCK))
    wanted = keyed_choices(**case)
    on_cpu = keyed_choices(**draw(seed, rows, vocab, dtype)) if device != "cpu" else wanted
    exact = case["logits"].double().log_softmax(-1).gather(1, tokens[:, None])[:, 0]
    off = (logprobs - exact).abs() / exact.abs().clamp(min=1)
    return {
        "cases": rows,
        "differing": int((tokens != wanted).sum()),
        "not_cpu": int((tokens.cpu() != on_cpu.cpu()).sum()),
        "logprob_off": float(off.max()),
        "tokens": tokens.tolist(),
    }


def row_by_row(seed: int, rows: int, vocab: int, dtype: str = "float32", device: str = "cpu") -> list[int]:
    """Return the kernels' tokens of a draw whose rows are sampled one at a time."""
    from seer_worker.sampling.fused import fused_choices

    case = draw(seed, rows, vocab, dtype, device)
    found = []
    for row in range(rows):
        part = {name: None if value is None else value[row : row + 1] for name, value in case.items()}
        found += fused_choices(**part)[0].tolist()
    return found
