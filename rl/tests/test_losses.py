"""The maths, against cases computed by hand."""

import math

import pytest
import torch
from seer_rl.advantages import group_advantages
from seer_rl.agreement import agreement
from seer_rl.config import OptimizerTable
from seer_rl.losses import clipped_policy_loss, kl_penalty, token_logprobs


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


def test_log_probs_of_targets_are_those_of_the_softmax():
    logits = torch.tensor([[math.log(1.0), math.log(3.0)], [math.log(6.0), math.log(2.0)]])
    found = token_logprobs(logits, torch.tensor([1, 1]))
    torch.testing.assert_close(found, torch.tensor([3 / 4, 2 / 8]).log())


def test_the_loss_is_clipped_only_where_going_further_would_lower_it():
    ratios = torch.tensor([1.5, 1.5, 0.5, 0.5, 1.1, 0.9])
    advantages = torch.tensor([2.0, -2.0, 2.0, -2.0, 2.0, 2.0])
    old = torch.full([6], math.log(0.25))
    loss, clipped = clipped_policy_loss(old + ratios.log(), old, advantages, clip_low=0.2, clip_high=0.3)
    torch.testing.assert_close(loss, torch.tensor([-2.6, 3.0, -1.0, 1.6, -2.2, -1.8]))
    assert clipped.tolist() == [True, False, False, True, False, False]


def test_the_gradient_of_an_unmoved_policy_is_that_of_reinforce():
    logprobs = torch.tensor([-1.0, -2.0], requires_grad=True)
    loss, clipped = clipped_policy_loss(
        logprobs, logprobs.detach(), torch.tensor([0.5, -3.0]), clip_low=0.2, clip_high=0.2
    )
    loss.sum().backward()
    assert logprobs.grad.tolist() == [-0.5, 3.0]
    assert not clipped.any()


def test_a_clipped_token_has_no_gradient():
    logprobs = torch.tensor([0.0], requires_grad=True)
    loss, _ = clipped_policy_loss(
        logprobs, torch.tensor([-1.0]), torch.tensor([1.0]), clip_low=0.2, clip_high=0.2
    )
    loss.sum().backward()
    assert logprobs.grad.tolist() == [0.0]


def test_the_penalty_is_k3_and_zero_only_where_both_agree():
    found = kl_penalty(torch.tensor([0.2, 0.2, 0.5]).log(), torch.tensor([0.2, 0.4, 0.25]).log())
    torch.testing.assert_close(
        found, torch.tensor([0.0, 2 - 1 - math.log(2), 0.5 - 1 + math.log(2)]), atol=1e-7, rtol=1e-6
    )


def test_the_mean_penalty_over_the_policys_tokens_is_the_divergence():
    policy, reference = torch.tensor([0.7, 0.2, 0.1]), torch.tensor([0.3, 0.3, 0.4])
    expected = (policy * (policy / reference).log()).sum()
    torch.testing.assert_close((policy * kl_penalty(policy.log(), reference.log())).sum(), expected)


def test_agreement_tells_mean_tail_and_largest_difference():
    engine = torch.zeros(20_000)
    engine[5], engine[6], engine[7] = 0.5, -2.0, 0.25
    found = agreement([engine[:9_000], engine[9_000:]], [torch.zeros(9_000), torch.zeros(11_000)])
    assert found == {"dlogp_mean": pytest.approx(2.75 / 20_000), "dlogp_p9999": 0.25, "dlogp_max": 2.0}
    assert set(agreement([], []).values()) == {0.0}


def test_the_learning_rate_warms_up_and_falls_to_nothing():
    table = OptimizerTable(learning_rate=1.0, warmup=4, decay=10)
    assert [table.rate(update) for update in (0, 1, 3, 5, 10, 11)] == pytest.approx(
        [0.25, 0.5 * 0.9, 0.7, 0.5, 0.0, 0.0]
    )
