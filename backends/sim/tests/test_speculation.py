"""Speculation on simulated instances: times change as acceptance and step times say, and no token does."""

import asyncio

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from seer_sim.acceptance import PAPER_MEAN_LENGTHS, Acceptance, share_out
from seer_sim.drafts import METHODS, Drafts, make_methods
from seer_sim.plugin import Settings
from seer_sim.presets import PRESETS

from seer_core.errors import ConfigError, EngineError
from seer_core.ports.weights import directory

HALF = Drafts(siblings=(0,), rates=((0.5, 0.25, 0.125, 0.0625),), request_s=0)


class Thrifty:
    """One length for all: the one with most tokens per second where drafts do as ``HALF`` says."""

    def __init__(self, step_times):
        self.step_times = step_times
        self.chosen = []

    def lengths(self, probes, others):
        batch = probes + others
        best = max(range(5), key=lambda g: (2 - 0.5**g) / self.step_times.at(batch, g))
        self.chosen.append((batch, best))
        return best, best

    def record_acceptance(self, drafted_at, accepted_at):
        pass


@pytest.fixture
def thrifty(fixed_drafter):
    drafter = fixed_drafter(None)
    drafter.make_policy = Thrifty
    return drafter


def run_all(sim, *jobs):
    for job in jobs:
        sim.engine.submit(job)
    return sim.run()


def decode(simulate, chunk_job, drafter, batch, preset="h800-qwen2-vl-72b-tp8"):
    """Return the simulation of ``batch`` equal requests of 400 tokens."""
    sim = simulate(
        kv_blocks=40_000,
        block=16,
        max_running=1024,
        max_batched=8192,
        cost=PRESETS[preset],
        acceptance=HALF,
        drafter=drafter,
    )
    run_all(sim, *(chunk_job(str(n), prompt=8, max_tokens=400, known=400) for n in range(batch)))
    return sim


@pytest.fixture
def story(simulate, chunk_job):
    """Return a function: a busy run, short of KV, with some aborted, drafted by the given policy."""

    def play(drafter):
        sim = simulate(kv_blocks=30, report_interval_s=0.01, drafter=drafter)
        for n in range(12):
            job = chunk_job(
                str(n), known=None, max_tokens=60, group=f"g{n % 3}", probe=n < 3, siblings=n // 2
            )
            sim.clock.call_at(0.013 * n, lambda job=job: sim.engine.submit(job))
        sim.clock.call_at(0.0411, lambda: sim.engine.abort("1"))
        sim.clock.call_at(0.1523, lambda: sim.engine.abort("11"))
        sim.run()
        return sim

    return play


def test_a_small_batch_gets_faster_by_what_drafts_give(simulate, chunk_job, fixed_drafter):
    plain = decode(simulate, chunk_job, None, 2)
    drafted = decode(simulate, chunk_job, fixed_drafter(lambda probes, others: (4, 4)), 2)
    # Reading 146 GB of weights takes as long for ten positions as for two; sending and sampling eight more
    # positions does not take quite nothing.
    assert plain.clock.now() / drafted.clock.now() == pytest.approx(1 + sum(HALF.rates[0]), rel=0.02)


def test_a_policy_with_step_times_drafts_in_the_tail_and_not_in_a_full_batch(simulate, chunk_job, thrifty):
    small = decode(simulate, chunk_job, thrifty, 4)
    assert thrifty.made.chosen[-1] == (4, 4)
    assert small.clock.now() < 0.6 * decode(simulate, chunk_job, None, 4).clock.now()
    # 1000 requests are bound by computing: each position costs as much as the last.
    large = decode(simulate, chunk_job, thrifty, 1000)
    assert (1000, 0) in thrifty.made.chosen
    assert large.clock.now() == pytest.approx(decode(simulate, chunk_job, None, 1000).clock.now(), rel=1e-9)


def test_drafting_in_a_full_batch_would_have_been_slower(simulate, chunk_job, fixed_drafter):
    always = decode(simulate, chunk_job, fixed_drafter(lambda probes, others: (4, 4)), 1000)
    assert always.clock.now() > 1.3 * decode(simulate, chunk_job, None, 1000).clock.now()


def test_a_probe_that_alone_is_drafted_for_ends_before_its_equals(simulate, chunk_job, fixed_drafter):
    sim = simulate(kv_blocks=500, drafter=fixed_drafter(lambda probes, others: (4, 0)), acceptance=HALF)
    jobs = [chunk_job(name, max_tokens=100, known=100, probe=name == "b") for name in "abc"]
    sink = run_all(sim, *jobs)
    assert [name for name, _ in sink.finished] == ["b", "a", "c"]
    assert sink.outputs["a"].drafted_at == []
    assert sink.outputs["b"].drafted_at[0] > 0


def test_more_finished_siblings_make_a_response_faster(simulate, chunk_job, fixed_drafter):
    sim = simulate(kv_blocks=500, drafter=fixed_drafter(lambda probes, others: (8, 8)))
    jobs = [chunk_job(f"{n}", max_tokens=200, known=200, siblings=n) for n in (0, 1, 5, 15)]
    sink = run_all(sim, *jobs)
    assert [name for name, _ in sink.finished] == ["15", "5", "1", "0"]
    for name, length in zip(("0", "1", "5", "15"), PAPER_MEAN_LENGTHS[1], strict=True):
        assert 200 / sink.outputs[name].steps == pytest.approx(length, rel=0.03)


def test_the_policy_is_asked_for_each_class_and_receives_what_to_expect(simulate, chunk_job, fixed_drafter):
    drafter = fixed_drafter(lambda probes, others: (2, 1))
    sim = simulate(kv_blocks=500, drafter=drafter, acceptance=HALF)
    run_all(sim, *(chunk_job(name, max_tokens=50, known=50, probe=name == "a") for name in "abc"))
    assert drafter.made.calls[0] == (1, 2)
    drafted = [sum(record[0][j] for record in drafter.made.recorded if len(record[0]) > j) for j in range(2)]
    accepted = [sum(record[1][j] for record in drafter.made.recorded if len(record[1]) > j) for j in range(2)]
    outputs = sim.sink.outputs.values()
    assert drafted == [
        sum(output.drafted_at[j] for output in outputs if len(output.drafted_at) > j) for j in range(2)
    ]
    assert accepted == pytest.approx([0.5 * drafted[0], 0.25 * drafted[1]])


def test_tokens_are_the_same_with_and_without_drafts(story, fixed_drafter):
    plain = story(None).sink.outputs
    drafted = story(fixed_drafter(lambda probes, others: (5, others % 4))).sink.outputs
    assert set(plain) == set(drafted)
    for name, output in plain.items():
        assert (drafted[name].token_ids, drafted[name].logprobs) == (output.token_ids, output.logprobs)


def test_two_runs_with_drafts_are_equal_to_the_last_bit(story, fixed_drafter):
    def summary():
        sink = story(fixed_drafter(lambda probes, others: (5, others % 4))).sink
        return msgspec.json.encode([sink.finished, sink.outputs, sink.reports], enc_hook=list)

    assert summary() == summary()


def test_accounts_balance_after_preemptions_and_aborts_in_mid_draft(story, fixed_drafter):
    sim = story(fixed_drafter(lambda probes, others: (5, others % 4)))
    outputs = sim.sink.outputs
    assert set(outputs) == {str(n) for n in range(12)} - {"1", "11"}
    assert sum(output.preemptions for output in outputs.values()) > 0
    for output in outputs.values():
        assert output.steps + sum(output.accepted_at) == len(output.token_ids)
        assert sorted(output.accepted_at, reverse=True) == output.accepted_at
        assert sorted(output.drafted_at, reverse=True) == output.drafted_at
        assert all(a <= d <= output.steps for a, d in zip(output.accepted_at, output.drafted_at, strict=True))
    assert sim.engine._batch.pool.free == sim.engine._batch.pool.capacity
    assert not sim.engine._batch.running
    assert all(0 <= report.kv_usage <= 1 for _, report in sim.sink.reports)


def test_without_a_drafter_each_step_gives_one_token(story):
    for output in story(None).sink.outputs.values():
        assert (output.steps, output.drafted_at, output.accepted_at) == (len(output.token_ids), [], [])


def test_time_spent_in_steps_is_reported(story, fixed_drafter):
    reports = [report for _, report in story(fixed_drafter(lambda probes, others: (3, 3))).sink.reports]
    stepping = [report.stepping_s for report in reports]
    assert sorted(stepping) == stepping
    assert 0 < stepping[-1] <= 0.013 * 12 + 12 * 60 * 0.01
    drafting = [report.drafting_s for report in reports]
    assert sorted(drafting) == drafting
    assert 0 < drafting[-1] < 0.1 * stepping[-1]


def test_an_instance_killed_in_mid_draft_starts_again_with_a_new_policy(simulate, chunk_job, fixed_drafter):
    drafter = fixed_drafter(lambda probes, others: (3, 3))
    sim = simulate(drafter=drafter)
    first = drafter.made
    sim.clock.call_at(0.02, lambda: sim.engine.kill("power cut"))
    assert not run_all(sim, chunk_job("a", max_tokens=100, known=100)).outputs
    asyncio.run(sim.engine.start(sim.sink))
    assert drafter.made is not first
    assert "b" in run_all(sim, chunk_job("b")).outputs
    assert drafter.made.calls


def test_weights_change_and_drafts_go_on(simulate, chunk_job, fixed_drafter):
    drafter = fixed_drafter(lambda probes, others: (3, 3))
    sim = simulate(drafter=drafter)
    run_all(sim, chunk_job("a", max_tokens=30, known=30))
    policy = drafter.made
    asyncio.run(sim.engine.update_weights(directory("elsewhere"), 1))
    sim.engine.forget_group("any")
    assert run_all(sim, chunk_job("b", max_tokens=30, known=30)).outputs["b"].drafted_at
    assert drafter.made is policy


def test_a_new_drafter_counts_from_the_next_start_on(simulate, chunk_job, fixed_drafter):
    sim = simulate()
    sim.engine.set_drafter(fixed_drafter(lambda probes, others: (3, 3)))
    assert run_all(sim, chunk_job("a")).outputs["a"].drafted_at == []
    asyncio.run(sim.engine.stop())
    asyncio.run(sim.engine.start(sim.sink))
    assert run_all(sim, chunk_job("b")).outputs["b"].drafted_at != []
    sim.engine.set_drafter(None)
    asyncio.run(sim.engine.stop())
    asyncio.run(sim.engine.start(sim.sink))
    assert run_all(sim, chunk_job("c")).outputs["c"].drafted_at == []


def test_a_drafter_without_a_policy_is_refused_and_changes_nothing(simulate, chunk_job, fixed_drafter):
    sim = simulate(drafter=fixed_drafter(lambda probes, others: (3, 3)))
    policyless = fixed_drafter(None)
    policyless.make_policy = lambda step_times: None
    with pytest.raises(EngineError, match=r"'sim-0' is simulated: .* FixedDrafter has none"):
        sim.engine.set_drafter(policyless)
    asyncio.run(sim.engine.stop())
    asyncio.run(sim.engine.start(sim.sink))
    assert run_all(sim, chunk_job("a")).outputs["a"].drafted_at != []


def test_drafts_that_exceed_a_steps_tokens_are_not_verified(simulate, chunk_job, fixed_drafter):
    sim = simulate(max_batched=16, drafter=fixed_drafter(lambda probes, others: (8, 8)))
    sink = run_all(sim, *(chunk_job(name, max_tokens=n, known=99) for name, n in (("a", 9), ("b", 30))))
    assert sink.outputs["a"].drafted_at == []
    assert sink.outputs["b"].drafted_at != []


def test_step_times_are_those_of_the_cost_model(simulate, fixed_drafter):
    drafter = fixed_drafter(lambda probes, others: (0, 0))
    sim = simulate(kv_blocks=4096, block=16, max_running=8, drafter=drafter)
    own = drafter.step_times
    assert own.batch == (1, 2, 3, 4, 6, 8)
    assert own.draft_tokens[-1] == 16
    times = asyncio.run(sim.engine.measure_steps([4, 1, 2, 64], [3]))
    assert (times.batch, times.draft_tokens) == ((1, 2, 4), (0, 3))
    cost = PRESETS["cpu-tiny"]
    step_s = cost.pass_s(2 * 4) + 2 * (16384 + 4) * cost.attention_s(4) + 2 * Drafts().request_s
    assert times.at(2, 3) == pytest.approx(step_s, rel=1e-12)
    longer = asyncio.run(sim.engine.measure_steps([2], [3], 20480))
    assert longer.at(2, 3) - times.at(2, 3) == pytest.approx(2 * 4096 * cost.attention_s(4))
    with pytest.raises(EngineError, match="max_running"):
        asyncio.run(sim.engine.measure_steps([64], [0]))


# The acceptance table.


def test_the_paper_s_mean_lengths_come_out_at_eight_drafts():
    acceptance = Acceptance()
    for paths, means in PAPER_MEAN_LENGTHS.items():
        rows = Acceptance(paths=paths).table()
        assert [1 + sum(row[:8]) for row in rows] == pytest.approx(means)
    assert [acceptance.row(n) for n in (0, 1, 4, 5, 14, 15, 511)] == [0, 1, 1, 2, 2, 3, 3]


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"siblings": [1, 2]}, "rise from 0"),
        ({"siblings": [0, 2, 2]}, "rise from 0"),
        ({"tokens": [0, 9, 9]}, "tokens must rise from 0"),
        ({"tokens": [0, 9]}, "4 rows for 2 of tokens"),
        ({"mean_lengths": [1.5]}, "1 rows for 4"),
        ({"mean_lengths": [1.5, 2.0, 2.5, 9.5]}, "between 1 and 9"),
        ({"siblings": [0], "mean_lengths": [4.5], "draft_tokens": 3}, "between 1 and 4"),
        ({"paths": 3}, "3 paths are not known"),
        ({"siblings": [0], "rates": [[0.5, 0.6]]}, "do not rise"),
        ({"siblings": [0], "rates": [[-0.1]]}, "do not rise"),
        ({"siblings": [0], "rates": [[1.1]]}, "do not rise"),
        ({"siblings": [0], "rates": []}, "0 rows for 1"),
        ({"sibling": [0]}, "unknown field"),
    ],
)
def test_a_table_that_cannot_be_is_refused(wrong, words):
    with pytest.raises(msgspec.ValidationError, match=words):
        msgspec.convert({"acceptance": wrong}, Settings)


def test_drafts_get_better_with_what_is_written(simulate, chunk_job, fixed_drafter):
    acceptance = Drafts(tokens=(0, 100), rates=((0.0,), (1.0,)), verified=((1.0,), (1.0,)))
    sim = simulate(kv_blocks=500, acceptance=acceptance, drafter=fixed_drafter(lambda probes, others: (1, 1)))
    early = chunk_job("a", max_tokens=81, known=999)
    late = chunk_job("b", max_tokens=81, known=999, generated=[7] * 61)  # 101 are written in its middle
    outputs = run_all(sim, early, late).outputs
    assert [outputs[name].steps for name in "ab"] == [81, 41]


def test_drafting_takes_its_time_in_the_steps_that_verify_something(simulate, chunk_job, fixed_drafter):
    def seconds(verified, requests):
        drafts = Drafts(siblings=(0,), rates=((0.0,),), verified=((verified,),), step_s=1.0, request_s=0)
        drafter = fixed_drafter(lambda probes, others: (1, 1))
        sim = simulate(kv_blocks=500, acceptance=drafts, drafter=drafter)
        run_all(sim, *(chunk_job(f"{n}", max_tokens=101, known=999) for n in range(requests)))
        return sim.clock.now()

    assert [round(seconds(0.5, n)) for n in (1, 2)] == [50, 75]


def test_a_model_that_accepts_nothing_or_everything_is_possible(simulate, chunk_job, fixed_drafter):
    for length, steps in ((1.0, 91), (9.0, 11)):
        acceptance = Drafts(siblings=(0,), mean_lengths=(length,))
        sim = simulate(
            kv_blocks=500, acceptance=acceptance, drafter=fixed_drafter(lambda probes, others: (8, 8))
        )
        output = run_all(sim, chunk_job("a", max_tokens=91, known=91)).outputs["a"]
        assert output.steps == steps


@given(
    st.lists(st.integers(0, 50), max_size=6),
    st.lists(st.floats(0, 1), min_size=6, max_size=6),
    st.floats(0, 1),
)
@example([1], [5e-324] * 6, 1.0)  # divided by which a number overflows
def test_shares_add_up_and_fall(drafted, rates, share):
    drafted_at = sorted(drafted, reverse=True)
    accepted = round(share * sum(drafted_at))
    counts = share_out(accepted, drafted_at, sorted(rates, reverse=True))
    assert sum(counts) == accepted
    assert all(0 <= count <= limit for count, limit in zip(counts, drafted_at, strict=True))
    assert sorted(counts, reverse=True) == counts


# Ways of drafting.


def test_the_path_of_a_source_names_the_method(simulate, chunk_job, fixed_drafter):
    def tokens_a_step(path, draft_tokens, siblings=0):
        drafter = fixed_drafter(lambda probes, others: (16, 16), path=path, draft_tokens=draft_tokens)
        sim = simulate(kv_blocks=2000, drafter=drafter)
        output = run_all(sim, chunk_job("a", max_tokens=4000, known=4000, siblings=siblings)).outputs["a"]
        return 4000 / output.steps

    for engine in ("sim", "vllm"):
        assert tokens_a_step(f"{engine}:suffix", 16) == pytest.approx(1.67, rel=0.01)
        assert tokens_a_step(f"{engine}:suffix", 16, siblings=15) == pytest.approx(1.67, rel=0.01)
    assert tokens_a_step("sim:draft_model", 3) == pytest.approx(2.19, rel=0.01)
    assert tokens_a_step("sim:mtp", 1) == pytest.approx(1.74, rel=0.01)
    assert tokens_a_step("seer_grouped_spec.source:GroupedSource", 8, siblings=15) == pytest.approx(
        2.53, rel=0.01
    )


def test_no_draft_is_longer_than_its_source_makes_them(simulate, chunk_job, fixed_drafter):
    drafter = fixed_drafter(lambda probes, others: (16, 16), draft_tokens=2)
    output = run_all(
        simulate(kv_blocks=500, drafter=drafter), chunk_job("a", max_tokens=99, known=99)
    ).outputs["a"]
    assert len(output.drafted_at) == 2


def test_a_method_this_engine_does_not_have_is_refused(simulate, fixed_drafter):
    with pytest.raises(ConfigError, match=r"'sim:mtb': .* suffix, draft_model, mtp"):
        simulate(drafter=fixed_drafter(None, path="sim:mtb"))


def test_methods_are_changed_and_added_by_the_config():
    methods = make_methods({"mtp": {"mean_lengths": [1.5]}, "mine": {"siblings": [0], "rates": [[0.9]]}})
    assert methods["mtp"].model == METHODS["mtp"].model
    assert methods["mtp"].means == (1.5,)
    assert methods["mine"].table() == ((0.9,),)
    with pytest.raises(ConfigError, match=r"engine.sim.drafts.mtp: .*1 rows for 2"):
        make_methods({"mtp": {"siblings": [0, 4]}})


def test_more_paths_are_accepted_for_longer_and_cost_more_positions(simulate, chunk_job, fixed_drafter):
    steps, seconds = {}, {}
    for paths in (1, 2, 4):
        drafts = Drafts(paths=paths, request_s=0)
        sim = simulate(
            kv_blocks=2000, acceptance=drafts, drafter=fixed_drafter(lambda probes, others: (8, 8))
        )
        output = run_all(sim, chunk_job("a", max_tokens=4000, known=4000, siblings=5)).outputs["a"]
        steps[paths] = output.steps
        seconds[paths] = sim.clock.now() / output.steps
        assert 4000 / output.steps == pytest.approx(PAPER_MEAN_LENGTHS[paths][2], rel=0.01)
    assert steps[1] > steps[2] > steps[4]
    # The position with the last token, and 8 for each path.
    cost = PRESETS["cpu-tiny"]
    assert seconds[4] - seconds[1] > 0.99 * (cost.pass_s(33) - cost.pass_s(9))


def test_drafting_takes_the_time_of_its_model(simulate, chunk_job, fixed_drafter):
    def seconds_a_step(model):
        drafter = fixed_drafter(lambda probes, others: (3, 3))
        sim = simulate(
            kv_blocks=500,
            cost=PRESETS["h800-qwen2-vl-72b-tp8"],
            acceptance=msgspec.structs.replace(HALF, model=model),
            drafter=drafter,
        )
        output = run_all(sim, chunk_job("a", max_tokens=900, known=900)).outputs["a"]
        return sim.clock.now() / output.steps, drafter.step_times

    slow_s, slow = seconds_a_step("h800-qwen2-vl-7b-tp8")
    quick_s, quick = seconds_a_step("")
    three_passes_s = 3 * PRESETS["h800-qwen2-vl-7b-tp8"].pass_s(1)
    assert slow_s - quick_s == pytest.approx(three_passes_s, rel=0.01)
    # And the policy receives it.
    assert slow.at(1, 3) - quick.at(1, 3) == pytest.approx(three_passes_s, rel=0.05)
    assert slow.at(1, 0) == quick.at(1, 0)
