"""Instances of two ranks each that share KV: each rank saves and loads its part of every block."""

import json
from pathlib import Path

import pytest
from seer_testing.families import QUANTISED, write_family

from seer_core.errors import EngineError
from seer_core.ports.drafting import SourceSpec, StepTimes
from seer_core.ports.weights import directory

pytest.register_assert_rewrite("backends.tests.ranks_contract", "backends.tests.spread_experts")
pytestmark = pytest.mark.engine
pytest.importorskip("seer_kv_local", reason="backends/kv_local is not installed")

from backends.tests.families import TOKENIZER  # noqa: E402
from backends.tests.ranks_contract import (  # noqa: E402
    PLAIN,
    SAMPLINGS,
    TOKENS,
    RanksContract,
    expect_a_rollout_in_which_a_rank_dies,
    forget_all,
)
from backends.tests.spread_experts import expect_spread_experts_to_change_nothing  # noqa: E402

BLOCK = 32


@pytest.fixture(scope="class")
def pair(start, models, pool, notes):
    """Two instances of two ranks that share the pool; the second drafts, and waits for all that it loads."""
    spec = SourceSpec("draft_sources:Scripted", {"notes": str(notes)}, 5, StepTimes((1,), (0,), ((0.001,),)))
    plain = start(models[0], kv_pool=pool, tensor_parallel=2)
    drafting = start(models[0], spec, pool, 1, awaited_kv_bytes=0, tensor_parallel=2, max_batched_tokens=96)
    drafting.group = "mixed"
    return plain, drafting


@pytest.fixture(scope="module")
def expected(roomy, prompts, notes):
    """Responses of an instance of one rank, which are also what the second instance drafts."""
    found = {name: roomy.whole(prompts(5), sampling, TOKENS) for name, sampling in SAMPLINGS.items()}
    (notes / "answers.json").write_text(json.dumps(found["plain"], default=list))
    return found


@pytest.mark.long
def test_ranks_whose_steps_are_planned_ahead_write_the_same(start_second, models, prompts, expected):
    ahead = start_second(models[0], instance="planning_ahead:Ahead", tensor_parallel=2)
    assert "async_scheduling=True" in Path(ahead.engine.log).read_text()
    for name, sampling in SAMPLINGS.items():
        whole = [response[:40] for response in expected[name][:2]]
        assert ahead.whole(prompts(2), sampling, 40) == whole
        assert ahead.divided(prompts(2), sampling, 40, chunk_tokens=15) == whole
    ahead.run(ahead.engine.stop())


class TestRanksOfVllm(RanksContract):
    """vLLM's own executor runs the ranks."""

    kind = "vllm"
    broken = "broken_rank:BrokenRank"
    block = BLOCK
    token_bytes = 4 * 2 * 2 * 32 * 4  # layers, keys and values, heads, their size, float32
    reserved = BLOCK  # the first block is vLLM's null block
    least_cached = 1
    processes = 2
    second = "TP1"
    drafting_group = "mixed"

    def expect_got(self, counted, outputs, token_bytes):
        """Compare exactly: vLLM's own cache has whole blocks, too."""
        loaded = sum(output.pool_tokens for output in outputs) // BLOCK
        assert counted.got_bytes == loaded * BLOCK * token_bytes

    def test_ranks_of_the_second_runner_write_the_same_and_go_on_with_the_kv_of_the_first(
        self, start_second, models, pair, pool, cold, prompts, expected, moved
    ):
        pair[1].used_up = True  # the new one takes its place in the pool
        second = start_second(models[0], None, pool, 1, tensor_parallel=2)
        second.weight_version = pair[0].weight_version  # they share the KV of one version alone
        second.run(second.engine.update_weights(directory(models[0]), second.weight_version))
        rounds = []
        for instances in ((pair[0], second), (second, pair[0])):
            forget_all(instances, pool)
            responses, found = moved(instances, prompts(2), PLAIN, 80, 40)
            assert responses == [response[:80] for response in expected["plain"][:2]]
            rounds += found[1:]
        outputs = [output for outputs in rounds for output in outputs]
        assert max(output.prefilled_tokens for output in outputs) <= BLOCK
        assert min(output.pool_tokens for output in outputs) >= BLOCK
        second.run(second.engine.stop())

    def test_all_draft_the_same_and_agree_on_weights(self, pair, models, prompts):
        a, b = pair
        a.used_up = b.used_up = True  # the second drafts no more, and has other weights than the first
        b.group = "nothing"
        without = b.whole(prompts(3), PLAIN, 40)
        b.outputs.clear()
        b.group = "garbage"
        whole = b.whole(prompts(3), PLAIN, 40)
        assert b.divided(prompts(3), PLAIN, 40, chunk_tokens=16) == whole == without
        assert any(output.drafted_at for output in b.outputs.values())
        assert b.reports[-1].drafting["proposals"] > 0
        b.group = "raise"
        assert b.whole(prompts(3), PLAIN, 40) == without
        assert [each.reason for each in b.degradations] == [
            "the draft source failed: ValueError: no draft today"
        ]
        b.group = "group"
        one, again, other = (
            b.run(b.engine.update_weights(directory(model), b.weight_version))
            for model in (models[0], models[0], models[1])
        )
        assert one == again != other

    def test_a_worker_and_its_ranks_end_together(self, pair):
        self.expect_all_to_end_together(pair)

    def test_experts_spread_over_ranks_change_no_token(self, start, own_pool, tmp_path, prompts, moved):
        spread = {"enable_expert_parallel": True}
        expect_spread_experts_to_change_nothing(
            start, own_pool, tmp_path, prompts(4), moved, spread=spread, both={}
        )

    def test_quantised_experts_spread_over_ranks_of_a_cpu_are_refused(self, start, tmp_path):
        model = write_family(tmp_path / "model", "Qwen3-MoE", 1, TOKENIZER)
        path = model / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": QUANTISED}))
        with pytest.raises(EngineError, match="vLLM's kernels of quantised experts for CPUs cannot find"):
            start(model, tensor_parallel=2, engine_args={"enable_expert_parallel": True})


def test_a_divided_and_drafted_rollout_in_which_a_rank_dies_has_the_tokens_of_one_rank(
    models, roomy, prompts, tmp_path
):
    expect_a_rollout_in_which_a_rank_dies("vllm", "TP1", models[0], roomy, prompts, tmp_path)
