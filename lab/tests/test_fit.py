"""The fit: a known cost model is recovered from its step times."""

import msgspec
import pytest
from seer_cli.profiles import make_profile, mean_info, mean_times
from seer_lab.fit import fit
from seer_sim.drafts import Drafts
from seer_sim.presets import PRESETS
from seer_sim.profile import step_times

from seer_core.errors import ConfigError
from seer_core.model import InstanceInfo

INFO = InstanceInfo("sim-0", 65536, 16, 128, 16384, kv_bytes_per_token=2048)
BATCH = (1, 2, 4, 8, 16, 32, 64)
GRID = (BATCH, (0, 1, 2, 4, 8), (64, 1024))


def profile_of(cost, grid=GRID, info=INFO, drafts_s=0.0):
    batch, lengths, contexts = grid
    drafts = Drafts(request_s=0, step_s=drafts_s)
    tables = [step_times(cost, drafts, info, batch, lengths, each) for each in contexts]
    return make_profile(tables, [info], engine="sim", instances=2, together=True)


def changed(preset="cpu-tiny", **constants):
    return msgspec.structs.replace(PRESETS[preset], **constants)


def steps_of(cost, context):
    return step_times(cost, Drafts(request_s=0), INFO, (3, 24, 100), (0, 3, 5), context).seconds


LINEAR = changed(request_s=4e-5, sampled_s=2e-5, weight_bytes=1e-6)
BOUND = changed(
    # The weights bound steps of up to 64 positions, reading KV those of requests of up to 5.
    weight_bytes=64 * 4.8e6 * 100e9 / 61e9,
    kv_bytes_per_token=5 * 4096 * 100e9 / 61e9,
    attention_flops=4096,
)


@pytest.mark.parametrize("cost", [LINEAR, BOUND], ids=["linear", "bound by reading"])
@pytest.mark.parametrize("context", [32, 600])
def test_a_known_cost_model_is_recovered(cost, context):
    fitted = fit(profile_of(cost))
    assert fitted.worst_error < 1e-6
    for mine, true in zip(steps_of(fitted.cost, context), steps_of(cost, context), strict=True):
        assert mine == pytest.approx(true, rel=1e-6)


def test_a_measured_prefill_separates_positions_computed_from_positions_sampled():
    position_s = LINEAR.flops_per_token / LINEAR.flops_per_s
    info = msgspec.structs.replace(INFO, prefill_s_per_token=position_s)
    cost = fit(profile_of(LINEAR, info=info)).cost
    assert cost.pass_s(1000) - cost.pass_s(500) == pytest.approx(500 * position_s)
    assert cost.sampled_s == pytest.approx(LINEAR.sampled_s)
    assert cost.request_s == pytest.approx(LINEAR.request_s)
    assert cost.overhead_s == pytest.approx(LINEAR.overhead_s)


def test_what_every_step_with_drafts_takes_is_separated_from_what_drafts_take():
    fitted = fit(profile_of(LINEAR, drafts_s=5e-4))
    assert fitted.drafts_s == pytest.approx(5e-4)
    assert fitted.cost.overhead_s == pytest.approx(LINEAR.overhead_s)
    assert fitted.worst_error < 1e-6


def test_no_cost_is_negative_where_times_are_noisy():
    times = profile_of(LINEAR)
    noisy = tuple(
        tuple(second * (1.4 if (i + j) % 2 else 0.8) for j, second in enumerate(row))
        for i, row in enumerate(times.seconds)
    )
    fitted = fit(msgspec.structs.replace(times, seconds=noisy))
    assert min(msgspec.structs.astuple(fitted.cost)) >= 0
    assert 0.05 < fitted.median_error < fitted.worst_error < 0.6


@pytest.mark.parametrize(
    ("profile", "words"),
    [
        (profile_of(LINEAR, (BATCH, (0, 2), (64,))), "a single length of context"),
        (profile_of(LINEAR, ((4,), (0, 2), (64, 512))), "a single batch size"),
        (msgspec.structs.replace(profile_of(LINEAR), info=None), "nothing of its instance"),
        (msgspec.structs.replace(profile_of(LINEAR), context_tokens=0), "or its contexts"),
    ],
)
def test_a_profile_that_says_too_little_is_refused_with_the_command_that_says_more(profile, words):
    with pytest.raises(ConfigError, match=words) as caught:
        fit(profile)
    assert "--context 64 --context 1024" in str(caught.value)


def test_what_two_instances_measured_of_moving_is_averaged():
    slow = msgspec.structs.replace(INFO, prefill_s_per_token=3e-5, fetch_s_per_token=2e-6, chunk_s=1e-3)
    quick = msgspec.structs.replace(slow, id="sim-1", prefill_s_per_token=1e-5, fetch_s_per_token=4e-6)
    mean = mean_info([slow, quick])
    assert (mean.id, mean.prefill_s_per_token) == ("sim-0", pytest.approx(2e-5))
    assert mean.fetch_s_per_token == pytest.approx(3e-6)
    assert mean.chunk_s == pytest.approx(1e-3)
    assert mean_info([INFO]) == INFO


def test_a_time_that_one_instance_did_not_measure_halves_no_other_s():
    measured = msgspec.structs.replace(INFO, step_s=0.02)
    assert mean_info([measured, INFO]).step_s == 0.02


def test_the_mean_of_two_instances_is_over_the_batches_that_both_ran():
    times = profile_of(LINEAR)
    longer = msgspec.structs.replace(
        times, batch=times.batch[1:], seconds=tuple(tuple(3 * s for s in row) for row in times.seconds[1:])
    )
    mean = mean_times([times, longer])
    assert mean.batch == times.batch[1:]
    assert mean.seconds[0] == pytest.approx([2 * second for second in times.seconds[1]])
    with pytest.raises(ConfigError, match="no batch in common"):
        mean_times([times, msgspec.structs.replace(times, batch=tuple(1000 + size for size in times.batch))])


def test_selective_drafts_compute_fewer_positions_and_give_the_same_tokens():
    drafts = Drafts(siblings=(0,), rates=((0.4, 0.2),), verified=((0.5, 0.25),))
    assert [drafts.positions(0, tokens) for tokens in (0, 1, 2)] == [1, 1.5, 1.75]
    with pytest.raises(ValueError, match="none below that of rates"):
        Drafts(siblings=(0,), rates=((0.4,),), verified=((0.3,),))
    with pytest.raises(ValueError, match="row by row"):
        Drafts(siblings=(0,), rates=((0.4,),), verified=((0.5, 0.5),))
