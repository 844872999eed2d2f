"""Advantages within a group, against cases computed by hand."""

import math

import pytest
from seer_rl.advantages import group_advantages


def test_advantages_are_distances_from_the_mean_in_standard_deviations():
    # Mean 1/4, variance (9/16 + 3/16) / 4 = 3/16.
    expected = [3 / math.sqrt(3), *[-1 / math.sqrt(3)] * 3]
    assert group_advantages([1.0, 0.0, 0.0, 0.0]) == pytest.approx(expected, rel=1e-5)


def test_advantages_without_scale_are_distances_from_the_mean():
    assert group_advantages([1.0, 0.0, 0.0, 0.0], scale=False) == [0.75, -0.25, -0.25, -0.25]


@pytest.mark.parametrize("rewards", [[], [1.0], [0.1, 0.1, 0.1]])
def test_equal_rewards_have_no_advantage_at_all(rewards):
    assert group_advantages(rewards) == [0.0] * len(rewards)


def test_the_order_of_rewards_does_not_move_an_advantage_by_a_bit():
    rewards = [0.1, 1e9, 0.7, -1e9, 0.3]
    forwards, backwards = group_advantages(rewards), group_advantages(rewards[::-1])
    assert forwards == backwards[::-1]
