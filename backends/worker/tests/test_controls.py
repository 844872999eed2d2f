"""Sampling controls beside the same rules, written down token by token."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from seer_worker.sampling.controls import Controlled, control  # noqa: E402
from seer_worker.sampling.sampler import Sampler  # noqa: E402

from seer_core.model import Sampling  # noqa: E402
from seer_core.ports.engine import ChunkJob  # noqa: E402

VOCAB, ENDS = 12, (2, 3)


def by_hand(logits, sampling, prompt, written):
    """Return the row as float64, each rule written for one token at a time."""
    row = [float(each) for each in logits]
    for token in range(VOCAB):
        if sampling.allowed_token_ids and token not in sampling.allowed_token_ids:
            row[token] = -math.inf
    allowed = list(row)
    for word in sampling.bad_words:
        if len(word) == 1 or tuple(written[-len(word) + 1 :]) == word[:-1]:
            row[word[-1]] = -math.inf
    if len(written) < sampling.min_tokens:
        for token in ENDS:
            row[token] = -math.inf
    for token, bias in sampling.logit_bias.items():
        row[token] += bias
    for token in {*prompt, *written}:
        factor = sampling.repetition_penalty
        row[token] = row[token] / factor if row[token] > 0 else row[token] * factor
    for token in set(written):
        row[token] -= sampling.frequency_penalty * written.count(token) + sampling.presence_penalty
    return allowed if max(row) == -math.inf else row


TOKENS = st.integers(0, VOCAB - 1)
SAMPLINGS = st.builds(
    Sampling,
    repetition_penalty=st.sampled_from([1.0, 0.8, 1.5]),
    presence_penalty=st.sampled_from([0.0, 1.0, -0.5]),
    frequency_penalty=st.sampled_from([0.0, 0.25]),
    logit_bias=st.dictionaries(TOKENS, st.sampled_from([5.0, -100.0])),
    allowed_token_ids=st.lists(TOKENS, unique=True).map(tuple),
    bad_words=st.lists(st.lists(TOKENS, min_size=1, max_size=3).map(tuple)).map(tuple),
    min_tokens=st.integers(0, 4),
)


@given(
    samplings=st.lists(SAMPLINGS, min_size=1, max_size=3),
    text=st.lists(TOKENS, min_size=1, max_size=8),
    prompt_tokens=st.integers(1, 8),
    seed=st.integers(0, 2**32 - 1),
)
@settings(max_examples=300, deadline=None)
def test_logits_are_those_that_the_rules_make_token_by_token(samplings, text, prompt_tokens, seed):
    prompt, written = text[:prompt_tokens], text[prompt_tokens:]
    given_ = torch.randn(len(samplings) + 1, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3
    kept = given_.clone()
    rows = [
        Controlled(row, sampling, len(prompt), np.array(text), ENDS) for row, sampling in enumerate(samplings)
    ]
    found = control(given_, rows)
    assert torch.equal(given_, kept)
    assert torch.equal(found[-1], kept[-1])
    for row, sampling in enumerate(samplings):
        expected = torch.tensor(by_hand(kept[row], sampling, prompt, written), dtype=torch.float32)
        torch.testing.assert_close(found[row], expected, rtol=1e-5, atol=1e-5)


def test_where_no_token_is_left_the_allowed_ones_are():
    sampling = Sampling(allowed_token_ids=(2,), min_tokens=3)
    found = control(torch.zeros(1, VOCAB), [Controlled(0, sampling, 1, [5], ENDS)])
    assert found[0].tolist() == [0.0 if token == 2 else -math.inf for token in range(VOCAB)]


def test_an_engine_that_gives_no_text_cannot_control():
    job = ChunkJob("j", "g/0", "g", [5], 1, 4, Sampling(min_p=0.1), 7, 0)
    with pytest.raises(ValueError, match="this engine has no min_p"):
        Sampler(VOCAB).choose(torch.zeros(1, VOCAB), [job], [1])


def test_log_probs_are_of_the_model_s_own_distribution():
    sampling = Sampling(0.0, logit_bias={7: 100.0}, stop_token_ids=(4,), min_tokens=9)
    job = ChunkJob("j", "g/0", "g", [5], 1, 4, sampling, 7, 0)
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(3))
    tokens, logprobs = Sampler(VOCAB).choose(logits, [job], [1], lambda row: [5], ENDS)
    assert tokens == [7]
    assert logprobs == pytest.approx([float(logits.log_softmax(-1)[0, 7])])


def test_each_row_has_as_many_of_the_most_probable_tokens_as_its_chunk_asks_for():
    widths = (2, 0, 5)
    jobs = [
        ChunkJob("j", "g/0", "g", [5], 1, 4, Sampling(0.5, logit_bias={7: 9.0}, top_logprobs=width), 7, 0)
        for width in widths
    ]
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(4))
    found = Sampler(VOCAB).most_probable(logits, jobs)
    for row, top, width in zip(logits.log_softmax(-1).tolist(), found, widths, strict=True):
        ranked = sorted(enumerate(row), key=lambda each: -each[1])[:width]
        assert [token for token, _ in top] == [token for token, _ in ranked]
        assert [each for _, each in top] == pytest.approx([each for _, each in ranked])
