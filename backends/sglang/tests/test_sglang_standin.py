"""The stand-in for SGLang's kernels does what plain torch says, and is loud where it does nothing."""

import importlib
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

STAND_IN = Path(__file__).parents[1] / "standin"
NODES = 7


@pytest.fixture
def kernels(monkeypatch):
    monkeypatch.syspath_prepend(str(STAND_IN))
    yield importlib.import_module("sgl_kernel")
    for name in [name for name in sys.modules if name.split(".")[0] == "sgl_kernel"]:
        del sys.modules[name]


@pytest.fixture
def random():
    return np.random.default_rng(0)


@pytest.fixture
def trees(random):
    """Return the parents of five random trees, -1 for the root's; a node stands after its parent."""
    return [[-1, *(int(random.integers(0, node)) for node in range(1, NODES))] for _ in range(5)]


def ancestors(parents, node):
    found = []
    while parents[node] >= 0:
        node = parents[node]
        found.append(node)
    return found


def masks(trees):
    mask = torch.zeros(len(trees), NODES, NODES, dtype=torch.bool)
    for tree, parents in enumerate(trees):
        for node in range(NODES):
            mask[tree, node, [node, *ancestors(parents, node)]] = True
    return mask.flatten()


def links(kernels, trees, lengths):
    size = (len(trees), NODES)
    positions = torch.empty(len(trees) * NODES, dtype=torch.int64)
    numbers, child, sibling = (torch.empty(size, dtype=torch.int64) for _ in range(3))
    speculative = importlib.import_module("sgl_kernel.speculative")
    speculative.reconstruct_indices_from_tree_mask(
        masks(trees), lengths, positions, numbers, child, sibling, len(trees), NODES
    )
    return positions, numbers, child, sibling


def test_a_tree_is_read_from_who_descends_from_whom(kernels, trees):
    lengths = torch.arange(10, 10 + len(trees))
    positions, numbers, child, sibling = links(kernels, trees, lengths)
    assert numbers.flatten().tolist() == list(range(len(trees) * NODES))
    for tree, parents in enumerate(trees):
        depths = [len(ancestors(parents, node)) for node in range(NODES)]
        assert positions.view(-1, NODES)[tree].tolist() == [10 + tree + depth for depth in depths]
        for node in range(NODES):
            children = [each for each in range(NODES) if parents[each] == node]
            walked, each = [], int(child[tree, node])
            while each != -1:
                walked.append(each)
                each = int(sibling[tree, each])
            assert walked == children


def test_slots_are_written_into_rows_and_read_out_of_them(kernels):
    rows = torch.zeros(4, 10, dtype=torch.int32)
    which, starts, ends = torch.tensor([2, 0]), torch.tensor([3, 0]), torch.tensor([5, 4])
    kernels.assign_req_to_token_pool_cpu(which, rows, starts, ends, torch.arange(50, 56), 10)
    assert rows.nonzero().tolist() == [[0, 0], [0, 1], [0, 2], [0, 3], [2, 3], [2, 4]]
    assert rows[2, 3:5].tolist() == [50, 51]
    assert rows[0, :4].tolist() == [52, 53, 54, 55]
    slots = torch.zeros(6, dtype=torch.int64)
    kernels.assign_extend_cache_locs_cpu(which, rows, starts, ends, slots, 10)
    assert slots.tolist() == list(range(50, 56))


def test_no_row_is_written_or_read_beyond_its_end(kernels):
    rows, slots = torch.zeros(2, 10, dtype=torch.int32), torch.arange(50, 55)
    for act in (kernels.assign_req_to_token_pool_cpu, kernels.assign_extend_cache_locs_cpu):
        for start, end in ((8, 13), (9, 11), (12, 13)):
            with pytest.raises(IndexError, match=f"row has 10 columns, and {end} are asked for"):
                act(torch.tensor([0]), rows, torch.tensor([start]), torch.tensor([end]), slots, 10)
    assert not rows.any()


def test_kv_is_copied_as_if_at_once(kernels, random):
    buffers = [torch.from_numpy(random.standard_normal((8, *shape))) for shape in ((2, 3), (5,))]
    source, target = torch.tensor([1, 2, 5, 6]), torch.tensor([2, 3, 5, 1])
    wanted = [buffer.clone() for buffer in buffers]
    for buffer, want in zip(buffers, wanted, strict=True):
        want[target] = buffer[source]
    addresses = torch.tensor([buffer.data_ptr() for buffer in buffers])
    sizes = torch.tensor([buffer.stride(0) * buffer.itemsize for buffer in buffers])
    kernels.copy_all_layer_kv_cache_cpu(addresses, sizes, target, source)
    assert all(torch.equal(buffer, want) for buffer, want in zip(buffers, wanted, strict=True))


def test_what_was_accepted_is_picked_out(kernels):
    slots = torch.full((4,), -9)
    kernels.fill_accept_out_cache_loc_cpu(
        torch.tensor([[0, 2, -1], [3, -1, -1]]), torch.arange(100, 106), slots
    )
    assert slots.tolist() == [100, 102, 103, -9]


def test_any_other_kernel_says_that_it_is_not_there(kernels):
    from sgl_kernel import top_k_renorm_prob
    from sgl_kernel.scalar_type import scalar_types

    assert scalar_types.uint4b8 == "uint4b8"
    with pytest.raises(NotImplementedError, match=r"sgl_kernel\.top_k_renorm_prob is not in the stand-in"):
        top_k_renorm_prob(torch.ones(3), 2)


def test_torchvision_can_describe_its_operators(kernels):
    assert str(torch.ops.torchvision.nms.default._schema).startswith("torchvision::nms(Tensor dets")
