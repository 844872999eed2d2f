import msgspec
import pytest
from seer_baselines.vanilla_sd import AdaptiveLength, Settings, VanillaDrafter, seer_make_drafter
from seer_testing import DrafterContract

from seer_core.ports.drafting import Drafter, StepTimes

FREE = StepTimes((1, 64), (0, 16), ((1.0, 1.0), (1.0, 1.0)))
DEAR = StepTimes((1, 64), (0, 16), ((1.0, 1.0), (1.0, 17.0)))


@pytest.mark.parametrize(("method", "longest"), [("suffix", 16), ("draft_model", 3), ("mtp", 1)])
def test_each_method_has_the_paper_s_longest_draft(method, longest):
    drafter = seer_make_drafter(Settings(method=method), None)
    source = drafter.source()
    assert isinstance(drafter, Drafter)
    assert (source.path, source.draft_tokens) == (f"sim:{method}", longest)
    assert drafter.policy(FREE).lengths(1, 3) == (longest, longest)


def test_the_longest_draft_can_be_set():
    assert seer_make_drafter(Settings(draft_tokens=5), None).source().draft_tokens == 5


def test_probes_are_drafted_like_others():
    policy = AdaptiveLength(DEAR, 8)
    assert policy.lengths(4, 0) == policy.lengths(0, 4) == policy.lengths(2, 2)


def test_speculation_is_off_where_a_wider_step_costs_what_it_gives():
    policy = AdaptiveLength(DEAR, 16)
    assert policy.lengths(0, 1) == (16, 16)
    assert policy.lengths(0, 64) == (0, 0)


def test_drafts_get_shorter_when_they_fail_and_longer_when_they_hold():
    times = StepTimes((1,), (0, 16), ((1.0, 2.0),))
    policy = AdaptiveLength(times, 16)
    policy.record_acceptance([100.0] * 4, [20.0, 4.0, 1.0, 0.0])
    worse = policy.lengths(0, 1)[0]
    policy.record_acceptance([10000.0] * 4, [9500.0, 9000.0, 8600.0, 8200.0])
    assert worse < policy.lengths(0, 1)[0]


def test_a_position_counts_as_tried_only_if_all_before_it_held():
    first, second = AdaptiveLength(FREE, 4), AdaptiveLength(FREE, 4)
    first.record_acceptance([100.0, 100.0], [50.0, 25.0])
    second.record_acceptance([150.0], [75.0])
    assert first._accepted / first._tried == pytest.approx(second._accepted / second._tried)


def test_unknown_methods_are_refused():
    with pytest.raises(msgspec.ValidationError, match="magic"):
        msgspec.convert({"method": "magic"}, Settings)


class TestVanillaDrafter(DrafterContract):
    def make(self):
        return VanillaDrafter("suffix", 8)
