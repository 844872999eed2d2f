"""Drafts that are worth what they were in a replay: whose text is like whose, and what a batch verifies."""

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from seer_sim.draft_choice import Offer, choose, gamma_tail, offers_of, together
from seer_sim.drafts import Drafts
from seer_sim.presets import PRESETS
from seer_sim.replayed import MANY_GROUPS, SEGMENT_TOKENS, DraftedText, ReplayedDrafts, ReplayedResponse

POOR = DraftedText(verified=((0.5, 0.2), (0.1, 0.0)), accepted=((0.2, 0.1), (0.1, 0.0)), variance=(0.2, 0.1))
RICH = DraftedText(verified=((1.0, 1.0), (0.9, 0.8)), accepted=((0.9, 0.8), (0.9, 0.8)), variance=(0.2, 0.2))


def response(name, tokens, steps_each):
    group = name.partition("/")[0]
    return ReplayedResponse(name, group, tokens, (steps_each,) * -(-tokens // SEGMENT_TOKENS))


def replayed(*responses, draw=0):
    return ReplayedDrafts((0.0, 0.5), (POOR, RICH), responses, draw=draw)


def test_a_response_that_was_recorded_is_as_it_was():
    drafts = replayed(response("a/0", 640, 60), response("b/0", 640, 25))
    assert drafts.gain("b/0", "b", 640, 0, 64, 0) == pytest.approx(64 / 25 - 1)
    assert drafts.gain("a/0", "a", 640, 0, 640, 0) == pytest.approx(64 / 60 - 1)


def test_a_stretch_is_of_the_kind_of_text_whose_gain_is_nearest():
    drafts = replayed(response("a/0", 640, 60))
    assert drafts.text_of(POOR.gain) == 0
    assert drafts.text_of(RICH.gain + 1) == 1


def test_any_other_is_like_one_of_about_its_length_and_siblings_are_like_one_group():
    short = [response(f"s{number}/0", 100, 30) for number in range(4)]
    long = [response(f"l{number}/0", 4000, 30) for number in range(4)]
    drafts = replayed(*short, *long)
    found = {drafts.like(f"new/{number}", "new", 3000 + number).group for number in range(8)}
    assert len(found) == 1
    assert found < {each.group for each in long}
    drawn = {replayed(*short, *long, draw=draw).like("new/0", "new", 90).group for draw in range(20)}
    assert drawn == {each.group for each in short}


def test_of_many_groups_any_other_is_as_all_are_at_its_position_with_as_many_finished_siblings():
    pairs = [
        pair
        for number in range(MANY_GROUPS)
        for pair in (
            ReplayedResponse(f"g{number}/0", f"g{number}", 128, (64, 64)),
            ReplayedResponse(f"g{number}/1", f"g{number}", 256, (64, 64, 16, 16)),
        )
    ]
    drafts = replayed(*pairs)
    assert drafts.gain("g0/1", "g0", 256, 128, 256, 0) == 3.0
    alone, helped = (drafts.gain("new/0", "new", 300, *at) for at in ((0, 64, 0), (192, 256, 1)))
    assert alone == pytest.approx(0.0, abs=0.05)
    assert 1.5 < helped < 3.0  # near the 3 of all recorded ones, as far as so little text says
    few = replayed(*pairs[:-2])
    assert few.gain("new/0", "new", 300, 192, 256, 1) == few.like("new/0", "new", 300).gain(192, 256)


def test_a_stretch_of_a_response_has_the_gain_of_its_segments_and_beyond_its_end_that_of_the_last():
    one = ReplayedResponse("a/0", "a", 160, (64, 32, 8))
    assert one.gain(0, 64) == 0.0
    assert one.gain(64, 128) == 1.0
    assert one.gain(0, 128) == pytest.approx(128 / 96 - 1)
    assert one.gain(128, 160) == one.gain(500, 600) == 3.0


def test_what_cannot_be_is_refused():
    with pytest.raises(ValueError, match="for each 64 of 160"):
        ReplayedResponse("a/0", "a", 160, (64,))
    with pytest.raises(ValueError, match="must not be below accepted"):
        DraftedText(((0.1,),), ((0.2,),), (0.0,))
    with pytest.raises(ValueError, match="must not rise"):
        DraftedText(((0.1, 0.2),), ((0.1, 0.1),), (0.0,))
    with pytest.raises(ValueError, match="1 levels, verified 2"):
        msgspec.structs.replace(POOR, variance=(0.0,))
    with pytest.raises(ValueError, match="chances must rise"):
        ReplayedDrafts((0.5, 0.0), (POOR, RICH), (response("a/0", 64, 1),))
    with pytest.raises(ValueError, match="a level for each"):
        ReplayedDrafts((0.0,), (POOR, RICH), (response("a/0", 64, 1),))
    with pytest.raises(ValueError, match="ordered"):
        ReplayedDrafts((0.0, 0.5), (RICH, POOR), (response("a/0", 64, 1),))


@given(st.floats(0.01, 50), st.floats(0.001, 100), st.floats(-5, 100))
@example(1.0, 2.0, 5e-324)
def test_what_is_above_a_limit_is_a_share_and_the_larger_part_of_the_mean(mean, variance, least):
    share, part = gamma_tail(mean, variance, least)
    assert 0 <= share <= part <= 1
    assert (share, part) == (1, 1) or least > 0


def test_the_tail_of_an_exponential_is_near_the_exact_one():
    for least in (0.2, 0.5, 1.0, 2.0):
        share, part = gamma_tail(1.0, 1.0, least)
        assert share == pytest.approx(2.718281828**-least, abs=0.01)
        assert part == pytest.approx((1 + least) * 2.718281828**-least, abs=0.01)


def test_a_small_batch_verifies_what_a_large_one_leaves_out():
    cost = PRESETS["h800-qwen2-vl-72b-tp8"]
    levels = offers_of(POOR, 2)

    def level(batch):
        offers = [together([(batch, offer)]) for offer in levels]
        seconds = [cost.pass_s(batch + each.verified, batch, batch + each.verified) for each in offers]
        found = choose(batch, offers, cost.pass_s(batch, batch, batch), seconds)
        return found and found.level

    assert level(8) == 0
    assert level(400) in (1, None)


def test_drafts_that_never_pay_are_not_verified():
    assert choose(4, [Offer(4, 8, 0.01, 0.0)], 1.0, [2.0]) is None


def test_a_request_whose_text_is_drafted_well_ends_sooner(simulate, chunk_job, fixed_drafter):
    drafts = Drafts(replayed=replayed(response("g/0", 640, 60), response("g/1", 640, 25)), request_s=0)

    def seconds(request):
        sim = simulate(
            kv_blocks=40_000,
            block=16,
            max_running=64,
            max_batched=8192,
            cost=PRESETS["h800-qwen2-vl-72b-tp8"],
            acceptance=drafts,
            drafter=fixed_drafter(lambda probes, others: (0, 0)),
        )
        sim.engine.submit(chunk_job("c", request=request, group="g", known=640, max_tokens=640))
        sim.run()
        return sim.clock.now()

    assert seconds("g/1") < 0.8 * seconds("g/0")
