"""An instance whose two ranks have half of the experts each (expert parallelism), of any engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from seer_host.routed_experts import ROUTED_EXPERTS, unpacked
from seer_testing.families import VOCABULARY, write_family

from backends.tests.families import SAMPLINGS, TOKENIZER
from backends.tests.ranks_contract import forget_all
from seer_core.ports.engine import ChunkOutput
from seer_core.ports.kv import KVPool
from seer_core.ports.weights import directory

__all__ = ["expect_spread_experts_to_change_nothing"]

TOKENS = 72
MIXTURE = "Qwen3-MoE"


def _routed(rounds: Sequence[Sequence[ChunkOutput]]) -> list[np.ndarray]:
    """Return the experts of each response, joined over its chunks."""
    return [
        np.concatenate([unpacked(output.attachments[ROUTED_EXPERTS])[1] for output in outputs])
        for outputs in zip(*rounds, strict=True)
    ]


def expect_spread_experts_to_change_nothing(
    start: Callable[..., Any],
    pool: KVPool,
    folder: Path,
    prompts: Sequence[Sequence[int]],
    moved: Callable[..., Any],
    *,
    spread: Mapping[str, Any],
    both: Mapping[str, Any],
) -> None:
    """Compare two ranks that share out the experts with one rank: whole, moved, and after an update.

    ``spread`` is arguments of the two, and ``both`` of all.  Where there are any of the latter, they ask for
    routed experts, which are compared.
    """
    old, new = (write_family(folder / each, MIXTURE, seed, TOKENIZER) for seed, each in enumerate("ab", 1))
    texts = [[token % VOCABULARY for token in prompt] for prompt in prompts]
    settings = {"max_model_tokens": 256, "max_running": 8}
    one = start(old, engine_args=dict(both), **settings)
    two = start(old, kv_pool=pool, tensor_parallel=2, engine_args={**both, **spread}, **settings)

    def expect_the_same() -> list[list[int]]:
        for sampling in SAMPLINGS:
            expected, whole = moved([one], texts, sampling, TOKENS, TOKENS)
            for instances, chunk_tokens in (([two], TOKENS), ([one, two], TOKENS // 2), ([two], TOKENS // 3)):
                forget_all([two], pool)
                found, rounds = moved(instances, texts, sampling, TOKENS, chunk_tokens)
                assert found == expected
                pooled = [output.pool_tokens > 0 for outputs in rounds[1:] for output in outputs]
                assert all(pooled) if instances == [two] else not any(pooled)
                if both:
                    for ours, theirs in zip(_routed(rounds), _routed(whole), strict=True):
                        assert (ours == theirs).all()
        return expected

    before = expect_the_same()
    for here in (one, two):
        here.weight_version += 1
        here.run(here.engine.update_weights(directory(new), here.weight_version))
    assert expect_the_same() != before
    for here in (one, two):
        here.run(here.engine.stop())
