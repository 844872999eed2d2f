"""Differences of log-probs between engine and trainer."""

import pytest
import torch
from seer_rl.agreement import agreement


def test_agreement_has_mean_tail_and_largest_difference():
    engine = torch.zeros(20_000)
    engine[5], engine[6], engine[7] = 0.5, -2.0, 0.25
    found = agreement([engine[:9_000], engine[9_000:]], [torch.zeros(9_000), torch.zeros(11_000)])
    assert found == {"dlogp_mean": pytest.approx(2.75 / 20_000), "dlogp_p9999": 0.25, "dlogp_max": 2.0}
    assert set(agreement([], []).values()) == {0.0}
