"""A real SGLang: the same tokens however the work is cut, moved or lost, and an honest account of it."""

import asyncio
import json
import shutil
import urllib.request

import pytest
from msgspec import structs
from safetensors.torch import load_file
from seer_host.shared_weights import SharedWeights
from seer_worker.weights.broadcast import BroadcastWeights

from backends.tests.peft_files import CONFIG, RANK, adapter_of, merged, save
from seer_core.errors import EngineError
from seer_core.model import Sampling
from seer_core.ports.weights import directory
from tests.support.patience import PATIENCE_S

pytestmark = pytest.mark.engine

GREEDY, PLAIN, CUT = Sampling(0.0), Sampling(1.0), Sampling(0.8, top_p=0.9, top_k=20)
SAMPLINGS = [
    pytest.param(GREEDY, id="greedy", marks=pytest.mark.long),
    pytest.param(PLAIN, id="plain", marks=pytest.mark.long),
    pytest.param(CUT, id="top-k and top-p"),
]
"""One is enough to show that nothing is lost where work is cut; `make test-all` has all."""
EOS = 2
KV_BYTES_PER_TOKEN = 4 * 2 * 2 * 32 * 4  # layers, keys and values, heads, their size, float32

PUT_BACK = """
import sys
from seer_sglang import internals
internals.check_kernels()
from sglang.srt.managers import scheduler
from seer_core.model import Sampling
from seer_core.ports.engine import ChunkJob
from seer_sglang.engine import SglangEngine, server_args

settings = {
    "model_path": sys.argv[1], "dtype": "float32", "device": "cpu", "attention_backend": "torch_native",
    "context_length": 512, "max_running_requests": 8, "max_total_tokens": 4096, "chunked_prefill_size": 8,
    "page_size": 1, "disable_cuda_graph": True, "disable_overlap_schedule": True, "skip_tokenizer_init": True,
    "log_level": "error",
}
engine = SglangEngine(server_args(settings, None))
jobs = [ChunkJob(str(seed), "r", "g", [1, 10, seed], 3, 300, Sampling(), seed, 0) for seed in range(3, 6)]
for job in jobs:
    engine.add(job, "salt", to_the_end=True)
while min(len(chunk.req.output_ids) for chunk in engine.chunks.values()) < 100:
    engine.step()
scheduler.TEST_RETRACT, scheduler.TEST_RETRACT_INTERVAL = True, 1  # SGLang's own way to put a request back
engine.abort([job.id for job in jobs])
engine.step()
scheduler.TEST_RETRACT = False
print(len(engine.scheduler.waiting_queue), engine.waiting, len(engine.chunks))
engine.settle()
print(engine.flush(), engine.kv_usage)
"""

WIDTHS = """
import sys
from seer_sglang import internals
internals.check_kernels()
from seer_worker.process.drafts import SourceProposer
from seer_core.model import Sampling
from seer_core.ports.engine import ChunkJob
from seer_sglang.engine import SglangEngine, server_args

settings = {
    "model_path": sys.argv[1], "dtype": "float32", "device": "cpu", "attention_backend": "torch_native",
    "context_length": 200, "max_running_requests": 4, "max_total_tokens": 202,
    "disable_cuda_graph": True, "disable_overlap_schedule": True, "skip_tokenizer_init": True,
    "log_level": "error", "speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": 6,
}
proposer = SourceProposer(5, 128, 4)
engine = SglangEngine(server_args(settings, None), proposer, uniform_drafts=True, end_token_ids=[2])
for made_up in (None, 3):
    proposer.drafting.made_up = made_up
    for seed in range(3, 6):
        job = ChunkJob(f"{made_up} {seed}", "r", "g", [1, 10, seed], 3, 64, Sampling(), seed, 0)
        engine.add(job, "salt", to_the_end=made_up is None)
    widths = set()
    while engine.chunks:
        engine.step()
        if engine.computed.requests and engine.scheduler.last_batch.forward_mode.is_decode():
            widths.add(engine.computed.positions / engine.computed.requests)
    print(sorted(widths))
"""


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_whole_divided_alone_moved_and_killed_give_the_same_tokens(roomy, other, prompts, sampling, moved):
    whole = roomy.whole(prompts(4), sampling, 90)
    assert len({tuple(response) for response in whole}) == 4
    assert roomy.divided(prompts(4), sampling, 90, chunk_tokens=40) == whole
    assert roomy.alone(prompts(4), sampling, 90) == whole
    assert moved((roomy, other), prompts(4), sampling, 90, 25, cold=False)[0] == whole
    if sampling is PLAIN:
        losses = len(other.losses)
        endless = structs.replace(sampling, ignore_eos=True)
        lost = [other.job(prompt, 900, seed, endless) for seed, prompt in enumerate(prompts(4))]
        other.reports.clear()
        for job in lost:
            other.engine.submit(job)
        other.run(other.until(lambda: any(report.running for report in other.reports)))
        other.kill()
        other.run(other.until(lambda: len(other.losses) > losses))
        assert other.losses[losses:] == ["killed by SIGKILL"]
        other.info = other.run(other.engine.start(other))
        assert moved((other, roomy), prompts(4), sampling, 90, 40, cold=False)[0] == whole


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
        start = [*prompt, *whole.token_ids[:place]]
        [next_token] = roomy.run(roomy.chunks([roomy.job(start, 1, 1, CUT)]))
        assert next_token.token_ids == whole.token_ids[place : place + 1]
        assert next_token.logprobs == pytest.approx(whole.logprobs[place : place + 1], abs=1e-4)
    [top] = roomy.run(roomy.chunks([roomy.job(prompt, 1, 1, GREEDY)]))
    assert whole.logprobs[0] <= top.logprobs[0] + 1e-4


def test_work_is_counted_position_by_position(roomy, prompts):
    roomy.run(roomy.engine.reset_cache())
    [prompt] = prompts(1, tokens=100)
    [first] = roomy.run(roomy.chunks([roomy.job(prompt, 50, 0, CUT)]))
    made = len(first.token_ids)
    assert (first.cached_tokens, first.prefilled_tokens) == (0, 100)
    assert (first.computed_tokens, first.preemptions, first.steps) == (100 + made - 1, 0, made)
    [second] = roomy.run(roomy.chunks([roomy.job([*prompt, *first.token_ids], 10, 0, CUT)]))
    assert (second.cached_tokens, second.prefilled_tokens) == (100 + made - 1, 1)
    assert second.computed_tokens == len(second.token_ids)


def test_a_chunk_that_cannot_be_run_is_given_back_with_the_reason(roomy, prompts):
    [prompt] = prompts(1)
    jobs = {
        "the chunk needs 1064 tokens, max_model_tokens is 1024": roomy.job(prompt, 1024, 0, PLAIN),
        "SGLang refuses the chunk: it has no tokens": roomy.job([], 5, 0, PLAIN),
        "SGLang refuses the chunk: there is no token 5000": roomy.job([5000], 5, 0, PLAIN),
        "SGLang refuses the chunk: temperature must": roomy.job(prompt, 5, 0, Sampling(-1.0)),
    }
    for job in jobs.values():
        roomy.engine.submit(job)
    roomy.run(roomy.until(lambda: all(job.id in roomy.answers for job in jobs.values())))
    for reason, job in jobs.items():
        assert roomy.failures[job.id].startswith(reason)


def test_an_aborted_chunk_is_never_answered_and_leaves_its_kv(roomy, prompts):
    [prompt], endless = prompts(1), Sampling(0.0, ignore_eos=True)
    long, short, last = (roomy.job(prompt, tokens, 0, endless) for tokens in (900, 5, 30))
    roomy.engine.submit(long)
    roomy.run(roomy.chunks([short]))
    roomy.engine.abort(long.id)
    roomy.engine.abort("an unknown chunk")
    roomy.run(roomy.chunks([last]))
    assert long.id not in roomy.answers
    assert max(roomy.answers.values()) == 1
    roomy.run(roomy.until(lambda: roomy.reports[-1].running == 0))
    assert roomy.reports[-1].kv_usage == 0


def test_what_was_dropped_and_put_back_is_not_waited_for(make_fleet, models, run_in_fork):
    """A hundred tokens, eight a step: prefilled again, it would be there for longer than an engine drains."""
    printed = run_in_fork(make_fleet(models[0]).engines[0], PUT_BACK, str(models[0]))
    assert printed[-2:] == ["1 0 0", "True 0.0"]


def test_trees_of_one_size_have_it_in_steps_without_drafts_and_less_only_where_kv_is_short(
    make_fleet, models, run_in_fork
):
    printed = run_in_fork(make_fleet(models[0]).engines[0], WIDTHS, str(models[0]))
    without, drafted = map(json.loads, printed[-2:])
    assert without[-1] == 6.0
    assert 1.0 <= without[0] < 6.0  # at the end three requests of 67 tokens leave too little
    assert drafted == [6.0]


def test_load_is_reported_while_busy_and_once_more_when_idle(roomy, prompts):
    roomy.report_while_busy(prompts(12), 900)
    busy, idle = max(roomy.reports, key=lambda report: report.running), roomy.reports[-1]
    assert busy.running > 0
    assert 0 < busy.kv_usage < 1
    assert (idle.running, idle.waiting, idle.kv_usage) == (0, 0, 0.0)


def test_new_weights_leave_nothing_of_the_old_ones(roomy, other, models, prompts, tmp_path):
    before = roomy.whole(prompts(4), PLAIN, 40)
    version = roomy.weight_version
    with pytest.raises(EngineError, match="no safetensors in"):
        roomy.run(roomy.engine.update_weights(directory(tmp_path), 9))
    fingerprint = roomy.run(roomy.engine.update_weights(directory(models[1]), version + 1))
    assert other.run(other.engine.update_weights(directory(models[1]), version + 1)) == fingerprint
    stale = roomy.job(prompts(1)[0], 5, 0, PLAIN)
    roomy.engine.submit(stale)
    roomy.run(roomy.until(lambda: stale.id in roomy.answers))
    assert roomy.failures[stale.id] == f"the chunk wants weight version {version}, loaded is {version + 1}"
    roomy.weight_version = other.weight_version = version + 1
    outputs = roomy.run(roomy.chunks([roomy.job(p, 40, i, PLAIN) for i, p in enumerate(prompts(4))]))
    assert {output.cached_tokens for output in outputs} == {0}
    assert {output.weight_version for output in outputs} == {version + 1}
    changed = [list(output.token_ids) for output in outputs]
    assert changed != before
    assert other.whole(prompts(4), PLAIN, 40) == changed
    for instance in (roomy, other):
        instance.run(instance.engine.update_weights(directory(models[0]), version + 2))
        instance.weight_version = version + 2
    assert roomy.whole(prompts(4), PLAIN, 40) == before


def test_an_adapter_is_merged_with_the_whole_weights_before_it(roomy, other, models, prompts, tmp_path):
    tensors, before = adapter_of(models[0], 1), roomy.whole(prompts(4), PLAIN, 40)
    spec, whole = save(tmp_path / "adapter", tensors), merged(tmp_path / "merged", models[0], tensors)
    version = roomy.weight_version + 1
    for number in (version, version + 1):  # not added to itself
        roomy.run(roomy.engine.update_weights(spec, number))
    other.run(other.engine.update_weights(whole, version + 1))
    roomy.weight_version = other.weight_version = version + 1
    found = roomy.whole(prompts(4), PLAIN, 40)
    assert found == other.whole(prompts(4), PLAIN, 40) != before
    broken = save(tmp_path / "broken", tensors, CONFIG | {"r": 2 * RANK})
    with pytest.raises(EngineError, match="its rank is 8 by the adapter's config"):
        roomy.run(roomy.engine.update_weights(broken, version + 2))
    for instance in (roomy, other):
        instance.run(instance.engine.update_weights(directory(models[0]), version + 2))
        instance.weight_version = version + 2
    assert roomy.whole(prompts(4), PLAIN, 40) == before


def test_weights_by_broadcast_reach_two_instances_at_once_and_are_those_of_a_directory(
    roomy, other, models, prompts
):
    version = roomy.weight_version + 1
    instances = roomy, other
    expected = [each.run(each.engine.update_weights(directory(models[1]), version)) for each in instances]
    for each in instances:
        each.weight_version = version
    tokens = roomy.whole(prompts(4), PLAIN, 60)
    roomy.run(roomy.engine.update_weights(directory(models[0]), version))
    other.run(other.engine.update_weights(directory(models[0]), version))
    assert roomy.whole(prompts(4), PLAIN, 60) != tokens

    async def update(source):
        return await asyncio.gather(*(each.engine.update_weights(source, version) for each in instances))

    tensors = load_file(models[1] / "model.safetensors")
    with (
        SharedWeights() as shared,
        BroadcastWeights(piece_bytes=1 << 16) as sender,
        shared.offer(tensors.items()) as held,
        sender.offer(held) as source,
    ):
        assert roomy.run(update(source)) == expected
    assert roomy.whole(prompts(4), PLAIN, 60) == other.whole(prompts(4), PLAIN, 60) == tokens
    for each in instances:
        each.weight_version = version + 1
        each.run(each.engine.update_weights(directory(models[0]), version + 1))


def test_its_own_figures_count_all_but_the_first_token_of_each_chunk(other, prompts, read_exposition):
    def decoded():
        with urllib.request.urlopen(other.info.metrics_address, timeout=PATIENCE_S) as answer:
            values, kinds = read_exposition(answer.read().decode())
        assert kinds["sglang:num_running_reqs"] == "gauge"
        tokens = values["sglang:realtime_tokens_total"]
        return sum(value for labels, value in tokens.items() if ("mode", "decode") in labels)

    before = decoded()
    responses = other.whole(prompts(3), PLAIN, 40)
    assert decoded() - before == sum(map(len, responses)) - 3 > 50


@pytest.fixture
def tight(start, models):
    """A new instance with KV memory for few: what SGLang lets in depends on what it had to retract before."""
    tight = start(
        models[0],
        max_model_tokens=512,
        kv_cache_bytes=900 * KV_BYTES_PER_TOKEN,
        engine_args={"schedule_conservativeness": 0.05},  # or it would rather let them wait
    )
    yield tight
    tight.run(tight.engine.stop())


@pytest.fixture(scope="module")
def ten(roomy, prompts):
    """The responses to ten prompts, of an instance that has KV memory for all."""
    return roomy.whole(prompts(10), PLAIN, 130)


def test_retractions_change_no_token_and_are_counted_as_preemptions(tight, prompts, ten):
    assert tight.info.kv_capacity_tokens == 900 - 2
    assert tight.whole(prompts(10), PLAIN, 130) == ten
    tight.expect_preemptions()


def test_chunks_end_early_where_they_may_and_none_is_retracted(tight, prompts, ten):
    responses, ended_early = tight.ended_early(prompts(10), PLAIN, 130)
    assert responses == ten
    assert ended_early > 0


def test_an_instance_that_could_not_hold_a_response_does_not_start(start, models):
    with pytest.raises(EngineError, match=r"KV memory holds 998 tokens, and a response may have 1024: raise"):
        start(models[0], kv_cache_bytes=1000 * KV_BYTES_PER_TOKEN)


def test_a_model_whose_config_describes_more_than_its_weights_does_not_start(start, models, tmp_path):
    """SGLang would fill up what is too small with zeros, and write other tokens."""
    copy = shutil.copytree(models[0], tmp_path / "model")
    config = json.loads((copy / "config.json").read_text("utf-8"))
    config["intermediate_size"] *= 2
    (copy / "config.json").write_text(json.dumps(config), "utf-8")
    with pytest.raises(
        EngineError, match=r"describes [\d,]+ weights besides embeddings, .* hold [\d,]+; put"
    ):
        start(copy)
