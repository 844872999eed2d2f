"""Short drafts shown to vLLM's CPU attention as requests of one position: the same numbers come out."""

from __future__ import annotations

import warnings
from types import ModuleType

import pytest

pytestmark = pytest.mark.engine  # imports vLLM: ten seconds


@pytest.fixture(scope="module")
def steps() -> ModuleType:
    """Return the module ``attention_steps``, which imports vLLM."""
    pytest.importorskip("vllm")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # vLLM's own imports
        from vllm.platforms import current_platform

        if not current_platform.is_cpu():
            pytest.skip("vLLM is not built for CPU here")
        from backends.vllm.tests import attention_steps
    return attention_steps


@pytest.mark.parametrize(
    ("lengths", "seen"),
    [
        ([1, 2, 1, 4, 3], [40, 2, 100, 70, 33]),
        ([2], [65]),
        ([None, 9, 1, 30, 2], [64, 40, 1, 30, 300]),  # one of the longest that are shown so
    ],
)
def test_attention_gives_the_same(steps: ModuleType, lengths: list[int | None], seen: list[int]) -> None:
    import torch

    torch.manual_seed(0)
    sizes = [steps.LONGEST if length is None else length for length in lengths]
    whole = steps.step(sizes, seen)
    split = steps.one_position_each(whole)
    assert split.num_reqs == sum(length if length <= steps.LONGEST else 1 for length in sizes)
    assert split.max_query_len == max([length for length in sizes if length > steps.LONGEST], default=1)
    assert split.query_start_loc[-1] == whole.num_actual_tokens
    query = torch.randn(sum(sizes), steps.HEADS, steps.HEAD_DIM)
    blocks = int(whole.block_table_tensor.max()) + 1
    cache = torch.randn(blocks, steps.KV_HEADS, 2 * steps.BLOCK_TOKENS, steps.HEAD_DIM)
    found, expected = steps.attend(split, query, cache), steps.attend(whole, query, cache)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_a_step_without_drafts_is_left_alone(steps: ModuleType) -> None:
    plain = steps.step([1, 1, 20], [5, 6, 20])
    assert steps.one_position_each(plain) is plain
