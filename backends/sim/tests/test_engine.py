"""A simulated instance keeps its promises: exact counts, silence after an abort, one report of a loss."""

import asyncio
from itertools import pairwise

import msgspec
import pytest
from seer_sim.presets import PRESETS
from seer_sim.tokens import EOS_TOKEN_ID, generate

from seer_core.errors import EngineError
from seer_core.ports.engine import InstanceClient
from seer_core.ports.weights import directory

STEP_S = 1e-3


def submit_all(sim, *jobs):
    for job in jobs:
        sim.engine.submit(job)
    return sim.run()


@pytest.fixture
def throughput(simulate, chunk_job):
    """Return a function: output tokens per second of equal requests, prefill included."""

    def measure(preset, batch, prompt, tokens):
        sim = simulate(kv_blocks=4000, block=16, max_running=64, max_batched=8192, cost=PRESETS[preset])
        jobs = [chunk_job(str(n), prompt=prompt, max_tokens=tokens, known=tokens) for n in range(batch)]
        submit_all(sim, *jobs)
        return batch * tokens / sim.clock.now()

    return measure


def test_an_engine_satisfies_the_port(simulate):
    assert isinstance(simulate().engine, InstanceClient)


def test_a_chunk_stops_at_its_true_length_with_eos(simulate, chunk_job):
    sink = submit_all(simulate(), chunk_job("a", max_tokens=20, known=8))
    output = sink.outputs["a"]
    assert output.stopped
    assert len(output.token_ids) == len(output.logprobs) == 8
    assert output.token_ids[-1] == EOS_TOKEN_ID
    assert EOS_TOKEN_ID not in output.token_ids[:-1]


def test_max_tokens_cuts_a_chunk_short_of_its_true_length(simulate, chunk_job):
    output = submit_all(simulate(), chunk_job("a", max_tokens=7, known=8)).outputs["a"]
    assert not output.stopped
    assert len(output.token_ids) == 7


def test_tokens_are_independent_of_chunking_and_instance(simulate, chunk_job):
    whole = submit_all(simulate(), chunk_job("a", request="r", max_tokens=50, known=50)).outputs["a"]
    first, second = simulate(), simulate(name="sim-1", max_running=2, block=8)
    tokens, logprobs = [], []
    for number, tokens_wanted in enumerate([3, 17, 1, 29]):
        sim = (first, second)[number % 2]
        name = f"a{number}"
        job = chunk_job(name, request="r", generated=tokens, max_tokens=tokens_wanted, known=50)
        output = submit_all(sim, job).outputs[name]
        tokens = tokens + output.token_ids
        logprobs += output.logprobs
    assert (tokens, logprobs) == (whole.token_ids, whole.logprobs)
    assert all(logprob < 0 for logprob in logprobs)


def test_requests_with_different_seeds_say_different_things(simulate, chunk_job):
    sink = submit_all(simulate(), chunk_job("a", seed=1), chunk_job("b", seed=2))
    assert sink.outputs["a"].token_ids != sink.outputs["b"].token_ids


def test_two_runs_are_equal_to_the_last_bit(simulate, chunk_job):
    def story():
        sim = simulate(kv_blocks=20)
        jobs = [chunk_job(str(n), known=None, max_tokens=60, group=f"g{n % 3}") for n in range(12)]
        sink = submit_all(sim, *jobs)
        return sink.finished, sink.outputs, sink.reports

    assert story() == story()


def test_a_request_that_comes_back_computes_only_what_is_not_in_full_blocks(simulate, chunk_job):
    sim = simulate(block=4)
    first = submit_all(sim, chunk_job("a0", request="r", prompt=9, max_tokens=6, known=99)).outputs["a0"]
    assert (first.cached_tokens, first.prefilled_tokens, first.computed_tokens) == (0, 9, 9 + 5)
    job = chunk_job("a1", request="r", prompt=9, generated=first.token_ids, max_tokens=6, known=99)
    second = submit_all(sim, job).outputs["a1"]
    # 15 tokens are there, 14 of them computed: three full blocks.
    assert (second.cached_tokens, second.prefilled_tokens, second.computed_tokens) == (12, 3, 3 + 5)


def test_the_last_token_of_a_context_is_always_computed(simulate, chunk_job):
    sim = simulate(block=4)
    submit_all(sim, chunk_job("a", request="r", prompt=8, max_tokens=5, known=99))
    output = submit_all(sim, chunk_job("again", request="r", prompt=8, max_tokens=5, known=99)).outputs[
        "again"
    ]
    assert (output.cached_tokens, output.prefilled_tokens) == (4, 4)


def test_siblings_compute_their_prompt_once(simulate, chunk_job):
    sink = submit_all(simulate(), *(chunk_job(name, prompt=10, group="g") for name in "abc"))
    assert [sink.outputs[name].cached_tokens for name in "abc"] == [0, 8, 8]


def test_siblings_keep_their_prompt_once(simulate, chunk_job):
    # 17 tokens of prompt: four blocks for all, and two for each with the 7 tokens that it generates.
    blocks = 4 + 3 * 2

    def most_running(*jobs):
        sink = submit_all(simulate(kv_blocks=blocks, block=4, report_interval_s=0.0), *jobs)
        return max(report.running for _, report in sink.reports), max(
            output.preemptions for output in sink.outputs.values()
        )

    assert most_running(*(chunk_job(name, prompt=17, max_tokens=7, group="g") for name in "abc")) == (3, 0)
    assert most_running(*(chunk_job(name, prompt=17, max_tokens=7) for name in "abc")) == (2, 1)


def test_a_prompt_stays_in_use_until_the_last_sibling_leaves(simulate, chunk_job):
    sim = simulate(kv_blocks=12, block=4)
    pool = sim.engine._batch.pool
    free = []
    sim.sink.on_finish = lambda output: free.append(pool.free)
    lengths = {"a": 3, "b": 9}
    jobs = [chunk_job(name, prompt=17, max_tokens=lengths[name], known=99, group="g") for name in lengths]
    submit_all(sim, *jobs)
    # When a leaves, b has the prompt's four blocks and one of its own.
    assert free == [12 - 5, 12]


def test_a_preempted_request_whose_sibling_goes_on_finds_the_prompt_again(simulate, chunk_job):
    sim = simulate(kv_blocks=8, block=4)
    jobs = [chunk_job(name, prompt=17, max_tokens=12, known=12, group="g") for name in "ab"]
    sink = submit_all(sim, *jobs)
    assert [name for name, _ in sink.finished] == ["a", "b"]
    # Both have 24 tokens in six blocks, four of them common, when the ninth is missing.
    assert (sink.outputs["b"].preemptions, sink.outputs["b"].cached_tokens) == (1, 16)
    assert sink.outputs["b"].computed_tokens < 1 + 17 + 11


def test_overwritten_blocks_are_not_found_again(simulate, chunk_job):
    sim = simulate(kv_blocks=8, block=4)
    tokens = submit_all(sim, chunk_job("a0", request="r", max_tokens=5, known=99)).outputs["a0"].token_ids
    submit_all(sim, chunk_job("b", prompt=20, max_tokens=12, known=99))
    job = chunk_job("a1", request="r", generated=tokens, max_tokens=5, known=99)
    assert submit_all(sim, job).outputs["a1"].cached_tokens == 0


@pytest.mark.parametrize("forget", ["reset_cache", "update_weights", "restart"])
def test_kv_does_not_survive(simulate, chunk_job, forget):
    sim = simulate()
    tokens = submit_all(sim, chunk_job("a0", request="r", max_tokens=9, known=99)).outputs["a0"].token_ids
    match forget:
        case "reset_cache":
            asyncio.run(sim.engine.reset_cache())
        case "update_weights":
            asyncio.run(sim.engine.update_weights(directory("elsewhere"), 1))
        case "restart":
            asyncio.run(sim.engine.stop())
            asyncio.run(sim.engine.start(sim.sink))
    output = submit_all(sim, chunk_job("a1", request="r", generated=tokens, known=99)).outputs["a1"]
    assert output.cached_tokens == 0
    assert output.weight_version == (1 if forget == "update_weights" else 0)


def test_weights_and_cache_stay_while_chunks_are_in_flight(simulate, chunk_job):
    sim = simulate()
    sim.engine.submit(chunk_job("a"))
    with pytest.raises(EngineError, match="busy"):
        asyncio.run(sim.engine.update_weights(directory("elsewhere"), 1))
    with pytest.raises(EngineError, match="busy"):
        asyncio.run(sim.engine.reset_cache())


def test_the_newest_is_preempted_and_its_second_computing_is_counted(simulate, chunk_job):
    sim = simulate(kv_blocks=8, block=4)
    old, new = (chunk_job(name, prompt=4, max_tokens=20, known=20) for name in ("old", "new"))
    sink = submit_all(sim, old, new)
    assert [name for name, _ in sink.finished] == ["old", "new"]
    assert (sink.outputs["old"].preemptions, sink.outputs["old"].computed_tokens) == (0, 4 + 19)
    # Both have 16 tokens in four blocks when one more is missing.  The old one ends with six blocks, so
    # 8 of the new one's 16 are still found, and of its 17 tokens 9 are computed before it goes on.
    assert (sink.outputs["new"].preemptions, sink.outputs["new"].computed_tokens) == (1, 16 + 9 + 6)
    assert (sink.outputs["new"].cached_tokens, sink.outputs["new"].prefilled_tokens) == (0, 4)


def test_the_newest_ends_early_with_what_it_has_where_it_may(simulate, chunk_job):
    sim = simulate(kv_blocks=8, block=4)
    old, new = (chunk_job(name, prompt=4, max_tokens=20, known=20, early=True) for name in ("old", "new"))
    sink = submit_all(sim, old, new)
    # Both have 16 computed tokens in four blocks when one more is missing.
    assert [name for name, _ in sink.finished] == ["new", "old"]
    short, whole = sink.outputs["new"], sink.outputs["old"]
    assert (len(short.token_ids), short.stopped, short.preemptions) == (13, False, 0)
    assert (len(whole.token_ids), whole.stopped, whole.preemptions) == (20, True, 0)
    rest = chunk_job("rest", request="rnew", prompt=4, generated=short.token_ids, max_tokens=7, known=20)
    alone = submit_all(simulate(), chunk_job("new", prompt=4, max_tokens=20, known=20)).outputs["new"]
    assert short.token_ids + submit_all(sim, rest).outputs["rest"].token_ids == alone.token_ids


def test_a_chunk_that_alone_is_too_large_ends_early_and_is_answered_at_once(simulate, chunk_job):
    sim = simulate(kv_blocks=2, block=4)
    sim.engine._info = msgspec.structs.replace(sim.engine._info, max_model_tokens=64)
    output = submit_all(sim, chunk_job("a", prompt=4, max_tokens=20, known=20, early=True)).outputs["a"]
    assert len(output.token_ids) == 5  # eight are computed, and one more is sampled


def test_a_chunk_that_ends_early_can_still_be_aborted(simulate, chunk_job):
    sim = simulate(kv_blocks=8, block=4)
    jobs = [chunk_job(name, prompt=4, max_tokens=20, known=20, early=True) for name in ("old", "new")]
    for job in jobs:
        sim.engine.submit(job)
    while not sim.engine._batch._ended_early:
        sim.clock.step()
    sim.engine.abort("new")
    assert list(sim.run().outputs) == ["old"]


def test_kv_usage_never_exceeds_the_capacity(simulate, chunk_job):
    sim = simulate(kv_blocks=20, block=4, report_interval_s=0.0)
    sink = submit_all(sim, *(chunk_job(str(n), prompt=5, max_tokens=40, known=40) for n in range(8)))
    usages = [report.kv_usage for _, report in sink.reports]
    assert max(usages) > 0.9
    assert all(0 <= usage <= 1 for usage in usages)
    assert all(report.running <= 8 for _, report in sink.reports)


def test_no_more_than_max_running_run_at_once(simulate, chunk_job):
    sim = simulate(max_running=2, report_interval_s=0.0)
    sink = submit_all(sim, *(chunk_job(name, max_tokens=n, known=99) for n, name in enumerate("abcd", 3)))
    assert max(report.running for _, report in sink.reports) == 2
    assert sink.reports[0][1].waiting == 2
    assert [name for name, _ in sink.finished] == list("abcd")


def test_a_chunk_submitted_when_another_finishes_joins_the_very_next_step(simulate, chunk_job):
    sim = simulate(max_running=2)
    sim.sink.on_finish = lambda output: (
        output.job_id == "a" and sim.engine.submit(chunk_job("c", max_tokens=4))
    )
    together = submit_all(sim, chunk_job("a", max_tokens=4), chunk_job("b", max_tokens=8))
    times = dict(together.finished)
    # c's four steps are b's last four.
    assert times["c"] == times["b"]


def test_an_instance_that_finds_two_jobs_at_one_instant_runs_them_together(simulate, chunk_job):
    sim = simulate()

    def submit_a():
        sim.engine.submit(chunk_job("a"))
        sim.clock.call_at(1.0, lambda: sim.engine.submit(chunk_job("b")))

    sim.clock.call_at(1.0, submit_a)
    times = dict(sim.run().finished)
    assert times["a"] == times["b"]


def test_a_chunk_submitted_during_a_long_run_waits_for_one_step_only(simulate, chunk_job):
    sim = simulate(kv_blocks=500)
    sim.engine.submit(chunk_job("long", max_tokens=1000, known=1000))
    sim.clock.call_at(0.1, lambda: sim.engine.submit(chunk_job("short", max_tokens=1)))
    times = dict(sim.run().finished)
    assert 0.1 < times["short"] < 0.1 + 5 * STEP_S
    assert times["long"] > 1.0


def test_telemetry_comes_at_most_once_an_interval(simulate, chunk_job):
    sim = simulate(report_interval_s=0.05)
    sink = submit_all(sim, *(chunk_job(str(n), max_tokens=n + 3, known=99) for n in range(60)))
    moments = [when_s for when_s, _ in sink.reports]
    assert len(moments) > 3
    assert all(after - before >= 0.05 for before, after in pairwise(moments))


@pytest.mark.parametrize("when_s", [0.0, 0.01])
def test_an_aborted_chunk_sends_nothing_more_and_leaves_no_kv(simulate, chunk_job, when_s):
    sim = simulate(kv_blocks=10, report_interval_s=0.0)
    sim.engine.submit(chunk_job("unwanted", max_tokens=30, known=30))
    sim.clock.call_at(when_s, lambda: sim.engine.abort("unwanted"))
    sim.clock.call_at(0.02, lambda: sim.engine.submit(chunk_job("other", max_tokens=30, known=30)))
    sink = sim.run()
    assert list(sink.outputs) == ["other"]
    assert sink.outputs["other"].preemptions == 0
    assert not sink.failed


def test_aborting_a_waiting_chunk_lets_the_next_one_in(simulate, chunk_job):
    sim = simulate(max_running=1)
    for name in "abc":
        sim.engine.submit(chunk_job(name))
    sim.clock.call_at(0.005, lambda: sim.engine.abort("b"))
    assert [name for name, _ in sim.run().finished] == ["a", "c"]


def test_aborting_a_chunk_that_finishes_at_the_same_instant_silences_it(simulate, chunk_job):
    sim = simulate()
    sim.sink.on_finish = lambda output: sim.engine.abort("b")
    assert list(submit_all(sim, chunk_job("a"), chunk_job("b"), chunk_job("c")).outputs) == ["a", "c"]


def test_an_aborted_chunk_under_way_does_not_keep_the_instance_busy(simulate, chunk_job):
    sim = simulate()
    sim.engine.submit(chunk_job("a"))
    while sim.clock.now() == 0:
        sim.clock.step()
    sim.engine.abort("a")
    asyncio.run(sim.engine.update_weights(directory("elsewhere"), 3))
    assert submit_all(sim, chunk_job("b")).outputs["b"].weight_version == 3


def test_aborting_an_unknown_chunk_does_nothing(simulate):
    simulate().engine.abort("unknown")


def test_a_loss_is_reported_once_and_voids_every_chunk(simulate, chunk_job):
    sim = simulate()
    sim.engine.submit(chunk_job("a", max_tokens=100, known=100))
    sim.engine.submit(chunk_job("too long", max_tokens=10_000))
    sim.engine.kill("power cut")
    sim.engine.kill("again")
    sim.engine.submit(chunk_job("late"))
    sink = sim.run()
    assert sink.losses == [("sim-0", "power cut")]
    assert not sink.outputs
    assert not sink.failed


def test_a_lost_instance_starts_again_when_it_may(simulate, chunk_job):
    sim = simulate(start_s=2.0)
    began_s = sim.clock.now()
    sim.engine.kill("power cut", down_s=30.0)
    asyncio.run(sim.engine.start(sim.sink))
    assert sim.clock.now() == began_s + 30.0
    assert "a" in submit_all(sim, chunk_job("a")).outputs


def test_starting_takes_virtual_time(simulate):
    assert simulate(start_s=2.5).clock.now() == 2.5


def test_a_stopped_instance_says_nothing_and_refuses_chunks(simulate, chunk_job):
    sim = simulate()
    sim.engine.submit(chunk_job("a"))
    asyncio.run(sim.engine.stop())
    asyncio.run(sim.engine.stop())
    assert not sim.run().outputs
    with pytest.raises(EngineError, match="has not started"):
        sim.engine.submit(chunk_job("b"))


def test_a_running_instance_does_not_start_twice(simulate):
    sim = simulate()
    with pytest.raises(EngineError, match="started already"):
        asyncio.run(sim.engine.start(sim.sink))


def test_a_chunk_in_flight_is_not_taken_twice(simulate, chunk_job):
    sim = simulate()
    sim.engine.submit(chunk_job("a"))
    with pytest.raises(EngineError, match="'a'"):
        sim.engine.submit(chunk_job("a"))


def test_a_chunk_beyond_the_model_or_its_own_end_fails(simulate, chunk_job):
    sim = simulate(kv_blocks=10, block=4)
    sim.engine.submit(chunk_job("long", prompt=30, max_tokens=11))
    sim.engine.submit(chunk_job("over", generated=[7] * 8, known=8))
    assert not sim.sink.failed
    sink = sim.run()
    assert [name for name, _ in sink.failed] == ["long", "over"]
    assert "max_model_tokens = 40" in sink.failed[0][1]


def test_decode_throughput_is_what_the_preset_was_fitted_to(throughput):
    measured = [throughput("cpu-tiny", batch, 8, 400) for batch in (1, 8, 32)]
    assert measured == pytest.approx([517, 3236, 7304], rel=0.15)


def test_h800_presets_are_bound_by_memory_in_decoding(throughput):
    # One TP8 instance of 72 B reads 146 GB a step: 15 ms and the overhead, for one token or many.
    assert throughput("h800-qwen2-vl-72b-tp8", 1, 200, 400) == pytest.approx(1 / 0.020, rel=0.15)
    assert throughput("h800-qwen2-vl-72b-tp8", 64, 200, 400) == pytest.approx(64 / 0.024, rel=0.15)
    # One GPU reads the 29.5 GB of a dense 14 B in 22 ms.
    assert throughput("h800-qwen2.5-14b", 1, 200, 400) == pytest.approx(1 / 0.025, rel=0.15)
    # A mixture of experts reads 3 of 16 parts for one token, and all for many.
    assert throughput("h800-moonlight", 1, 200, 400) == pytest.approx(1 / 0.0085, rel=0.15)
    assert throughput("h800-moonlight", 64, 200, 400) == pytest.approx(64 / 0.030, rel=0.15)


def test_what_is_drawn_gives_a_list_as_an_array_does():
    tokens, logprobs = generate(7, 5, 9, True, 512)
    assert tokens.tolist() == list(tokens) == tokens
    assert logprobs.tolist() == list(logprobs)
    assert len(tokens.tolist()) == len(logprobs.tolist()) == 9
