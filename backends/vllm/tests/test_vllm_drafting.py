"""A real vLLM with drafts: the same tokens as without, in fewer steps, and an honest account of them."""

import json
from pathlib import Path

import pytest

from seer_core.errors import EngineError
from seer_core.model import Sampling
from seer_core.ports.drafting import SourceSpec, StepTimes
from seer_core.ports.weights import directory

pytest.register_assert_rewrite("backends.tests.sampling_controls")

from backends.tests.sampling_controls import expect_same_tops, with_tops  # noqa: E402

pytestmark = pytest.mark.engine

GREEDY, PLAIN, CUT = Sampling(0.0), Sampling(1.0), Sampling(0.8, top_p=0.9, top_k=20)
SAMPLINGS = [
    pytest.param(GREEDY, id="greedy", marks=pytest.mark.long),
    pytest.param(PLAIN, id="plain", marks=pytest.mark.long),
    pytest.param(CUT, id="top-k and top-p"),
]
"""One is enough to show that nothing is lost where work is cut; `make test-all` has all."""
DRAFT_TOKENS, EOS = 5, 2
TIMES = StepTimes((1,), (0,), ((0.001,),))
KINDS = ["perfect", "garbage", "mixed", "nothing"]


@pytest.fixture
def drafts(drafting, notes):
    """Return a function that runs work with drafts of a kind; ``answers`` are the responses by seed."""

    def run(kind, answers, work):
        (notes / "answers.json").write_text(json.dumps(answers, default=list))
        drafting.group = kind
        try:
            return work(drafting)
        finally:
            drafting.group = "group"

    return run


def calls(notes):
    return [json.loads(line) for line in (notes / "calls.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_drafts_of_any_kind_change_no_token(roomy, drafting, drafts, prompts, sampling):
    expected = roomy.whole(prompts(4), sampling, 90)
    for kind in KINDS:
        assert drafts(kind, expected, lambda it: it.whole(prompts(4), sampling, 90)) == expected
    assert drafts("mixed", expected, lambda it: it.divided(prompts(4), sampling, 90, 32)) == expected
    assert drafts("perfect", expected, lambda it: it.alone(prompts(4), sampling, 90)) == expected
    assert "failed" not in drafting.reports[-1].drafting


def test_drafts_are_verified_under_every_control(roomy, drafting, drafts, prompts, most_controlled):
    def whole(harness):
        return harness.whole(prompts(4), most_controlled, 45)

    expected = whole(roomy)
    assert drafts("perfect", expected, whole) == expected
    divided = drafts("perfect", expected, lambda it: it.divided(prompts(4), most_controlled, 45, 11))
    assert divided == expected
    further = [[*response, *range(3, 40)] for response in expected]  # drafts go on behind a stop
    assert drafts("mixed", further, whole) == expected
    assert "failed" not in drafting.reports[-1].drafting


def test_a_batch_of_greedy_and_random_requests_is_verified_each_by_its_own_rule(roomy, drafts, prompts):
    samplings = [GREEDY, PLAIN, CUT, Sampling(0.5), GREEDY, Sampling(1.3, top_p=0.5)]

    def respond(harness):
        jobs = [
            harness.job(prompt, 60, seed, sampling)
            for seed, (prompt, sampling) in enumerate(zip(prompts(6), samplings, strict=True))
        ]
        return [output.token_ids for output in harness.run(harness.chunks(jobs))]

    expected = respond(roomy)
    assert drafts("mixed", expected, respond) == expected
    assert drafts("garbage", expected, respond) == expected


@pytest.mark.parametrize("sampling", [GREEDY, PLAIN], ids=["greedy", "plain"])
def test_logprobs_are_those_of_the_tokens_with_any_drafts(roomy, drafts, prompts, sampling):
    def respond(harness):
        jobs = [harness.job(prompt, 50, seed, sampling) for seed, prompt in enumerate(prompts(5))]
        return harness.run(harness.chunks(jobs))

    expected = respond(roomy)
    for kind in KINDS:
        outputs = drafts(kind, [output.token_ids for output in expected], respond)
        for output, plain in zip(outputs, expected, strict=True):
            assert output.token_ids == plain.token_ids
            assert output.logprobs == pytest.approx(plain.logprobs, abs=2e-5)


def test_the_most_probable_tokens_are_the_same_with_any_drafts(roomy, drafts, prompts):
    def respond(harness):
        return with_tops(harness, prompts(5), PLAIN, 50, 20)

    expected = respond(roomy)
    answers = [token_ids for token_ids, _, _ in expected]
    for kind in KINDS:
        for ours, plain in zip(drafts(kind, answers, respond), expected, strict=True):
            assert ours[0] == plain[0]
            expect_same_tops(ours[2], plain[2])


def test_perfect_drafts_are_all_accepted_and_end_with_the_chunk(roomy, drafts, prompts):
    expected = roomy.whole(prompts(8), PLAIN, 100)

    def respond(harness):
        jobs = [harness.job(prompt, 100, seed, PLAIN) for seed, prompt in enumerate(prompts(8))]
        return harness.run(harness.chunks(jobs))

    outputs = drafts("perfect", expected, respond)
    assert {output.stopped for output in outputs} == {True, False}
    for output in outputs:
        made = len(output.token_ids)
        # The first token comes of the prefill; each step after it gives the drafts and one more.
        assert output.steps == 1 + -(-(made - 1) // (DRAFT_TOKENS + 1))
        assert output.drafted_at == output.accepted_at
        if not output.stopped:
            assert sum(output.accepted_at) == made - output.steps
        assert output.computed_tokens == output.prefilled_tokens + made - 1


def test_every_draft_is_counted_at_its_position(roomy, drafts, prompts):
    expected = roomy.whole(prompts(8), PLAIN, 80)

    def respond(harness):
        jobs = [harness.job(prompt, 80, seed, PLAIN) for seed, prompt in enumerate(prompts(8))]
        return harness.run(harness.chunks(jobs))

    for kind in ("garbage", "mixed"):
        for output in drafts(kind, expected, respond):
            made = len(output.token_ids)
            spared = sum(output.accepted_at)
            assert output.steps == made - spared or (output.stopped and output.steps == made - spared + 1)
            for counts in (output.drafted_at, output.accepted_at):
                assert counts == sorted(counts, reverse=True)
                assert len(counts) <= DRAFT_TOKENS
            pairs = zip(output.drafted_at, output.accepted_at, strict=True)
            assert all(accepted <= drafted < output.steps for drafted, accepted in pairs)
            assert output.computed_tokens == output.prefilled_tokens + made - 1
            if kind == "garbage" and not output.stopped:
                # Full drafts in every step but those that the chunk's end cut short.
                assert output.drafted_at[0] in (output.steps - 1, output.steps - 2)
    for output in drafts("nothing", expected, respond):
        assert (output.steps, output.drafted_at) == (len(output.token_ids), [])


def test_drafts_go_up_to_the_models_length_limit_and_not_beyond(roomy, drafts, prompts):
    [prompt] = prompts(1, tokens=900)
    to_the_limit = Sampling(0.0, ignore_eos=True)

    def respond(harness):
        return harness.run(
            harness.chunks([harness.job(prompt, 1024 - len(prompt), seed, to_the_limit) for seed in range(2)])
        )

    expected = [output.token_ids for output in respond(roomy)]
    assert drafts("perfect", expected, lambda it: [output.token_ids for output in respond(it)]) == expected


def test_a_source_learns_of_every_chunk_group_and_reset(drafting, notes, prompts):
    (notes / "calls.jsonl").write_text("")
    one, two = prompts(2)
    short, long = drafting.job(one, 5, 0, PLAIN), drafting.job(two, 900, 0, GREEDY)
    drafting.engine.submit(long)
    drafting.run(drafting.chunks([short]))
    drafting.engine.abort(long.id)
    drafting.engine.forget_group("group")
    drafting.run(drafting.engine.reset_cache())
    [*received] = calls(notes)
    handles = {words[2]: words[1] for words in received if words[0] == "open"}
    assert set(handles) == {short.id, long.id}
    # The long chunk may end by itself before it is aborted; it is closed once in either case.
    assert sorted(words[1] for words in received if words[0] == "close") == sorted(handles.values())
    assert [words for words in received if words[0] in ("forget", "reset")] == [
        ["forget", "group"],
        ["reset"],
    ]


def test_new_weights_make_the_source_start_afresh(drafting, models, notes, prompts):
    before = drafting.whole(prompts(2), PLAIN, 30)
    (notes / "calls.jsonl").write_text("")
    drafting.weight_version += 1
    drafting.run(drafting.engine.update_weights(directory(models[0]), drafting.weight_version))
    assert calls(notes) == [["reset"]]
    assert drafting.whole(prompts(2), PLAIN, 30) == before


def test_telemetry_says_how_long_steps_and_drafts_took_and_what_the_source_says(drafting, drafts, prompts):
    expected = drafting.whole(prompts(4), PLAIN, 60)
    drafting.reports.clear()
    drafts("garbage", expected, lambda it: it.whole(prompts(4), PLAIN, 60))
    drafting.run(drafting.until(lambda: bool(drafting.reports) and drafting.reports[-1].running == 0))
    last = drafting.reports[-1]
    assert 0 < last.drafting_s < last.stepping_s
    assert last.drafting["proposals"] > 0
    assert last.drafting["open"] == 0


def test_steps_are_measured_on_the_sizes_that_fit(drafting, roomy, prompts):
    before = drafting.whole(prompts(2), PLAIN, 30)
    times = drafting.run(drafting.engine.measure_steps((1, 4, 32, 64), (0, 2, 5, 9)))
    assert (times.batch, times.draft_tokens) == ((1, 4, 32), (0, 2, 5))
    longer = drafting.run(drafting.engine.measure_steps((1, 32), (0, 2), 256))
    assert longer.batch[0] == 1
    assert longer.context_tokens - times.context_tokens == pytest.approx(256 - 64, abs=10)
    without = roomy.run(roomy.engine.measure_steps((2,), (0, 4)))
    assert (without.batch, without.draft_tokens) == ((2,), (0,))
    with pytest.raises(EngineError, match="MeasureSteps on instance 'vllm-0': it can run no size"):
        roomy.run(roomy.engine.measure_steps((500,), (0,)))
    assert drafting.whole(prompts(2), PLAIN, 30) == before
    assert "failed" not in drafting.reports[-1].drafting
    job = drafting.job(prompts(1)[0], 300, 0, GREEDY)
    drafting.engine.submit(job)
    with pytest.raises(EngineError, match="1 chunks are running"):
        drafting.run(drafting.engine.measure_steps((1,), (0,)))
    drafting.run(drafting.until(lambda: job.id in drafting.answers))


def test_preemptions_with_drafts_in_flight_change_no_token_and_no_account(
    start, models, notes, roomy, prompts
):
    expected = roomy.whole(prompts(10), PLAIN, 100)
    (notes / "answers.json").write_text(json.dumps(expected, default=list))
    per_token = 4 * 2 * 2 * 32 * 4
    source = SourceSpec("draft_sources:Scripted", {"notes": str(notes)}, DRAFT_TOKENS, None)
    tight = start(models[0], source=source, max_model_tokens=512, kv_cache_bytes=900 * per_token)
    tight.group = "mixed"
    assert tight.whole(prompts(10), PLAIN, 100) == expected
    tight.expect_preemptions()
    for output in tight.outputs.values():
        assert output.steps in (len(output.token_ids) - sum(output.accepted_at) + stop for stop in (0, 1))
    assert "failed" not in tight.reports[-1].drafting
    tight.run(tight.engine.stop())
    assert calls(notes)[-1] == ["stop"]


@pytest.mark.parametrize("uniform", [True, False], ids=["padded", "each its own"])
def test_drafts_padded_to_one_length_change_no_token_and_keep_steps_uniform(
    start, models, notes, roomy, drafting, prompts, uniform
):
    source = SourceSpec("draft_sources:Scripted", {"notes": str(notes)}, DRAFT_TOKENS, TIMES)
    harness = start(models[0], source=source, uniform_drafts=True) if uniform else drafting
    harness.outputs.clear()
    expected = roomy.whole(prompts(6), PLAIN, 100)
    (notes / "answers.json").write_text(json.dumps(expected, default=list))
    harness.group = "mixed"
    assert harness.whole(prompts(6), PLAIN, 100) == expected
    assert harness.divided(prompts(6), PLAIN, 100, 48) == expected
    # In a chunk of a few tokens the source may draft nothing, by chance and by what arrives together.
    drafted = [output.drafted_at for output in harness.outputs.values() if len(output.token_ids) > 20]
    assert drafted
    if uniform:
        assert {len(each) for each in drafted} == {DRAFT_TOKENS}
    else:
        assert any(each[0] > each[-1] for each in drafted if each)
    harness.run(harness.until(lambda: harness.reports[-1].running == 0))
    figures = harness.reports[-1].drafting
    if uniform:
        # Others are those in which a chunk begins, is prefilled, or comes near the model's length limit.
        assert figures["uniform_steps"] > 0.8 * figures["drafted_steps"] > 0
        times = harness.run(harness.engine.measure_steps((4,), (0, 2)))
        assert times.draft_tokens == (0, DRAFT_TOKENS)
        harness.run(harness.engine.stop())
    else:
        assert "uniform_steps" not in figures
        harness.group = "group"


def test_a_source_reports_what_it_lacks_before_its_instance_is_ready_and_later(drafting, prompts):
    drafting.group = "complain"
    drafting.whole(prompts(4), PLAIN, 40)
    drafting.group = "group"
    assert {each.what for each in drafting.degradations} == {"drafting"}
    assert [each.reason for each in drafting.degradations] == [
        "the draft model is far away",
        "no idea for chunk of seed 0",
    ]


def test_a_source_that_fails_is_left_alone_and_changes_no_token(drafting, roomy, prompts):
    drafting.used_up = True  # it drafts no more, and ends
    expected = roomy.whole(prompts(4), PLAIN, 80)
    assert drafting.whole(prompts(4), PLAIN, 80) == expected
    drafting.group = "raise"
    assert drafting.whole(prompts(4), PLAIN, 80) == expected
    drafting.group = "group"
    assert drafting.whole(prompts(4), PLAIN, 80) == expected
    drafting.run(drafting.engine.reset_cache())
    assert drafting.reports[-1].drafting == {"failed": 1.0}
    [*_, degradation] = drafting.degradations
    assert (degradation.instance_id, degradation.what) == ("vllm-0", "drafting")
    assert degradation.reason == "the draft source failed: ValueError: no draft today"
    drafting.run(drafting.engine.stop())
    log = Path(degradation.log)  # kept, for there was trouble
    assert log.read_text().count("ValueError: no draft today") == 1
    log.unlink()
    log.parent.rmdir()


@pytest.mark.parametrize(
    ("method", "settings"),
    [
        pytest.param("ngram", {"prompt_lookup_min": 1, "prompt_lookup_max": 3}, marks=pytest.mark.long),
        ("suffix", {"suffix_decoding_min_token_prob": 0.0}),
    ],
)
def test_vllms_own_methods_are_lossless_too(start, models, roomy, prompts, method, settings):
    if method == "suffix":
        pytest.importorskip("arctic_inference")
    harness = start(models[0], source=SourceSpec(f"vllm:{method}", settings, 4))
    for sampling in (GREEDY, PLAIN, CUT):
        expected = roomy.whole(prompts(6), sampling, 160)
        assert harness.whole(prompts(6), sampling, 160) == expected
        assert harness.divided(prompts(6), sampling, 160, 48) == expected
    assert any(sum(output.accepted_at) for output in harness.outputs.values())
    to_the_limit = [1024 - len(prompt) for prompt in prompts(2)]
    long = [harness.job(p, n, 0, GREEDY) for p, n in zip(prompts(2), to_the_limit, strict=True)]
    plain = [roomy.job(p, n, 0, GREEDY) for p, n in zip(prompts(2), to_the_limit, strict=True)]
    outputs = harness.run(harness.chunks(long))
    assert [o.token_ids for o in outputs] == [o.token_ids for o in roomy.run(roomy.chunks(plain))]
    harness.engine.forget_group("group")
    harness.run(harness.engine.reset_cache())
    assert harness.whole(prompts(6), CUT, 160) == expected
    harness.run(harness.until(lambda: harness.reports[-1].running == 0))
    assert 0 < harness.reports[-1].drafting_s < harness.reports[-1].stepping_s
    assert harness.reports[-1].drafting == {}
    times = harness.run(harness.engine.measure_steps((2,), (0, 4)))
    assert times.draft_tokens == (0, 4)
    harness.run(harness.engine.stop())


@pytest.mark.parametrize(
    ("path", "complaint"),
    [
        ("no_such_module:Source", "'no_such_module:Source' cannot be imported: No module named"),
        ("draft_sources:Missing", "'draft_sources:Missing' cannot be imported: .*has no attribute"),
        ("draft_sources", "'draft_sources' cannot be imported"),
        (
            "draft_sources:Unfinished",
            "'draft_sources:Unfinished' is no DraftSource: it lacks add_sibling_tokens, close",
        ),
        ("draft_sources:VOCAB", "'draft_sources:VOCAB' is no DraftSource"),
        ("vllm:eagle", "'vllm:eagle': of vllm's methods only ngram, suffix will do"),
        ("draft_sources:Broken", "'draft_sources:Broken' cannot be made: .*the draft model is not there"),
    ],
)
def test_a_wrong_source_fails_the_start_by_its_path(start, models, path, complaint):
    with pytest.raises(EngineError, match=f"(?s)instance 'vllm-0' did not start: draft source {complaint}"):
        start(models[0], source=SourceSpec(path, {}, 2, TIMES))
