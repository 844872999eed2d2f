"""Instances of SGLang of two ranks each, which share KV: each rank has its part of every block."""

import json

import pytest

from seer_core.ports.drafting import SourceSpec, StepTimes

pytest.register_assert_rewrite("backends.tests.ranks_contract", "backends.tests.spread_experts")
pytestmark = pytest.mark.engine
pytest.importorskip("seer_kv_local", reason="backends/kv_local is not installed")

from backends.tests.ranks_contract import (  # noqa: E402
    SAMPLINGS,
    TOKENS,
    RanksContract,
    expect_a_rollout_in_which_a_rank_dies,
)
from backends.tests.spread_experts import expect_spread_experts_to_change_nothing  # noqa: E402

SECOND = "seer_sglang.rank"
"""In the command of rank 1, or in the title of its process if rank 0 has forked it."""


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """The file from which the second instance drafts."""
    return tmp_path_factory.mktemp("texts") / "texts.json"


@pytest.fixture(scope="class")
def pair(start, models, pool, texts):
    """Two instances of two ranks that share the pool; the second drafts, and waits for all that it loads.

    Its trees are of one size.
    """
    spec = SourceSpec("sglang_sources:Prepared", {"texts": str(texts)}, 5, StepTimes((1,), (0,), ((0.001,),)))
    plain = start(models[0], kv_pool=pool, tensor_parallel=2)
    waiting = {"awaited_kv_bytes": 0, "max_batched_tokens": 96}
    trees = {"draft_paths": 3, "uniform_drafts": True}
    drafting = start(models[0], 1, spec, pool, tensor_parallel=2, **waiting, **trees)
    return plain, drafting


@pytest.fixture(scope="module")
def expected(roomy, prompts, texts):
    """Responses of an instance of one rank, which are also what the second instance drafts."""
    found = {name: roomy.whole(prompts(5), sampling, TOKENS) for name, sampling in SAMPLINGS.items()}
    known = {str(seed): [*prompt, *found["plain"][seed]] for seed, prompt in enumerate(prompts(5))}
    texts.write_text(json.dumps(known))
    return found


class TestRanksOfSglang(RanksContract):
    """Seer runs the ranks, each with a scheduler of its own."""

    kind = "sglang"
    broken = "broken_sglang_rank:BrokenRank"
    block = 16
    token_bytes = 4 * 2 * 2 * 32 * 4  # layers, keys and values, heads, their size, float32
    reserved = 2  # SGLang lets a request in that leaves two tokens free
    least_cached = 2  # all prompts begin with the same token
    processes = 1  # rank 0 is the worker
    second = SECOND

    @pytest.mark.long
    def test_a_rank_that_cannot_read_its_part_costs_the_pool_and_no_token(
        self, start, models, own_pool, prompts, expected
    ):
        """See also ``test_sglang_ranked_pool``."""
        super().test_a_rank_that_cannot_read_its_part_costs_the_pool_and_no_token(
            start, models, own_pool, prompts, expected
        )

    test_a_head_that_both_ranks_have_is_stored_once = None
    """On a CPU SGLang gives the second rank a head of padding; see ``test_kv_parts``."""

    @pytest.mark.long
    def test_a_head_of_padding_is_stored_with_the_other(self, start, one_head_model, loop, prompts, moved):
        self.expect_one_head_stored(2, start, one_head_model, loop, prompts, moved)

    def test_drafts_right_wrong_or_failing_change_no_token(self, pair, prompts, expected):
        _, here = pair
        here.used_up = True  # it drafts no more
        whole = expected["plain"]
        here.outputs.clear()
        for group in ("wrong", "failing"):
            here.group = group
            assert here.divided(prompts(5), SAMPLINGS["plain"], TOKENS, chunk_tokens=70) == whole
        assert any(output.drafted_at for output in here.outputs.values())
        assert [each.reason for each in here.degradations] == [
            "the draft source failed: RuntimeError: no luck"
        ]

    def test_a_worker_and_its_ranks_end_together(self, pair):
        self.expect_all_to_end_together(pair)

    def test_experts_spread_over_ranks_change_no_token_and_no_choice_of_experts(
        self, start, own_pool, tmp_path, prompts, moved
    ):
        expect_spread_experts_to_change_nothing(
            start,
            own_pool,
            tmp_path,
            prompts(4),
            moved,
            spread={"ep_size": 2},
            both={"enable_return_routed_experts": True},
        )


@pytest.mark.long
def test_a_divided_and_drafted_rollout_in_which_a_rank_dies_has_the_tokens_of_one_rank(
    models, roomy, prompts, tmp_path
):
    expect_a_rollout_in_which_a_rank_dies("sglang", SECOND, models[0], roomy, prompts, tmp_path)
