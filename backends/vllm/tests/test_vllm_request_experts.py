"""Experts of requests are taken before their KV goes, each position's of the first time it was computed."""

from types import SimpleNamespace

import numpy as np
import pytest

from tests.support.installed import skip_without

BLOCK = 4
PROMPT = 10


@pytest.fixture(scope="module")
def routing():
    """The module, which imports vLLM."""
    skip_without("vllm")
    from seer_vllm import routing

    return routing


class Story:
    """A request in vLLM's scheduler: what each life has computed, and what is kept of it."""

    def __init__(self, routing, first):
        import torch
        from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

        spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=8, dtype=torch.float32)
        kv = KVCacheConfig(
            num_blocks=64, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)]
        )
        self.life, self.table, self.kept = 1, [], []
        self.scheduler = SimpleNamespace(
            kv_cache_config=kv, kv_cache_manager=SimpleNamespace(get_block_ids=lambda name: (self.table,))
        )
        self.request = SimpleNamespace(
            request_id="a",
            num_prompt_tokens=PROMPT,
            num_tokens=PROMPT,
            num_computed_tokens=0,
            sampling_params=SimpleNamespace(extra_args={routing.EXPERTS_FROM: first}),
        )
        self.experts = routing.RequestExperts(self.scheduler, self.read)

    def read(self, blocks, first, count):
        """Return for each token of blocks its position and the life in which it was computed."""
        places = [(number, place) for number in blocks for place in range(BLOCK)]
        found = [(number % 100 * BLOCK + place, number // 100) for number, place in places]
        return np.array(found[first : first + count], np.uint16).reshape(count, 1, 2)

    def compute(self, computed, tokens):
        """Have so many positions computed, of so many tokens."""
        self.request.num_computed_tokens, self.request.num_tokens = computed, tokens
        self.table = [self.life * 100 + number for number in range(-(-computed // BLOCK))]

    def preempt(self):
        self.experts.keep(self.request, self.kept)
        self.request.num_computed_tokens, self.table = 0, []
        self.life += 1

    def end(self, routing):
        """Return where what is answered begins, and the life of each position from there on."""
        from seer_host.routed_experts import ROUTED_EXPERTS, unpacked

        self.experts.keep(self.request, self.kept)
        found = self.experts.of(self.request, self.kept)
        if not found:
            return None
        start, experts = unpacked(found[ROUTED_EXPERTS])
        assert experts[:, 0, 0].tolist() == [*range(start, start + len(experts))]
        return start, experts[:, 0, 1].tolist()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what vLLM imports
@pytest.mark.parametrize("first", [0, 3, PROMPT - 1])
@pytest.mark.parametrize("ahead", [0, 1], ids=["step by step", "planned ahead"])
class TestExpertsOfRequests:
    def test_all_from_the_first_that_is_wanted_to_the_last_but_one(self, routing, first, ahead):
        story = Story(routing, first)
        story.compute(14 + ahead, 15)
        assert story.end(routing) == (first, [1] * (14 - first))

    def test_of_a_prefill_that_broke_off_nothing_stays(self, routing, first, ahead):
        story = Story(routing, first)
        story.compute(6, PROMPT)
        story.preempt()
        story.compute(14 + ahead, 15)
        assert story.end(routing) == (first, [2] * (14 - first))

    def test_of_tokens_that_were_drawn_the_first_time_counts(self, routing, first, ahead):
        story = Story(routing, first)
        story.compute(12 + ahead, 13)
        story.preempt()
        story.compute(5, 13 + ahead)
        story.preempt()
        story.compute(19 + ahead, 20)
        known = 12 + ahead - first
        assert story.end(routing) == (first, [1] * known + [3] * (19 - first - known))

    def test_of_one_that_ends_before_it_is_computed_anew_there_is_what_was_drawn(self, routing, first, ahead):
        story = Story(routing, first)
        story.compute(12 + ahead, 13)
        story.preempt()
        story.request.num_tokens = 13 + ahead  # a step under way brings its token all the same
        assert story.end(routing) == (first, [1] * (12 + ahead - first))

    def test_of_one_that_has_drawn_nothing_there_is_none(self, routing, first, ahead):
        story = Story(routing, first)
        assert story.end(routing) is None
        story.compute(6, PROMPT)
        assert story.end(routing) is None
