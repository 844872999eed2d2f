"""The maths, against cases computed by hand."""

import math

import torch
from seer_rl.losses import clipped_policy_loss, kl_penalty, token_logprobs


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
