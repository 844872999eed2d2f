"""Updates of a model of any family, compared with starts on the weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from seer_testing.families import FAMILIES, VOCABULARY, write_family

from seer_core.model import Sampling
from seer_core.ports.weights import directory

__all__ = ["TOKENIZER", "expect_updates_to_equal_starts"]

TOKENIZER = Path(__file__).parents[2] / "examples" / "tiny_reasoner" / "weights"
SAMPLINGS = Sampling(0.0, ignore_eos=True), Sampling(1.0, ignore_eos=True)


def _answers(harness: Any, prompts: Sequence[Sequence[int]]) -> tuple[list[list[int]], np.ndarray]:
    """Return the tokens and log-probs of responses, greedy ones and drawn ones."""
    within = [[token % VOCABULARY for token in prompt] for prompt in prompts]
    jobs = [harness.job(prompt, 24, seed, SAMPLINGS[seed % 2]) for seed, prompt in enumerate(within)]
    outputs = harness.run(harness.chunks(jobs))
    return [each.token_ids for each in outputs], np.concatenate([each.logprobs for each in outputs])


def expect_updates_to_equal_starts(
    start: Callable[..., Any], folder: Path, prompts: Sequence[Sequence[int]], name: str
) -> None:
    """Compare an engine after an update, and after one back, with engines started on the weights."""
    old, new = (write_family(folder / each, name, seed, TOKENIZER) for seed, each in enumerate("ab", 1))
    settings = {"dtype": FAMILIES[name].dtype, "max_model_tokens": 128, "max_running": 8}
    fresh = start(new, **settings)
    expected = {new: _answers(fresh, prompts)}
    fresh.run(fresh.engine.stop())
    harness = start(old, **settings)
    expected[old] = _answers(harness, prompts)
    assert expected[old][0] != expected[new][0]
    assert harness.info.fingerprint != fresh.info.fingerprint
    for model in (new, old):
        harness.weight_version += 1
        harness.run(harness.engine.update_weights(directory(model), harness.weight_version))
        tokens, logprobs = _answers(harness, prompts)
        assert tokens == expected[model][0]
        assert (logprobs == expected[model][1]).all()
    harness.run(harness.engine.stop())
