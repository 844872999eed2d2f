"""Drafts on a real SGLang change how many steps a response takes, and nothing else."""

import json

import pytest

from seer_core.errors import EngineError
from seer_core.model import Sampling
from seer_core.ports.drafting import SourceSpec, StepTimes

pytest.register_assert_rewrite("backends.tests.sampling_controls")

from backends.tests.sampling_controls import expect_same_tops  # noqa: E402

pytestmark = pytest.mark.engine

GREEDY, PLAIN, CUT = Sampling(0.0), Sampling(1.0), Sampling(0.8, top_p=0.9, top_k=20)
SAMPLINGS = [
    pytest.param(GREEDY, id="greedy", marks=pytest.mark.long),
    pytest.param(PLAIN, id="plain", marks=pytest.mark.long),
    pytest.param(CUT, id="top-k and top-p"),
]
"""One is enough to show that nothing is lost where work is cut; `make test-all` has all."""
TOKENS = 60
KV_BYTES_PER_TOKEN = 4 * 2 * 2 * 32 * 4  # layers, keys and values, heads, their size, float32


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """The file from which the source drafts."""
    return tmp_path_factory.mktemp("texts") / "texts.json"


@pytest.fixture(scope="module")
def spec(texts):
    """A source that drafts what stands in that file."""
    return SourceSpec("sglang_sources:Prepared", {"texts": str(texts)}, 7, StepTimes((1,), (0,), ((0.001,),)))


@pytest.fixture(scope="module")
def drafting(start, models, spec):
    """An instance with trees of up to seven drafts on three paths."""
    drafting = start(models[0], source=spec, draft_paths=3)
    yield drafting
    drafting.run(drafting.engine.stop())


def known(texts, prompts, responses):
    texts.write_text(
        json.dumps({str(seed): [*prompt, *responses[seed]] for seed, prompt in enumerate(prompts)})
    )


def test_full_kv_memory_shortens_drafts_and_puts_no_chunk_back(start, models, spec, roomy, texts, prompts):
    """Comes first: two instances at a time."""
    least = 1024 + 2  # SGLang lets a request in that leaves two tokens free
    with pytest.raises(
        EngineError, match=r"KV memory holds 1023 tokens, and a response may have 1024: raise"
    ):
        start(models[0], source=spec, kv_cache_bytes=(least - 1) * KV_BYTES_PER_TOKEN)
    tight = start(models[0], source=spec, kv_cache_bytes=least * KV_BYTES_PER_TOKEN)
    try:
        assert tight.info.kv_capacity_tokens == tight.info.max_model_tokens == 1024
        asked = [prompt[:1000] for prompt in prompts(3, tokens=1000)]
        whole = roomy.whole(asked, PLAIN, 24)
        assert any(len(response) == 24 for response in whole)
        known(texts, asked, whole)
        assert tight.alone(asked, PLAIN, 24) == whole
        parts = [prompt[:164] for prompt in prompts(5, tokens=164)]  # with 40 tokens each they are 1020
        whole = roomy.whole(parts, PLAIN, 40)
        assert any(len(response) == 40 for response in whole)
        known(texts, parts, whole)
        for group in ("right", "wrong"):
            tight.group = group
            jobs = [tight.job(prompt, 40, seed, PLAIN) for seed, prompt in enumerate(parts)]
            outputs = tight.run(tight.chunks(jobs))
            assert [output.token_ids for output in outputs] == whole
            assert [output.preemptions for output in outputs] == [0] * 5
            assert all(sum(output.drafted_at) > 0 for output in outputs)
    finally:
        tight.run(tight.engine.stop())


def test_drafts_are_verified_under_every_control(roomy, drafting, texts, prompts, most_controlled):
    whole = roomy.whole(prompts(4), most_controlled, 45)
    known(texts, prompts(4), [[*response, *range(3, 40)] for response in whole])
    for group in ("right", "wrong"):
        drafting.group = group
        assert drafting.whole(prompts(4), most_controlled, 45) == whole
    drafting.group = "right"
    assert drafting.divided(prompts(4), most_controlled, 45, 11) == whole


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_drafts_change_no_token(roomy, drafting, texts, prompts, sampling):
    whole = roomy.whole(prompts(4), sampling, TOKENS)
    known(texts, prompts(4), whole)
    steps = {}
    for group in ("right", "wrong"):
        drafting.group = group
        jobs = [drafting.job(prompt, TOKENS, seed, sampling) for seed, prompt in enumerate(prompts(4))]
        outputs = drafting.run(drafting.chunks(jobs))
        assert [output.token_ids for output in outputs] == whole
        steps[group] = [output.steps for output in outputs]
        for output in outputs:
            made = len(output.token_ids)
            assert len(output.logprobs) == made
            assert output.computed_tokens == output.prefilled_tokens + made - 1
            more = output.steps - (made - sum(output.accepted_at))  # nothing follows an end that was drafted
            assert more in ((0, 1) if output.stopped else (0,))
            assert output.drafted_at[0] > 0
            assert (sum(output.accepted_at) > 0) == (group == "right")
    lengths = list(map(len, whole))
    assert steps["wrong"] == lengths
    assert all(taken < length / 2 for taken, length in zip(steps["right"], lengths, strict=True))
    assert drafting.divided(prompts(4), sampling, TOKENS, chunk_tokens=25) == whole


def test_logprobs_are_those_without_drafts(roomy, drafting, texts, prompts):
    known(texts, prompts(2), roomy.whole(prompts(2), PLAIN, TOKENS))
    drafting.group = "right"
    asking = Sampling(1.0, top_logprobs=4)
    pairs = zip(
        *(
            instance.run(
                instance.chunks(
                    [instance.job(prompt, TOKENS, seed, asking) for seed, prompt in enumerate(prompts(2))]
                )
            )
            for instance in (roomy, drafting)
        ),
        strict=True,
    )
    for plain, drafted in pairs:
        assert drafted.logprobs == pytest.approx(plain.logprobs, abs=1e-4)
        expect_same_tops(drafted.top_logprobs, plain.top_logprobs, 1e-4)


def test_steps_and_positions_behind_the_end_of_a_chunk_do_not_count(roomy, drafting, texts, prompts):
    whole = roomy.whole(prompts(4), PLAIN, TOKENS)
    known(texts, prompts(4), whole)
    drafting.group = "right"
    ends = [next(at for at in range(12, len(each)) if each[at] not in each[:at]) for each in whole]
    jobs = [
        drafting.job(prompt, TOKENS, seed, Sampling(1.0, stop_token_ids=(whole[seed][ends[seed]],)))
        for seed, prompt in enumerate(prompts(4))
    ]
    for output, response, end in zip(drafting.run(drafting.chunks(jobs)), whole, ends, strict=True):
        assert output.token_ids == response[: end + 1]
        assert output.stopped
        assert output.computed_tokens == output.prefilled_tokens + end
        assert output.steps - (end + 1 - sum(output.accepted_at)) in (0, 1)  # 1 where a draft was the end


def test_a_response_that_fills_its_row_is_drafted_to_its_end_and_leaves_its_kv(
    roomy, drafting, texts, prompts
):
    asked = [prompt[:980] for prompt in prompts(4, tokens=980)]
    room = drafting.info.max_model_tokens - 980
    whole = roomy.whole(asked, PLAIN, room)
    assert any(len(response) == room for response in whole)
    known(texts, asked, whole)
    drafting.group = "right"
    assert drafting.whole(asked, PLAIN, room) == whole
    assert drafting.divided(asked, PLAIN, room, chunk_tokens=room - 3) == whole  # the last has 3 tokens
    drafting.run(drafting.until(lambda: drafting.reports[-1].running == 0))
    assert drafting.reports[-1].kv_usage == 0  # the cached KV does not count, what no request can free does


def test_steps_are_measured_with_drafts(drafting):
    times = drafting.run(drafting.engine.measure_steps((1, 4), (0, 3)))
    assert (times.batch, times.draft_tokens) == ((1, 4), (0, 3))


def test_a_source_that_fails_is_reported_and_the_instance_goes_on(roomy, drafting, texts, prompts):
    drafting.used_up = True  # it drafts no more
    whole = roomy.whole(prompts(3), PLAIN, TOKENS)
    drafting.group = "failing"
    jobs = [drafting.job(prompt, TOKENS, seed, PLAIN) for seed, prompt in enumerate(prompts(3))]
    outputs = drafting.run(drafting.chunks(jobs))
    assert [output.token_ids for output in outputs] == whole
    assert [degradation.reason for degradation in drafting.degradations] == [
        "the draft source failed: RuntimeError: no luck"
    ]
