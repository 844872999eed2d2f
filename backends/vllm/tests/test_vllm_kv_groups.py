"""Groups of KV: what a request needs to go on, its keys, what fits, and rows of bytes over shared pages."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from seer_vllm.blocks import KvPage, VllmLayers  # noqa: E402

from seer_core.errors import EngineError  # noqa: E402
from tests.support.installed import skip_without  # noqa: E402

HASHES = [bytes([number]) * 32 for number in range(12)]


@pytest.fixture(scope="module")
def kv():
    """The module, which imports vLLM."""
    skip_without("vllm")
    from seer_vllm import kv_groups

    return kv_groups


@pytest.fixture
def groups(kv):
    first, *more = kv.KvGroup(2, 32), kv.KvGroup(0, 16, 39), kv.KvGroup(1, 32, 1, recurrent=True)
    return kv.KvGroups(first, tuple(more), 16)


@pytest.fixture(scope="module")
def plan(kv):
    """Return a function that makes vLLM's plan of KV for layers of some kinds, by their names."""
    from vllm.v1 import kv_cache_interface as kinds

    heads = {"num_kv_heads": 1, "head_size": 8, "dtype": torch.float32}
    states = {"shapes": ((8, 8),), "dtypes": (torch.float32,), "mamba_cache_mode": "align"}
    specs = {
        "full": kinds.FullAttentionSpec(block_size=16, **heads),
        "sliding": kinds.SlidingWindowSpec(block_size=16, sliding_window=40, **heads),
        "state": kinds.MambaSpec(block_size=16, **states),
        "local": kinds.ChunkedLocalAttentionSpec(block_size=16, attention_chunk_size=64, **heads),
    }

    def make(*names, blocks=101):
        groups = [
            kinds.KVCacheGroupSpec([f"layer.{number}"], specs[name]) for number, name in enumerate(names)
        ]
        return kinds.KVCacheConfig(num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=groups)

    return make


def test_a_request_needs_all_full_attention_the_window_and_the_last_state(groups):
    full, sliding, state = groups.all
    assert full.needed(160) == range(5)
    assert full.needed(160, first=64) == range(2, 5)
    assert sliding.needed(160) == range(7, 10)
    assert sliding.needed(160, first=144) == range(9, 10)
    assert state.needed(160) == range(4, 5)


def test_it_goes_on_where_all_groups_end_a_block(groups):
    assert groups.step_tokens == 32
    assert [*groups.rests(110, 32)] == [96, 64]


def test_a_block_has_the_hash_of_its_end_as_key_and_one_of_its_own_in_each_further_group(groups):
    full, sliding, state = groups.all
    assert groups.keys(HASHES, full, [0, 2]) == [HASHES[1], HASHES[5]]
    others = groups.keys(HASHES, sliding, [1]) + groups.keys(HASHES, state, [0])
    assert len({*others, HASHES[1]}) == 3
    assert {len(key) for key in others} == {32}


def test_groups_are_found_in_a_plan_and_other_kinds_are_refused(kv, plan):
    found = kv.kv_groups(plan("sliding", "full", "state"), 16)
    assert found.all == (kv.KvGroup(1, 16), kv.KvGroup(0, 16, 39), kv.KvGroup(2, 16, 1, recurrent=True))
    assert found.recurrent
    with pytest.raises(
        EngineError, match="of the kinds FullAttentionSpec, ChunkedLocalAttentionSpec; a pool"
    ):
        kv.kv_groups(plan("full", "local"), 16)
    with pytest.raises(EngineError, match="of the kinds SlidingWindowSpec; a pool"):
        kv.kv_groups(plan("sliding"), 16)


def test_what_is_kept_for_every_token_is_beside_the_first_full_attention(kv, plan):
    assert kv.whole_group(plan("sliding", "state", "full", "full")) == 2
    with pytest.raises(EngineError, match="beside the KV of full attention, which this model has not"):
        kv.whole_group(plan("sliding", "state"))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what vLLM imports
def test_while_a_step_is_planned_what_another_request_holds_counts_as_not_computed(kv):
    from vllm.v1.core.block_pool import BlockPool

    pool = BlockPool(4, enable_caching=True, hash_block_size=16)
    own, held, free = pool.get_new_blocks(3)
    pool.free_blocks([free])
    table = [0, own.block_id]
    assert [kv.is_computed(block, table) for block in (own, held, free)] == [True, False, True]


def test_all_kv_of_full_attention_is_room_and_windows_take_no_more_than_themselves(kv, plan):
    assert kv.room_of(plan("full"), 16, 64, 1000, 32) == (1600, 64)
    # 100 blocks: two requests keep a window of 3 blocks and one more, and 2 blocks of a step, in each group
    tokens, slots = kv.room_of(plan("full", "sliding", "sliding"), 16, 2, 1000, 32)
    assert (tokens, slots) == ((100 - 2 * 10) * 16, 2)
    # with many requests all may be as short as their windows
    assert kv.room_of(plan("full", "sliding", "sliding"), 16, 64, 500, 32) == (528, 64)


def test_states_take_their_part_of_every_request_and_slots_give_way_to_the_longest_context(kv, plan):
    assert kv.room_of(plan("full", "state"), 16, 10, 500, 32) == ((100 - 20) * 16, 10)
    assert kv.room_of(plan("full", "state"), 16, 64, 500, 32) == ((100 - 50) * 16, 25)
    assert kv.room_of(plan("full", "state"), 16, 64, 1400, 32) == ((100 - 12) * 16, 6)


def test_rows_of_several_groups_are_read_and_written_over_the_pages_that_they_share():
    blocks, page = 4, 64
    memory = torch.arange(2 * blocks * page, dtype=torch.int64).to(torch.uint8)
    full = [KvPage(f"full.{n}", n * blocks * page, page, page) for n in range(2)]
    state = [KvPage("state", 0, page, page)]
    views = {each.layer: torch.as_strided(memory, (blocks, page), (page, 1), each.offset) for each in full}
    views["state"] = [views["full.0"][:, :16], views["full.0"][:, 16:]]
    layers = VllmLayers(views, blocks, [full, state])
    rows = layers.read([3, blocks + 1, 0])
    assert rows.shape == (3, 2 * page)
    expected = memory.numpy().reshape(2, blocks, page)
    assert (rows[0] == np.concatenate([expected[0, 3], expected[1, 3]])).all()
    assert (rows[1, :page] == expected[0, 1]).all()
    before = memory.clone().numpy().reshape(2, blocks, page)
    layers.write([blocks + 2, 1], rows[[1, 0]])
    after = memory.numpy().reshape(2, blocks, page)
    assert (after[0, 2] == before[0, 1]).all()
    assert (after[1, 2] == before[1, 2]).all()  # the state's group has no second layer
    assert (after[:, 1] == before[:, 3]).all()
