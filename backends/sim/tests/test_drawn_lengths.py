"""Drawn lengths: mean after the cap, tail, correlation within groups, seeds."""

from math import log
from statistics import fmean, pvariance

import msgspec
import pytest
from seer_lab.lengths import DrawnLengths, TrueLengths
from seer_lab.workload_choice import choose_workload

from seer_core.errors import ConfigError

DRAWN = DrawnLengths(400, 16, 7615, 40960, sigma=1.0, group_share=0.7)


def everyone(groups):
    return [tokens for group in groups for tokens in group.output_tokens]


@pytest.mark.parametrize("sigma", [0.0, 0.3, 0.7, 1.2])
def test_the_mean_is_that_after_the_cap(sigma):
    drawn = DrawnLengths(2000, 4, 1000, 3000, sigma=sigma, group_share=0.1)
    lengths = everyone(drawn.draw(1))
    assert fmean(lengths) == pytest.approx(1000, rel=0.03)
    assert 1 <= min(lengths) <= max(lengths) <= 3000


def test_the_mean_may_be_the_cap_itself():
    assert set(everyone(DrawnLengths(3, 2, 50, 50, sigma=0.0, group_share=0.5).draw(0))) == {50}


@pytest.mark.parametrize("share", [0.0, 0.4, 0.9, 1.0])
def test_siblings_share_so_much_of_the_variance(share):
    drawn = DrawnLengths(300, 20, 1000, 10**9, sigma=0.5, group_share=share)
    within = fmean(pvariance([log(n) for n in group.output_tokens]) for group in drawn.draw(0))
    # Each group's own mean takes a twentieth of the variance with it.
    assert within == pytest.approx(0.95 * (1 - share) * 0.5**2, rel=0.1, abs=1e-5)


def test_a_seed_gives_the_same_lengths_and_another_one_others():
    assert DRAWN.draw(3) == DRAWN.draw(3)
    assert everyone(DRAWN.draw(3)) != everyone(DRAWN.draw(4))


def test_more_groups_leave_the_first_ones_as_they_were():
    fewer = msgspec.structs.replace(DRAWN, groups=10)
    assert DRAWN.draw(0)[:10] == fewer.draw(0)


def test_groups_say_prompt_and_limit():
    group = DrawnLengths(1, 3, 10, 20, sigma=0.5, group_share=0.5, prompt_tokens=7).draw(0)[0]
    assert (group.prompt_tokens, group.max_tokens, len(group.output_tokens)) == (7, 20, 3)


def test_true_lengths_answer_by_request(chunk_job):
    assert TrueLengths(by_request={"ra": 12}).of(chunk_job("a", known=None)) == 12


@pytest.mark.parametrize(
    "change", ["sigma=40", "sigma=nan", "mean_tokens=1e999", "groups=1000000000000", "sigma=" + "[" * 5000]
)
def test_lengths_that_cannot_be_drawn_are_refused(change):
    with pytest.raises(ConfigError):
        choose_workload("synthetic", lengths=[change])
