import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from seer_core.model import GroupContext, InstanceInfo, InstanceStatus, Request, Sampling, request_seed


@pytest.mark.parametrize(
    ("group_seed", "index", "seed"),
    [
        (0, 0, 4685109482889842056),
        (0, 1, 3896129788067985924),
        (1, 0, 1623429347705865049),
        (42, 7, 3613310273750503099),
        (9223372036854775807, 15, 4511707457645988641),
    ],
)
def test_request_seeds_never_change(group_seed, index, seed):
    assert request_seed(group_seed, index) == seed


def test_request_seeds_of_a_large_batch_are_distinct():
    seeds = {request_seed(group, index) for group in range(1000) for index in range(64)}
    assert len(seeds) == 64_000


@given(st.integers(0, 2**63 - 1), st.integers(0, 10_000))
def test_a_request_seed_is_a_63_bit_number(group_seed, index):
    assert 0 <= request_seed(group_seed, index) < 2**63


def test_request_seeds_use_all_their_bits():
    seeds = [request_seed(0, index) for index in range(2000)]
    shares = [sum(seed >> bit & 1 for seed in seeds) / len(seeds) for bit in range(63)]
    assert all(0.44 < share < 0.56 for share in shares)


@given(
    block=st.integers(1, 64),
    prompt=st.integers(1, 500),
    generated=st.integers(0, 500),
    chunk=st.integers(1, 500),
)
def test_a_footprint_is_the_fewest_whole_blocks_that_hold_everything(block, prompt, generated, chunk):
    status = InstanceStatus(InstanceInfo("a", 4096, block, 8, 4096), 0)
    request = Request(GroupContext("g", 0, 1, prompt, 1000), 0, generated_tokens=generated)
    footprint = status.footprint(request, chunk)
    assert footprint % block == 0
    assert footprint - block < prompt + generated + chunk <= footprint


@given(block=st.integers(1, 64), prompt=st.integers(1, 500), chunk=st.integers(1, 500))
def test_a_footprint_beside_siblings_lacks_the_full_blocks_of_their_prompt(block, prompt, chunk):
    group = GroupContext("g", 0, 2, prompt, 1000)
    request = Request(group, 0)
    sharing, other = (
        InstanceStatus(InstanceInfo(name, 4096, block, 8, 4096, shares_prompts=shares), 0)
        for name, shares in (("a", True), ("b", False))
    )
    alone = sharing.footprint(request, chunk)
    group.in_flight = {"a": 1, "b": 1}
    assert other.footprint(request, chunk) == alone
    shared = alone - sharing.footprint(request, chunk)
    assert shared == sharing.shared_kv_tokens(group) == sharing.prompt_kv_tokens(group)
    assert shared % block == 0
    assert shared < prompt <= shared + block


def test_free_kv_is_negative_when_over_committed():
    status = InstanceStatus(InstanceInfo("a", 100, 1, 8, 100), 0, running=9, reserved_kv_tokens=130)
    assert (status.free_kv_tokens, status.free_slots) == (-30, -1)


def test_things_with_identity_are_equal_to_themselves_alone():
    info = InstanceInfo("a", 100, 1, 8, 100)
    assert InstanceStatus(info, 0) != InstanceStatus(info, 0)
    assert GroupContext("g", 0, 1, 1, 1) != GroupContext("g", 0, 1, 1, 1)
    assert len({Request(GroupContext("g", 0, 1, 1, 1), 0) for _ in range(2)}) == 2


def test_sampling_rejects_unknown_fields():
    with pytest.raises(msgspec.ValidationError, match="temprature"):
        msgspec.convert({"temprature": 1.0}, Sampling)
