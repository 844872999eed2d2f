"""Weights that a trainer broadcasts: the same in every pass, and an error where a pass breaks."""

import threading

import pytest
import torch
from seer_host.shared_weights import SharedWeights, digest_of
from seer_worker.process.adapter import Rejected
from seer_worker.weights import broadcast
from seer_worker.weights.broadcast import Broadcast, BroadcastWeights
from seer_worker.weights.checkpoint import TensorHeader, open_checked
from seer_worker.weights.shared_weights import SharedMemory

from seer_core.errors import ConfigError, EngineError

TENSORS = {
    "embed": torch.arange(12, dtype=torch.float32).reshape(4, 3).t(),  # in no order of memory
    "norm": torch.tensor([1.5, -2.0]).to(torch.bfloat16),
    "steps": torch.tensor(7),
    "none": torch.empty(0, 3),
    "large": torch.arange(1000, dtype=torch.float64),
    "last": torch.tensor([True, False]),
}


@pytest.fixture
def shared():
    with SharedWeights() as shared:
        yield shared


@pytest.fixture
def sender(shared):
    """A trainer's sender, in pieces of at most 128 bytes, a larger tensor aside; the memory outlives it."""
    with BroadcastWeights(piece_bytes=128) as sender:
        yield sender


def offer(shared, sender, tensors):
    with shared.offer(tensors.items()) as held, sender.offer(held) as source:
        return source


def read(source):
    return dict(Broadcast(source.settings).tensors())


def assert_equal(found, expected):
    assert [*found] == [*expected]
    for name, tensor in expected.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(found[name], tensor)


def test_tensors_arrive_as_they_were_in_every_pass_though_the_trainer_goes_on(shared, sender):
    weights = {name: tensor.clone() for name, tensor in TENSORS.items()}
    source = offer(shared, sender, weights)
    weights["norm"] += 1
    weights["large"].zero_()
    once = Broadcast(source.settings)
    for _ in range(2):
        assert_equal(dict(once.tensors()), TENSORS)
    assert_equal(read(source), TENSORS)


def test_processes_that_read_at_once_get_the_same_weights(shared, sender):
    source = offer(shared, sender, TENSORS)
    found = [None] * 3

    def fill(place):
        found[place] = read(source)

    threads = [threading.Thread(target=fill, args=(place,)) for place in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for each in found:
        assert_equal(each, TENSORS)


def test_a_piece_holds_whole_tensors_and_a_large_one_goes_alone(shared, sender):
    source = offer(shared, sender, TENSORS)
    pieces = [[row.name for row in piece] for piece in broadcast._pieces(source.settings)]
    assert pieces == [["embed", "norm"], ["steps", "none"], ["large"], ["last"]]


def test_old_weights_are_sent_until_new_ones_are_loaded_and_after_an_update_that_failed(shared, sender):
    old = offer(shared, sender, {"weight": torch.ones(2)})

    def fail():
        with shared.offer({"weight": torch.zeros(2)}.items()) as held, sender.offer(held) as refused:
            assert read(old)["weight"].tolist() == [1, 1]
            assert read(refused)["weight"].tolist() == [0, 0]
            raise EngineError("no instance could load them")

    with pytest.raises(EngineError, match="no instance"):
        fail()
    assert read(old)["weight"].tolist() == [1, 1]
    new = offer(shared, sender, {"weight": torch.zeros(2)})
    assert read(new)["weight"].tolist() == [0, 0]


def test_both_weights_are_sent_after_an_interrupt_until_the_next_update(shared, sender):
    old = offer(shared, sender, {"weight": torch.ones(2)})
    with (
        pytest.raises(KeyboardInterrupt),
        shared.offer({"weight": torch.zeros(2)}.items()) as held,
        sender.offer(held) as interrupted,
    ):
        raise KeyboardInterrupt
    assert (read(old)["weight"].tolist(), read(interrupted)["weight"].tolist()) == ([1, 1], [0, 0])


def test_a_reader_that_leaves_in_the_middle_breaks_no_later_pass(shared, sender):
    source = offer(shared, sender, TENSORS)
    leaving = Broadcast(source.settings).tensors()
    assert next(leaving)[0] == "embed"
    leaving.close()
    assert_equal(read(source), TENSORS)


@pytest.mark.parametrize("passes", [0, 1])
def test_a_trainer_that_is_killed_in_the_middle_of_a_pass_is_an_error_there(tmp_path, killed_trainer, passes):
    from safetensors.torch import save_file

    save_file({f"layer{i}": torch.full((100,), float(i)) for i in range(6)}, tmp_path / "model.safetensors")
    source = Broadcast(killed_trainer(tmp_path, passes).settings)
    for _ in range(passes):
        assert len(dict(source.tensors())) == 6
    found = []
    with pytest.raises(EngineError, match=r"the weights did not arrive: .*; the trainer, or another reader"):
        found.extend(source.tensors())
    assert len(found) < 6


def test_a_trainer_that_is_not_there_is_an_error_that_names_its_address(shared, monkeypatch):
    monkeypatch.setattr(broadcast, "CONNECT_S", 1)
    with BroadcastWeights() as sender:
        source = offer(shared, sender, TENSORS)
    del sender
    with pytest.raises(EngineError, match=r"cannot be reached: .*'127\.0\.0\.1' its address"):
        read(source)


def test_bytes_that_changed_on_their_way_are_refused_at_the_end(shared, sender, monkeypatch):
    source = offer(shared, sender, TENSORS)
    original = SharedMemory.bytes_between

    def one_bit_off(memory, begin, end):
        values = original(memory, begin, end).clone()
        values[0] ^= 1
        return values

    monkeypatch.setattr(SharedMemory, "bytes_between", one_bit_off)
    with pytest.raises(EngineError, match=f"have the digest [0-9a-f]{{64}}, not {shared.digest}"):
        read(source)
    expected = {name: (tensor.shape, _bytes(tensor)) for name, tensor in TENSORS.items()}
    assert shared.digest == digest_of(expected)


def _bytes(tensor):
    return bytes(tensor.contiguous().flatten().view(torch.uint8).numpy())


def test_they_are_checked_as_a_directory_is(shared, sender):
    wanted = {"weight": TensorHeader((2,), torch.float32)}
    sound = offer(shared, sender, {"weight": torch.ones(2)})
    assert [*dict(open_checked(sound, wanted, [], torch.float32).tensors())] == ["weight"]
    unsound = offer(shared, sender, {"weight": torch.tensor([1.0, torch.nan])})
    with pytest.raises(Rejected, match="'weight' has values that are no finite numbers"):
        open_checked(unsound, wanted, [], torch.float32)


def test_a_backend_that_this_torch_lacks_is_refused():
    with pytest.raises(ConfigError, match="no backend 'mpi' to send weights by; take gloo"):
        BroadcastWeights(backend="mpi")
