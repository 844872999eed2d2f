"""Micro-batches: the places of tokens in both layouts, and the limit of tokens."""

import pytest
from seer_rl.batches import micro_batches
from seer_rl.trainer import Sample


def sample(prompt, response, advantage=1.0):
    return Sample(prompt, response, [-float(token) for token in response], advantage)


SHORT, LONG, MIDDLE = sample([1], [2, 3]), sample([4, 5], [6, 7, 8], -2.0), sample([9], [10, 11, 12], 0.5)


def test_a_padded_batch_has_a_row_for_each_sample_the_longest_first():
    [batch] = micro_batches([SHORT, LONG], 10, packed=False)
    assert batch.ids.tolist() == [[4, 5, 6, 7, 8], [1, 2, 3, 0, 0]]
    assert batch.positions.tolist() == [[0, 1, 2, 3, 4], [0, 1, 2, 3, 4]]
    assert batch.mask.int().tolist() == [[0, 0, 1, 1, 1], [0, 1, 1, 0, 0]]
    assert batch.targets.tolist() == [6, 7, 8, 2, 3]
    assert batch.advantages.tolist() == [-2.0, -2.0, -2.0, 1.0, 1.0]
    assert batch.engine_logprobs.tolist() == [-6.0, -7.0, -8.0, -2.0, -3.0]


def test_a_packed_batch_has_one_row_in_which_positions_begin_anew():
    [batch] = micro_batches([SHORT, LONG], 8, packed=True)
    assert batch.ids.tolist() == [[4, 5, 6, 7, 8, 1, 2, 3]]
    assert batch.positions.tolist() == [[0, 1, 2, 3, 4, 0, 1, 2]]
    assert batch.targets.tolist() == [6, 7, 8, 2, 3]


@pytest.mark.parametrize("packed", [False, True])
def test_tokens_that_an_environment_answered_are_laid_out_and_not_trained_on(packed):
    turns = Sample([4, 5], [6, 7, 8, 9], [-6.0, 0.0, 0.0, -9.0], 2.0, bytes([1, 0, 0, 1]))
    [batch] = micro_batches([turns, SHORT], 20, packed=packed)
    assert batch.ids.flatten().tolist()[:6] == [4, 5, 6, 7, 8, 9]
    assert batch.targets.tolist() == [6, 9, 2, 3]
    assert batch.trained(batch.ids).tolist() == [5, 8, 1, 2]
    assert batch.advantages.tolist() == [2.0, 2.0, 1.0, 1.0]
    assert batch.engine_logprobs.tolist() == [-6.0, -9.0, -2.0, -3.0]


@pytest.mark.parametrize("packed", [False, True])
def test_each_token_is_predicted_from_the_place_before_it(packed):
    [batch] = micro_batches([SHORT, LONG], 20, packed=packed)
    assert batch.trained(batch.ids).tolist() == [5, 6, 7, 1, 2]
    assert batch.trained(batch.ids[..., None].repeat(1, 1, 3)).shape == (5, 3)


@pytest.mark.parametrize(
    ("limit", "packed", "sizes"),
    [(15, False, [3]), (14, False, [2, 1]), (12, True, [3]), (11, True, [2, 1]), (1, True, [1, 1, 1])],
)
def test_a_micro_batch_holds_no_more_tokens_than_it_may_but_at_least_a_sample(limit, packed, sizes):
    batches = micro_batches([SHORT, LONG, MIDDLE], limit, packed=packed)
    assert [int((batch.positions[batch.ids > 0] == 0).sum()) for batch in batches] == sizes
    assert sorted(token for batch in batches for token in batch.targets.tolist()) == [
        2,
        3,
        6,
        7,
        8,
        10,
        11,
        12,
    ]


def test_samples_of_one_length_stay_in_the_order_of_their_submission():
    [batch] = micro_batches([sample([1], [number]) for number in (7, 3, 9)], 100, packed=False)
    assert batch.targets.tolist() == [7, 3, 9]
