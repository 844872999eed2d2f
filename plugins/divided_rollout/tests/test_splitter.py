from math import sqrt
from types import SimpleNamespace

import msgspec
import pytest
import seer_divided_rollout
from hypothesis import given
from hypothesis import strategies as st
from seer_divided_rollout import AffordableChunks, Chunks, Settings

from seer_core.errors import ConfigError
from seer_core.model import GroupContext, InstanceInfo, InstanceStatus, Request
from seer_core.ports.contracts import implemented

INFO = InstanceInfo("a", 1 << 20, 16, 256, 1 << 17, step_s=0.02, chunk_s=0.001, chunk_s_per_token=1e-6)
"""A chunk's end costs a twentieth of a step, and as much again after 1,000 tokens."""


def request(context_tokens=10, limit=1 << 16):
    group = GroupContext("g", 0, 1, 10, limit)
    return Request(group, 0, generated_tokens=context_tokens - 10)


def splitter_on(*infos):
    splitter = AffordableChunks()
    for number, info in enumerate(infos):
        splitter.instance_started(InstanceStatus(msgspec.structs.replace(info, id=f"i{number}"), number))
    return splitter


@given(chunk=st.integers(1, 5000), limit=st.integers(1, 5000), data=st.data())
def test_a_chunk_is_full_or_the_last(chunk, limit, data):
    generated = data.draw(st.integers(0, limit - 1))
    request = Request(GroupContext("g", 0, 1, 10, limit), 0, generated_tokens=generated)
    assert Chunks(chunk).split(request) == min(chunk, limit - generated)


@pytest.mark.parametrize(("limit", "sizes"), [(100, [40, 40, 20]), (80, [40, 40]), (3, [3])])
def test_chunks_add_up_to_the_whole_request(limit, sizes):
    request = Request(GroupContext("g", 0, 1, 10, limit), 0)
    splitter = Chunks(40)
    found = []
    while request.remaining_tokens:
        found.append(splitter.split(request))
        request.generated_tokens += found[-1]
    assert found == sizes


def test_a_chunk_larger_than_an_instance_s_kv_is_a_config_error():
    instance = InstanceStatus(InstanceInfo("a", 256, 1, 8, 256), 0)
    with pytest.raises(
        ConfigError, match=r"chunk_tokens is 2048, but the KV cache of instance 'a' holds 256"
    ):
        Chunks(2048).instance_started(instance)


def test_the_last_block_of_a_chunk_counts_too():
    Chunks(48).instance_started(InstanceStatus(InstanceInfo("a", 48, 16, 8, 48), 0))
    with pytest.raises(ConfigError, match="chunk_tokens"):
        Chunks(49).instance_started(InstanceStatus(InstanceInfo("a", 63, 16, 8, 63), 0))


@given(
    kv_blocks=st.integers(1, 1 << 16),
    block=st.sampled_from([1, 16, 32, 528]),
    chunk_s=st.floats(0, 1),
    token_s=st.floats(0, 1e-3),
    prefill_s=st.floats(0, 1e-2),
    fetch_s=st.none() | st.floats(0, 1e-2),
    context=st.integers(10, 1 << 17),
)
def test_for_all_measurements_a_chunk_has_whole_blocks_and_fits_the_kv(
    kv_blocks, block, chunk_s, token_s, prefill_s, fetch_s, context
):
    kv = kv_blocks * block
    info = InstanceInfo(
        "a",
        kv,
        block,
        8,
        kv,
        prefill_s_per_token=prefill_s,
        fetch_s_per_token=fetch_s,
        step_s=0.02,
        chunk_s=chunk_s,
        chunk_s_per_token=token_s,
    )
    tokens = splitter_on(info).length(context)
    assert tokens % block == 0
    assert min(4 * block, kv) <= tokens <= kv


def test_a_chunk_is_as_long_as_makes_what_it_leaves_unused_cost_what_its_end_costs():
    for context, steps_lost in ((0, 0.05), (1000, 0.1), (15_000, 0.8)):
        tokens = splitter_on(INFO).length(context)
        assert tokens == pytest.approx(sqrt(2 * INFO.kv_capacity_tokens * steps_lost), abs=8)
        context = max(context, 1)
        unused = tokens / 2 / context
        lost = INFO.kv_capacity_tokens / context * steps_lost / tokens
        assert unused == pytest.approx(lost, rel=0.1)


@given(
    context=st.integers(10, 1 << 17),
    block=st.sampled_from([1, 16, 32, 528]),
    kv_blocks=st.integers(4, 1 << 16),
)
def test_a_chunk_that_is_not_the_last_leaves_whole_blocks_behind(context, block, kv_blocks):
    kv = kv_blocks * block
    splitter = splitter_on(msgspec.structs.replace(INFO, block_tokens=block, kv_capacity_tokens=kv))
    tokens = splitter.split(request(context, limit=1 << 20))
    assert (context + tokens - 1) % block == 0
    assert splitter.length(context) - block < tokens <= splitter.length(context)


def test_chunks_are_finer_where_kv_is_scarce_and_coarser_where_a_move_is_dear():
    scarce = msgspec.structs.replace(INFO, kv_capacity_tokens=1 << 16)
    alone = msgspec.structs.replace(INFO, prefill_s_per_token=1e-4)
    shared = msgspec.structs.replace(alone, fetch_s_per_token=1e-6)
    lengths = [splitter_on(info).length(4096) for info in (scarce, INFO, shared, alone)]
    assert lengths == sorted(lengths)
    assert lengths[0] < lengths[1] <= lengths[2] < lengths[3]


def test_chunks_are_a_hundred_times_as_long_as_the_gaps_between_them():
    late = msgspec.structs.replace(INFO, chunk_gap_s=100e-3, fetch_s_per_token=0.0)  # five steps of 20 ms
    apart = msgspec.structs.replace(late, fetch_s_per_token=None)
    assert splitter_on(apart).length(0) == 320
    assert splitter_on(INFO).length(0) == 320
    assert splitter_on(late).length(0) == pytest.approx(500, abs=8)
    assert splitter_on(late).length(1 << 17) == splitter_on(INFO).length(1 << 17)


def test_of_unlike_instances_the_mean_counts_while_they_live():
    large, small = INFO, msgspec.structs.replace(INFO, kv_capacity_tokens=1 << 16, block_tokens=32)
    splitter = splitter_on(large, small)
    assert splitter_on(small).length(0) < splitter.length(0) < splitter_on(large).length(0)
    assert splitter.length(0) % 32 == 0
    splitter.instance_lost(InstanceStatus(msgspec.structs.replace(small, id="i1"), 1))
    assert splitter.length(0) == splitter_on(large).length(0)
    splitter.instance_lost(InstanceStatus(msgspec.structs.replace(large, id="i0"), 0))
    assert splitter.length(0) == splitter_on(large).length(0)


def test_the_last_instance_that_was_lost_does_not_count_beside_the_next_one():
    large, small = INFO, msgspec.structs.replace(INFO, kv_capacity_tokens=1 << 12)
    splitter = splitter_on(small)
    splitter.instance_lost(InstanceStatus(msgspec.structs.replace(small, id="i0"), 0))
    splitter.instance_started(InstanceStatus(msgspec.structs.replace(large, id="i1"), 1))
    assert splitter.length(0) == splitter_on(large).length(0)


def test_what_was_not_measured_is_assumed():
    unknown = InstanceInfo("a", 1 << 20, 16, 256, 1 << 17)
    assert splitter_on(unknown).length(0) == splitter_on(INFO).length(0)


def test_it_says_which_lengths_it_chose():
    assert splitter_on(INFO).explain().startswith("320 after 0, 464 after 1024, 736 after 4096, ")
    assert Chunks(7).explain() == "7 tokens, as configured"


def test_the_hook_leaves_the_length_to_the_splitter_unless_a_number_is_given():
    given = seer_divided_rollout.seer_make_splitter(Settings(chunk_tokens=7), SimpleNamespace())
    assert given.chunk_tokens == 7
    chosen = seer_divided_rollout.seer_make_splitter(Settings(), SimpleNamespace())
    assert isinstance(chosen, AffordableChunks)
    assert implemented(chosen, "instance_started") is not None
