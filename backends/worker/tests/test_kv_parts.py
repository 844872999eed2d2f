"""The parts of a block of KV that the ranks of an instance have."""

import pytest
from seer_worker.process.kv_parts import KvParts

BLOCK_BYTES = 240


@pytest.mark.parametrize(
    ("ranks", "parts", "begins", "writers"),
    [
        (1, 1, [0], [0]),
        (2, 2, [0, 120], [0, 1]),
        (4, 2, [0, 0, 120, 120], [0, 2]),
        (4, 1, [0, 0, 0, 0], [0]),
    ],
    ids=["one rank", "a part each", "two ranks for each head", "latent KV, the same on all"],
)
def test_the_parts_of_all_ranks_make_a_block_and_each_is_written_once(ranks, parts, begins, writers):
    kv = KvParts("vllm", ranks, parts)
    columns = [kv.columns(rank, BLOCK_BYTES) for rank in range(ranks)]
    assert [each.start for each in columns] == begins
    assert {each.stop - each.start for each in columns} == {BLOCK_BYTES // parts}
    assert [rank for rank in range(ranks) if kv.is_first(rank)] == writers
    assert sorted({each.start for each in columns}) == [columns[rank].start for rank in writers]


def test_only_ranks_of_one_number_have_the_same_layout():
    assert [KvParts("vllm", ranks, 1).layout for ranks in (1, 2, 4)] == ["vllm", "vllm-tp2", "vllm-tp4"]


def test_kv_of_another_dtype_is_of_another_kind():
    dtypes = ("", "fp8_e4m3", "fp8_e5m2")
    assert [KvParts("vllm", 1, 1, each).kind for each in dtypes] == ["vllm", "vllm-fp8_e4m3", "vllm-fp8_e5m2"]
    assert KvParts("vllm", 2, 1, "bfloat16").kind == "vllm-tp2-bfloat16"
