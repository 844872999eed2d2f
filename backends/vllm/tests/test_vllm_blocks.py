"""KV blocks of any layout."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from seer_core.errors import EngineError

torch = pytest.importorskip("torch")

BLOCKS = 6


def layers(*tensors):
    from seer_vllm.blocks import VllmLayers

    return VllmLayers({f"layer.{i}": tensor for i, tensor in enumerate(tensors)}, BLOCKS)


def filled(*shape):
    return torch.arange(np.prod(shape), dtype=torch.float32).reshape(shape)


LAYOUTS = {
    "plain": lambda: filled(BLOCKS, 2, 4, 8),
    "heads before tokens within a block": lambda: filled(BLOCKS, 2, 8, 4).transpose(2, 3),
    "a slice of one allocation for all layers": lambda: filled(3, BLOCKS, 2, 4, 8)[1],
    "layers side by side in each block": lambda: filled(BLOCKS, 3, 2, 4, 8)[:, 1],
    "two of the kernel's blocks in one": lambda: filled(2 * BLOCKS, 2, 2, 8),
    "blocks not the first dimension": lambda: filled(BLOCKS, 2, 4, 8).transpose(0, 1),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_blocks_are_read_and_loaded_in_any_layout(layout):
    layer = LAYOUTS[layout]()
    before = layer.clone()
    kv = layers(layer, LAYOUTS["plain"]())
    blocks = kv.read([4, 1])
    assert blocks.shape == (2, 2 * 2 * 4 * 8 * 4)
    per_block = 2 * 4 * 8 * 4
    held = np.sort(blocks[0, :per_block].copy().view(np.float32))
    dim = layer.shape.index(BLOCKS) if BLOCKS in layer.shape else 0
    wide = layer.shape[dim] // BLOCKS
    assert np.array_equal(held, np.sort(before.narrow(dim, 4 * wide, wide).flatten().numpy()))
    layer.zero_()
    kv.write([4, 1], blocks)
    for block in range(BLOCKS):
        expected = before if block in (4, 1) else torch.zeros_like(before)
        span = (dim, block * wide, wide)
        assert torch.equal(layer.narrow(*span), expected.narrow(*span))


def test_more_blocks_than_the_buffer_holds_are_read_and_written_in_pieces(monkeypatch):
    monkeypatch.setattr("seer_vllm.blocks.STAGED_BYTES", 2 * 2 * 4 * 8 * 4)
    layer = LAYOUTS["plain"]()
    before = layer.clone()
    kv = layers(layer)
    assert kv.most_staged == 2
    order = [4, 1, 3, 0, 5]
    blocks = kv.read(order)
    assert np.array_equal(blocks.view(np.float32), before[order].reshape(5, -1).numpy())
    layer.zero_()
    kv.write(order, blocks)
    assert torch.equal(layer[order], before[order])
    assert not layer[2].any()


def test_what_is_beside_the_layers_moves_with_their_blocks():
    from seer_vllm.blocks import VllmLayers

    layer, beside = LAYOUTS["plain"](), filled(BLOCKS, 4, 3).to(torch.uint8)
    before = beside.clone()
    kv = VllmLayers({"layer.0": layer}, BLOCKS, beside={"more": beside})
    blocks = kv.read([4, 1])
    assert blocks.shape == (2, layer[0].nbytes + beside[0].nbytes)
    assert np.array_equal(blocks[:, layer[0].nbytes :], before[[4, 1]].flatten(1).numpy())
    kv.write([0, 2], blocks)
    assert torch.equal(beside[[0, 2]], before[[4, 1]])
    assert torch.equal(layer[[0, 2]], layer[[4, 1]])
    assert torch.equal(beside[[1, 3, 4, 5]], before[[1, 3, 4, 5]])


def test_staged_blocks_are_those_of_the_moment_and_none_is_nothing():
    layer = LAYOUTS["plain"]()
    kv = layers(layer)
    expected = kv.read([3, 2])
    kv.stage([3, 2])
    layer.zero_()
    assert np.array_equal(kv.take(), expected)
    kv.stage([])
    assert len(kv.take()) == 0


@pytest.mark.parametrize(
    "layer",
    [filled(2, BLOCKS, 4, 8), filled(BLOCKS, 2, 4, 16)[..., :8], filled(BLOCKS + 1, 2, 4, 8)],
    ids=["keys apart from values", "holes within a block", "another number of blocks"],
)
def test_kv_that_is_not_laid_out_block_by_block_is_refused(layer):
    with pytest.raises(
        EngineError, match=r"KV of layer.0 is laid out .* not block by block.*kv_pool = \"none\""
    ):
        layers(layer)


def test_what_was_staged_stays_while_more_is_staged_once():
    layer = LAYOUTS["plain"]()
    kv = layers(layer)
    expected = kv.read([3, 2]), kv.read([4])
    kv.stage([3, 2])
    first = kv.take()
    kv.stage([])
    kv.stage([4])
    assert np.array_equal(first, expected[0])
    assert np.array_equal(kv.take(), expected[1])


def test_several_threads_write_blocks_at_once(monkeypatch):
    monkeypatch.setattr("seer_vllm.blocks.STAGED_BYTES", 2 * 4 * 8 * 4)
    layer = LAYOUTS["plain"]()
    expected = layer.clone()
    kv = layers(layer)
    blocks = kv.read(range(BLOCKS))
    layer.zero_()
    with ThreadPoolExecutor(4) as threads:
        ids = [[0, 3], [1], [2, 5], [4]]
        done = [threads.submit(kv.write, each, blocks[each], kv.computed()) for each in ids]
    assert [each.result() for each in done] == [None] * 4
    assert torch.equal(layer, expected)
