"""A position's log-probs have the same bits in any step, alone or with others, in float32 and bfloat16."""

import pytest

from seer_core.model import Sampling

pytestmark = pytest.mark.engine

GOING_ON = Sampling(1.0, ignore_eos=True)
TOKENS, AGAIN = 130, 100


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_tokens_computed_again_have_the_bits_that_they_had_one_by_one(start, models, prompts, dtype):
    one = start(models[0], dtype=dtype, max_model_tokens=1024, max_batched_tokens=700)
    assert one.info.exactness == "exact"
    texts = prompts(4, 300)
    whole = one.run(one.chunks([one.job(text, TOKENS, n, GOING_ON) for n, text in enumerate(texts)]))
    one.run(one.engine.reset_cache())
    begun = [[*text, *each.token_ids[:AGAIN]] for text, each in zip(texts, whole, strict=True)]
    jobs = [one.job(text, TOKENS - AGAIN, number, GOING_ON) for number, text in enumerate(begun)]
    again = one.run(one.chunks(jobs))
    for text, first, second in zip(begun, whole, again, strict=True):
        assert second.prefilled_tokens == len(text)
        assert list(second.token_ids) == list(first.token_ids[AGAIN:])
        assert list(second.logprobs) == list(first.logprobs[AGAIN:])
