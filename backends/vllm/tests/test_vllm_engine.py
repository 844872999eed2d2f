"""A real vLLM: the same tokens however the work is cut, and an honest account of the work."""

import json
import math
import urllib.request
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from msgspec import structs
from seer_vllm.plugin import MAX_TEMPERATURE
from seer_worker.kv_room import token_bytes

from seer_core.errors import EngineError
from seer_core.model import GroupContext, InstanceStatus, Request, Sampling
from seer_core.ports.weights import directory
from tests.support.patience import PATIENCE_S

pytestmark = pytest.mark.engine

GREEDY, PLAIN, CUT = Sampling(0.0), Sampling(1.0), Sampling(0.8, top_p=0.9, top_k=20)
SAMPLINGS = [
    pytest.param(GREEDY, id="greedy"),
    pytest.param(PLAIN, id="plain", marks=pytest.mark.long),
    pytest.param(CUT, id="top-k and top-p"),
]
"""One is enough to show that nothing is lost where work is cut; `make test-all` has all."""
EOS, BLOCK = 2, 32


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_whole_divided_alone_and_together_give_the_same_tokens(roomy, prompts, sampling):
    whole = roomy.whole(prompts(4), sampling, 90)
    assert roomy.divided(prompts(4), sampling, 90, chunk_tokens=40) == whole
    assert roomy.alone(prompts(4), sampling, 90) == whole
    assert len({tuple(response) for response in whole}) == 4


def test_a_chunk_that_streams_sends_what_it_writes_while_it_runs(roomy, prompts):
    jobs = [roomy.job(prompt, 60, seed, CUT) for seed, prompt in enumerate(prompts(4))]
    outputs = roomy.run(roomy.chunks(jobs))
    assert [len(roomy.streamed(job)[0]) > 0 for job in jobs] == [job.streams for job in jobs]
    plain = [structs.replace(job, id=f"{job.id} plain", streams=False) for job in jobs]
    assert [each.token_ids for each in roomy.run(roomy.chunks(plain))] == [each.token_ids for each in outputs]


def test_siblings_differ_by_their_seeds_alone(roomy, prompts):
    [prompt] = prompts(1)
    assert len({tuple(response) for response in roomy.whole([prompt] * 6, PLAIN, 60)}) == 6
    assert len({tuple(response) for response in roomy.whole([prompt] * 6, GREEDY, 60)}) == 1


def test_a_response_ends_with_its_eos_token(roomy, prompts):
    jobs = [roomy.job(prompt, 120, seed, PLAIN) for seed, prompt in enumerate(prompts(16))]
    outputs = roomy.run(roomy.chunks(jobs))
    assert {output.stopped for output in outputs} == {True, False}
    for output in outputs:
        assert (output.token_ids[-1] == EOS) == output.stopped
        assert EOS not in output.token_ids[:-1]
        assert output.stopped or len(output.token_ids) == 120


def test_logprobs_are_those_of_the_raw_model_with_any_sampling(roomy, prompts):
    [prompt] = prompts(1)
    [whole] = roomy.run(roomy.chunks([roomy.job(prompt, 20, 1, CUT)]))
    for place in (0, 7, 19):
        greedy_start = [*prompt, *whole.token_ids[:place]]
        [next_token] = roomy.run(roomy.chunks([roomy.job(greedy_start, 1, 1, CUT)]))
        assert next_token.token_ids == whole.token_ids[place : place + 1]
        assert next_token.logprobs == pytest.approx(whole.logprobs[place : place + 1], abs=1e-4)
    assert len(whole.logprobs) == 20
    assert max(whole.logprobs) <= 0
    [top] = roomy.run(roomy.chunks([roomy.job(prompt, 1, 1, GREEDY)]))
    assert whole.logprobs[0] <= top.logprobs[0] + 1e-4


def test_work_is_counted_position_by_position(roomy, prompts):
    roomy.run(roomy.engine.reset_cache())
    [prompt] = prompts(1, tokens=100)
    [first] = roomy.run(roomy.chunks([roomy.job(prompt, 50, 0, CUT)]))
    made = len(first.token_ids)
    assert (first.cached_tokens, first.prefilled_tokens) == (0, 100)
    assert (first.computed_tokens, first.preemptions) == (100 + made - 1, 0)
    [second] = roomy.run(roomy.chunks([roomy.job([*prompt, *first.token_ids], 10, 0, CUT)]))
    cached = (100 + made - 1) // BLOCK * BLOCK
    assert (second.cached_tokens, second.prefilled_tokens) == (cached, 100 + made - cached)
    assert second.computed_tokens == second.prefilled_tokens + len(second.token_ids) - 1


def test_a_reset_cache_forgets_everything(roomy, prompts):
    [prompt] = prompts(1, tokens=90)
    roomy.whole([prompt], GREEDY, 5)
    [warm] = roomy.run(roomy.chunks([roomy.job(prompt, 5, 0, GREEDY)]))
    roomy.run(roomy.engine.reset_cache())
    [cold] = roomy.run(roomy.chunks([roomy.job(prompt, 5, 0, GREEDY)]))
    assert (warm.cached_tokens, cold.cached_tokens) == (64, 0)
    assert warm.token_ids == cold.token_ids


def test_a_chunk_that_cannot_be_run_is_given_back_with_the_reason(roomy, prompts):
    [prompt] = prompts(1)
    too_long = roomy.job(prompt, 1024, 0, PLAIN)
    empty = roomy.job([], 5, 0, PLAIN)
    foreign = roomy.job([5000], 5, 0, PLAIN)
    cold = roomy.job(prompt, 5, 0, Sampling(-1.0))
    hot = roomy.job(prompt, 5, 0, Sampling(math.nextafter(MAX_TEMPERATURE, math.inf)))
    fine = roomy.job(prompt, 5, 0, Sampling(MAX_TEMPERATURE))
    jobs = (too_long, empty, foreign, cold, hot, fine)
    for job in jobs:
        roomy.engine.submit(job)
    roomy.run(roomy.until(lambda: all(job.id in roomy.answers for job in jobs)))
    assert roomy.failures[too_long.id] == "the chunk needs 1064 tokens, max_model_tokens is 1024"
    assert "vLLM refuses the chunk" in roomy.failures[empty.id]
    assert "vLLM refuses the chunk" in roomy.failures[foreign.id]
    assert "temperature" in roomy.failures[cold.id]
    assert "temperature" in roomy.failures[hot.id]
    assert len(roomy.outputs[fine.id].token_ids) == 5


def test_an_aborted_chunk_is_never_answered(roomy, prompts):
    [prompt], endless = prompts(1), Sampling(0.0, ignore_eos=True)
    long, short, last = (roomy.job(prompt, tokens, 0, endless) for tokens in (900, 5, 30))
    roomy.engine.submit(long)
    roomy.run(roomy.chunks([short]))
    roomy.engine.abort(long.id)
    roomy.engine.abort("an unknown chunk")
    roomy.run(roomy.chunks([last]))
    assert long.id not in roomy.answers
    assert max(roomy.answers.values()) == 1


def test_load_is_reported_while_busy_and_once_more_when_idle(roomy, prompts):
    roomy.report_while_busy(prompts(12), 900)
    busy, idle = max(roomy.reports, key=lambda report: report.running), roomy.reports[-1]
    assert busy.running > 0
    assert 0 < busy.kv_usage < 1
    assert (idle.running, idle.waiting, idle.kv_usage) == (0, 0, 0.0)


@pytest.fixture(scope="module")
def tight(start, models):
    """An instance of the first model with KV memory for few, which counts its own figures."""
    per_token = token_bytes(json.loads((models[0] / "config.json").read_text()), "auto")
    tight = start(models[0], max_model_tokens=512, kv_cache_bytes=900 * per_token, metrics=True)
    yield tight
    tight.run(tight.engine.stop())


def test_as_many_siblings_as_can_reserve_run_together_and_none_is_preempted(tight, prompts):
    tight.run(tight.engine.reset_cache())
    tight.reports.clear()
    [prompt] = prompts(1, tokens=321)
    status, group = InstanceStatus(tight.info, 0), GroupContext("g", 0, 16, len(prompt), 63)
    jobs = []
    while status.footprint(Request(group, 0), 63) <= status.free_kv_tokens:
        status.reserved_kv_tokens += status.footprint(Request(group, 0), 63)
        group.in_flight = {status.id: len(jobs) + 1}
        jobs.append(tight.job(prompt, 63, len(jobs), PLAIN))
    # Ten blocks of prompt for all of them and two for each; without sharing two would fit.
    assert len(jobs) == (27 - 10) // 2
    outputs = tight.run(tight.chunks(jobs))
    assert [output.preemptions for output in outputs] == [0] * len(jobs)
    assert sorted(output.cached_tokens for output in outputs) == [0] + [320] * (len(jobs) - 1)
    assert max(report.running for report in tight.reports) == len(jobs)


def test_preemptions_change_no_token_and_are_accounted_for(tight, roomy, prompts):
    tight.outputs.clear()
    assert tight.info.kv_capacity_tokens == (900 // BLOCK - 1) * BLOCK
    assert tight.whole(prompts(10), PLAIN, 100) == roomy.whole(prompts(10), PLAIN, 100)
    tight.expect_preemptions()


def test_chunks_end_early_where_they_may_and_none_is_preempted(tight, roomy, prompts):
    responses, ended_early = tight.ended_early(prompts(10), PLAIN, 100)
    assert responses == roomy.whole(prompts(10), PLAIN, 100)
    assert ended_early > 0


def test_new_weights_leave_nothing_of_the_old_ones(newer, models, roomy, prompts):
    expected = newer.whole(prompts(4), PLAIN, 40)
    before = roomy.whole(prompts(4), PLAIN, 40)

    old_version = roomy.weight_version
    roomy.run(roomy.engine.update_weights(directory(models[1]), old_version + 1))
    stale = roomy.job(prompts(1)[0], 5, 0, PLAIN)
    roomy.engine.submit(stale)
    roomy.run(roomy.until(lambda: stale.id in roomy.answers))
    assert (
        roomy.failures[stale.id]
        == f"the chunk wants weight version {old_version}, loaded is {old_version + 1}"
    )
    roomy.weight_version = old_version + 1
    outputs = roomy.run(roomy.chunks([roomy.job(p, 40, i, PLAIN) for i, p in enumerate(prompts(4))]))
    assert [output.token_ids for output in outputs] == expected
    assert {output.cached_tokens for output in outputs} == {0}
    assert {output.weight_version for output in outputs} == {old_version + 1}

    roomy.run(roomy.engine.update_weights(directory(models[0]), old_version + 2))
    roomy.weight_version = old_version + 2
    assert roomy.whole(prompts(4), PLAIN, 40) == before


def test_weights_that_are_not_there_change_nothing(roomy, prompts, tmp_path):
    before = roomy.whole(prompts(2), PLAIN, 20)
    with pytest.raises(EngineError, match=r"UpdateWeights on instance 'vllm-0': no safetensors in"):
        roomy.run(roomy.engine.update_weights(directory(tmp_path), 9))
    assert roomy.whole(prompts(2), PLAIN, 20) == before


def test_control_calls_are_refused_while_chunks_run(roomy, prompts, models: tuple[Path, Path]):
    job = roomy.job(prompts(1)[0], 200, 0, GREEDY)
    roomy.engine.submit(job)
    with pytest.raises(EngineError, match="1 chunks are running"):
        roomy.run(roomy.engine.update_weights(directory(models[1]), 9))
    with pytest.raises(EngineError, match="1 chunks are running"):
        roomy.run(roomy.engine.reset_cache())
    roomy.run(roomy.until(lambda: job.id in roomy.answers))


def test_its_own_figures_count_the_tokens_that_it_writes(tight, prompts, read_exposition):
    def written():
        with urllib.request.urlopen(tight.info.metrics_address, timeout=PATIENCE_S) as answer:
            values, kinds = read_exposition(answer.read().decode())
        assert kinds["vllm:kv_cache_usage_perc"] == "gauge"
        return sum(values["vllm:generation_tokens_total"].values())

    before = written()
    responses = tight.whole(prompts(3), PLAIN, 40) + tight.divided(prompts(3), GREEDY, 40, 16)
    assert written() - before == sum(map(len, responses)) > 100
    assert urlsplit(tight.info.metrics_address).hostname == "127.0.0.1"


def test_without_metrics_there_is_no_address(roomy):
    assert roomy.info.metrics_address == ""
