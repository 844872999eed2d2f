"""vLLM's second model runner writes what the first writes, to the token.

The first is the oracle: its tokens are compared with those of the second, which runs here with its Triton
kernels in Triton's interpreter (``interpreter/sitecustomize.py``).
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from seer_core.model import Sampling
from seer_core.ports.drafting import SourceSpec, StepTimes
from seer_core.ports.weights import directory

pytestmark = pytest.mark.engine

GREEDY, PLAIN, CUT = Sampling(0.0), Sampling(1.0), Sampling(0.8, top_p=0.9, top_k=20)
SAMPLINGS = [
    pytest.param(GREEDY, id="greedy", marks=pytest.mark.long),
    pytest.param(PLAIN, id="plain", marks=pytest.mark.long),
    pytest.param(CUT, id="top-k and top-p"),
]
"""One is enough to show that nothing is lost where work is cut; `make test-all` has all."""
BLOCK = 32
STEP_TIMES = StepTimes((1,), (0,), ((0.001,),))


def test_the_log_of_a_worker_names_the_runner_and_the_reason(second, roomy):
    log = Path(second.engine.log).read_text()
    assert "model_runner" in log
    assert 'reason=[engine.vllm].runner = "second" runner=second' in log.replace("'", "")
    assert "runner=first" in Path(roomy.engine.log).read_text()


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_whole_divided_and_alone_its_tokens_are_the_first_runner_s(second, roomy, prompts, sampling):
    expected = roomy.whole(prompts(4), sampling, 16)
    assert second.whole(prompts(4), sampling, 16) == expected
    assert second.divided(prompts(4), sampling, 16, chunk_tokens=6) == expected
    assert second.alone(prompts(1), sampling, 16) == expected[:1]
    assert len({tuple(response) for response in expected}) == 4


def test_requests_of_one_batch_are_sampled_each_by_its_own_rule(second, roomy, prompts):
    samplings = [GREEDY, PLAIN, CUT, Sampling(0.5), Sampling(1.3, top_p=0.5), Sampling(1.0, top_k=5)]

    def respond(harness):
        jobs = [
            harness.job(prompt, 20, seed, sampling)
            for seed, (prompt, sampling) in enumerate(zip(prompts(6), samplings, strict=True))
        ]
        return harness.run(harness.chunks(jobs))

    for output, expected in zip(respond(second), respond(roomy), strict=True):
        assert output.token_ids == expected.token_ids
        assert output.logprobs == pytest.approx(expected.logprobs, abs=2e-5)


def test_siblings_differ_by_their_seeds_alone(second, roomy, prompts):
    [prompt] = prompts(1)
    responses = second.whole([prompt] * 4, PLAIN, 16)
    assert responses == roomy.whole([prompt] * 4, PLAIN, 16)
    assert len({tuple(response) for response in responses}) == 4


def test_controls_see_the_tokens_before_and_hold_as_on_the_first(second, roomy, prompts, most_controlled):
    expected = roomy.whole(prompts(3), most_controlled, 30)
    assert second.whole(prompts(3), most_controlled, 30) == expected
    assert second.divided(prompts(3), most_controlled, 30, chunk_tokens=11) == expected


def test_a_prefix_from_its_cache_changes_no_token_and_is_counted(second, roomy, prompts):
    [prompt] = prompts(1, tokens=90)
    [expected] = roomy.whole([prompt], PLAIN, 20)
    second.run(second.engine.reset_cache())
    [cold] = second.run(second.chunks([second.job(prompt, 20, 0, PLAIN)]))
    [warm] = second.run(second.chunks([second.job(prompt, 20, 0, PLAIN)]))
    assert cold.token_ids == warm.token_ids == expected
    assert (cold.cached_tokens, cold.prefilled_tokens) == (0, 90)
    assert (warm.cached_tokens, warm.prefilled_tokens) == (64, 26)
    for output in (cold, warm):
        assert output.computed_tokens == output.prefilled_tokens + len(output.token_ids) - 1


@pytest.fixture(scope="module")
def tight(start_second, models):
    """An instance with KV memory for few, that prefills in pieces."""
    tight = start_second(models[0], max_model_tokens=128, kv_cache_bytes=1 << 20, max_batched_tokens=64)
    assert tight.info.kv_capacity_tokens == 15 * BLOCK
    yield tight
    tight.run(tight.engine.stop())


def test_preemptions_and_prefills_in_pieces_change_no_token_and_are_accounted_for(tight, roomy, prompts):
    tight.outputs.clear()
    assert tight.whole(prompts(8), PLAIN, 30) == roomy.whole(prompts(8), PLAIN, 30)
    tight.expect_preemptions()


def test_chunks_end_early_where_they_may_and_go_on_the_same(tight, roomy, prompts):
    responses, ended_early = tight.ended_early(prompts(8), PLAIN, 30)
    assert responses == roomy.whole(prompts(8), PLAIN, 30)
    assert ended_early > 0


def test_asleep_and_under_other_weights_it_is_what_the_first_is(newer, second, models, prompts):
    before = second.whole(prompts(2), PLAIN, 16)
    assert second.run(second.engine.sleep()) > 0
    second.run(second.engine.wake())
    assert second.whole(prompts(2), PLAIN, 16) == before
    expected = newer.whole(prompts(2), PLAIN, 16)
    for model, responses in ((models[1], expected), (models[0], before)):
        second.weight_version += 1
        second.run(second.engine.update_weights(directory(model), second.weight_version))
        assert second.whole(prompts(2), PLAIN, 16) == responses
    assert expected != before


@pytest.fixture(scope="module")
def scripted(notes):
    """A source that drafts as the group's name says."""
    return SourceSpec("draft_sources:Scripted", {"notes": str(notes)}, 4, STEP_TIMES)


@pytest.fixture(scope="module")
def second_drafting(start_second, models, scripted, pool):
    """An instance with drafts of all kinds and a pool, with KV for few, that prefills in pieces."""
    few = {"max_model_tokens": 128, "kv_cache_bytes": 1 << 20, "max_batched_tokens": 64}
    drafting = start_second(models[0], scripted, pool, 1, **few)
    yield drafting
    drafting.run(drafting.engine.stop())


@pytest.fixture
def drafts(second_drafting, notes):
    """Return a function that runs work with drafts of a kind; ``answers`` are the responses by seed."""

    def run(kind, answers, work):
        (notes / "answers.json").write_text(json.dumps(answers, default=list))
        second_drafting.group = kind
        return work(second_drafting)

    return run


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_drafts_of_any_kind_change_no_token(roomy, second_drafting, drafts, prompts, sampling):
    expected = roomy.whole(prompts(4), sampling, 30)
    for kind in ("perfect", "garbage", "mixed", "nothing"):
        assert drafts(kind, expected, lambda it: it.whole(prompts(4), sampling, 30)) == expected
    assert drafts("mixed", expected, lambda it: it.divided(prompts(4), sampling, 30, 11)) == expected
    assert "failed" not in second_drafting.reports[-1].drafting


def test_drafts_are_verified_under_every_control(roomy, second_drafting, drafts, prompts, most_controlled):
    expected = roomy.whole(prompts(3), most_controlled, 30)
    assert drafts("perfect", expected, lambda it: it.whole(prompts(3), most_controlled, 30)) == expected
    further = [[*response, *range(3, 40)] for response in expected]  # drafts go on behind a stop
    assert drafts("mixed", further, lambda it: it.whole(prompts(3), most_controlled, 30)) == expected
    assert "failed" not in second_drafting.reports[-1].drafting


def test_perfect_drafts_are_all_accepted_and_accounted_for(roomy, second_drafting, drafts, prompts):
    def respond(harness):
        jobs = [harness.job(prompt, 24, seed, PLAIN) for seed, prompt in enumerate(prompts(4))]
        return harness.run(harness.chunks(jobs))

    second_drafting.run(second_drafting.engine.reset_cache())
    expected = respond(roomy)
    outputs = drafts("perfect", [output.token_ids for output in expected], respond)
    for output, plain in zip(outputs, expected, strict=True):
        made = len(output.token_ids)
        assert output.token_ids == plain.token_ids
        assert output.logprobs == pytest.approx(plain.logprobs, abs=2e-5)
        # The first token comes of the prefill; each step after it gives the drafts and one more.
        assert output.steps == 1 + -(-(made - 1) // 5)
        assert output.drafted_at == output.accepted_at
        assert output.computed_tokens == output.prefilled_tokens + made - 1


def test_preemptions_with_drafts_in_flight_change_no_token(roomy, second_drafting, drafts, prompts):
    expected = roomy.whole(prompts(8), PLAIN, 36)
    second_drafting.outputs.clear()
    assert drafts("mixed", expected, lambda it: it.whole(prompts(8), PLAIN, 36)) == expected
    assert any(output.preemptions for output in second_drafting.outputs.values())


def test_a_response_that_moves_between_the_runners_takes_its_kv_along(
    start, models, pool, roomy, second_drafting, drafts, prompts, moved
):
    expected = roomy.whole(prompts(3), PLAIN, 42)
    first = start(models[0], kv_pool=pool)
    responses, rounds = drafts(
        "mixed", expected, lambda it: moved((first, it), prompts(3), PLAIN, 42, chunk_tokens=14)
    )
    first.run(first.engine.stop())
    assert responses == expected
    assert len(rounds) == 3
    for outputs in rounds[1:]:
        assert max(output.prefilled_tokens for output in outputs) <= BLOCK
        assert min(output.pool_tokens for output in outputs) >= BLOCK


def test_steps_are_measured_with_drafts_and_leave_nothing_behind(second_drafting, drafts, roomy, prompts):
    times = second_drafting.run(second_drafting.engine.measure_steps((1, 2), (0, 3), 16))
    assert (times.batch, times.draft_tokens) == ((1, 2), (0, 3))
    expected = roomy.whole(prompts(2), PLAIN, 12)
    assert drafts("perfect", expected, lambda it: it.whole(prompts(2), PLAIN, 12)) == expected


def test_drafts_padded_to_one_length_change_no_token_on_the_second(
    start_second, roomy, models, scripted, notes, prompts
):
    harness = start_second(models[0], scripted, uniform_drafts=True)
    expected = roomy.whole(prompts(4), PLAIN, 40)
    (notes / "answers.json").write_text(json.dumps(expected, default=list))
    harness.group = "mixed"  # drafts of 0 to 4 tokens
    assert harness.whole(prompts(4), PLAIN, 40) == expected
    assert harness.divided(prompts(4), PLAIN, 40, 11) == expected
    harness.run(harness.until(lambda: harness.reports[-1].running == 0))
    figures = harness.reports[-1].drafting
    assert figures["uniform_steps"] > 0.8 * figures["drafted_steps"] > 0
    times = harness.run(harness.engine.measure_steps((2,), (0, 1, 3), 16))
    assert times.draft_tokens == (0, 4)
    harness.run(harness.engine.stop())


def test_a_source_that_fails_is_given_up_and_the_tokens_stay(roomy, second_drafting, prompts):
    second_drafting.used_up = True  # it drafts no more
    second_drafting.group = "raise"
    assert second_drafting.whole(prompts(2), PLAIN, 12) == roomy.whole(prompts(2), PLAIN, 12)
    assert [each.reason for each in second_drafting.degradations] == [
        "the draft source failed: ValueError: no draft today"
    ]


def test_the_group_s_own_texts_are_drafted_and_accepted(start_second, roomy, models, prompts):
    plugin = pytest.importorskip("seer_grouped_spec.plugin", reason="plugins/grouped_spec is not installed")
    source = plugin.GroupedDrafter(plugin.Settings(draft_tokens=4), STEP_TIMES).source()
    harness = start_second(models[0], source)
    [prompt] = prompts(1)
    expected = roomy.whole([prompt] * 3, GREEDY, 30)
    assert [harness.alone([prompt], GREEDY, 30) for _ in range(3)] == [[response] for response in expected]
    assert sum(sum(output.accepted_at) for output in harness.outputs.values()) > 30
    assert harness.degradations == []
    harness.run(harness.engine.stop())


CONFIG = """
[seer]
engine = "vllm"
kv_pool = "local"
plugins = ["divided_rollout", "context_sched", "grouped_spec"]

[engine.vllm]
model = "{model}"
dtype = "float32"
instances = 2
kv_cache_bytes = 16_777_216
max_model_tokens = 256
max_running = 2
start_timeout_s = 600.0

[plugin.divided_rollout]
chunk_tokens = 16

[kv_pool.local]
capacity_bytes = 33_554_432

[rollout]
n = 3
max_tokens = 40
"""


@pytest.mark.long
def test_seer_run_over_two_instances_divided_and_drafted_writes_the_same_with_either_runner(
    models, prompts, tmp_path
):
    (tmp_path / "run.toml").write_text(CONFIG.format(model=models[0]))
    lines = [json.dumps({"prompt_token_ids": prompt}) + "\n" for prompt in prompts(3)]
    (tmp_path / "prompts.jsonl").write_text("".join(lines))

    def run(runner, environment):
        out, logs = tmp_path / runner, tmp_path / f"{runner}-logs"
        command = [sys.executable, "-c", "from seer_cli import main; main()", "run", tmp_path / "run.toml"]
        chosen = ["--set", f"engine.vllm.runner={runner}", "--set", f"engine.vllm.log_dir={logs}"]
        subprocess.run(
            [*command, "--prompts", tmp_path / "prompts.jsonl", "--out", out, *chosen],
            env={**os.environ, **environment},
            timeout=900,
            check=True,
        )
        assert [f"runner={runner}" in log.read_text() for log in logs.glob("vllm-*")] == [True, True]
        completions = map(json.loads, (out / "completions.jsonl").read_text().splitlines())
        tokens = {each["request_id"]: each["token_ids"] for each in completions}
        return tokens, json.loads((out / "summary.json").read_text())

    expected, _ = run("first", {})
    tokens, summary = run("second", {"PYTHONPATH": str(Path(__file__).parent / "interpreter")})
    assert len(tokens) == 9
    assert tokens == expected
    assert summary["chunks"] > 9
    assert summary["drafted_tokens"] > 0
    assert summary["degradations"] == {}
