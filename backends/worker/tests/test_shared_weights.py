"""Weights in memory that trainer and engines share: written by the one, read by the others, freed in time."""

import json
import os
import signal
import subprocess
import sys

import pytest
import torch
from seer_host.shared_weights import SharedWeights, digest_of
from seer_worker.process.adapter import Rejected
from seer_worker.weights.checkpoint import TensorHeader, open_checked
from seer_worker.weights.shared_weights import SharedMemory

from seer_core.errors import EngineError, OutputError

TENSORS = {
    "embed": torch.arange(12, dtype=torch.float32).reshape(4, 3).t(),  # in no order of memory
    "norm": torch.tensor([1.5, -2.0]).to(torch.bfloat16),
    "steps": torch.tensor(7),
    "none": torch.empty(0, 3),
}


@pytest.fixture
def shared():
    with SharedWeights() as shared:
        yield shared


def read(source):
    return dict(SharedMemory(source.settings).tensors())


def offer(shared, tensors):
    with shared.offer(tensors.items()) as source:
        return source


def test_tensors_are_read_as_they_were_written(shared):
    source = offer(shared, TENSORS)
    found = read(source)
    assert [*found] == [*TENSORS]
    for name, tensor in TENSORS.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(found[name], tensor)
    expected = {name: ([*each.shape], bytes_of(each)) for name, each in reversed(TENSORS.items())}
    assert shared.digest == source.settings["digest"] == digest_of(expected)


def bytes_of(tensor):
    return bytes(tensor.contiguous().flatten().view(torch.uint8).numpy())


def test_parameters_that_go_on_being_trained_do_not_change_what_was_offered(shared):
    weight = torch.nn.Parameter(torch.ones(3))
    source = offer(shared, {"weight": weight})
    with torch.no_grad():
        weight.fill_(2)
    assert read(source)["weight"].tolist() == [1, 1, 1]


def test_no_process_can_change_what_was_offered(shared):
    source = offer(shared, TENSORS)
    with pytest.raises(PermissionError), open(source.settings["area"], "r+b", buffering=0) as file:
        file.write(b"x")
    with pytest.raises(PermissionError):
        os.truncate(source.settings["area"], 0)
    read(source)["embed"].fill_(9)  # a reader writes into a copy
    assert torch.equal(read(source)["embed"], TENSORS["embed"])


def test_old_weights_are_there_until_the_new_ones_are_loaded_and_after_an_update_that_failed(shared):
    old = offer(shared, {"weight": torch.zeros(2)})
    with pytest.raises(EngineError, match="refused"), shared.offer([("weight", torch.ones(2))]) as refused:
        raise EngineError("refused")
    with shared.offer([("weight", torch.full((2,), 2.0))]) as new:
        assert read(old)["weight"].tolist() == [0, 0]
        assert read(new)["weight"].tolist() == [2, 2]
    assert read(new)["weight"].tolist() == [2, 2]
    for gone in (old, refused):
        with pytest.raises(EngineError, match=r"the trainer must be alive|its process is another one"):
            read(gone)
    shared.close()
    with pytest.raises(EngineError):
        read(new)


def test_both_weights_are_there_after_an_interrupt_until_the_next_update(shared):
    old = offer(shared, {"weight": torch.zeros(2)})
    with pytest.raises(KeyboardInterrupt), shared.offer([("weight", torch.ones(2))]) as loaded:
        raise KeyboardInterrupt
    assert (read(old)["weight"].tolist(), read(loaded)["weight"].tolist()) == ([0, 0], [1, 1])
    new = offer(shared, {"weight": torch.full((2,), 2.0)})
    for gone in (old, loaded):
        with pytest.raises(EngineError):
            read(gone)
    assert read(new)["weight"].tolist() == [2, 2]


def test_an_engine_that_has_mapped_weights_keeps_them_when_the_trainer_lets_go(shared):
    tensor = read(offer(shared, TENSORS))["embed"]
    shared.close()
    assert torch.equal(tensor, TENSORS["embed"])


def test_another_area_under_the_same_descriptor_is_not_taken_for_the_first(shared):
    first = offer(shared, {"weight": torch.zeros(2)})
    shared.close()
    second = offer(shared, {"weight": torch.ones(2)})
    assert second.settings["area"] == first.settings["area"]
    with pytest.raises(EngineError, match="does not hold the weights whose digest is"):
        read(first)


def test_a_file_that_could_still_change_is_refused(shared, tmp_path):
    settings = dict(offer(shared, {"weight": torch.zeros(2)}).settings)
    with open(settings["area"], "rb") as area:
        (tmp_path / "copy").write_bytes(area.read())
    with pytest.raises(EngineError, match="cannot be read"):
        SharedMemory({**settings, "area": str(tmp_path / "copy")})


def test_a_trainer_that_was_killed_leaves_nothing(tmp_path):
    code = (
        "import sys, msgspec, torch; from seer_host.shared_weights import SharedWeights\n"
        "with SharedWeights().offer([('weight', torch.ones(2))]) as source:\n"
        "    print(msgspec.json.encode(source.settings).decode(), flush=True); sys.stdin.read()"
    )
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", code], **pipes) as trainer:
        settings = json.loads(trainer.stdout.readline())
        assert dict(SharedMemory(settings).tensors())["weight"].tolist() == [1, 1]
        trainer.send_signal(signal.SIGKILL)
    with pytest.raises(EngineError, match="the trainer must be alive, on the engine's machine"):
        SharedMemory(settings)


def test_a_forked_process_does_not_hold_weights_that_its_parent_frees():
    code = """
import os, pathlib, sys, torch
from seer_host.shared_weights import SharedWeights
from seer_worker.weights.shared_weights import SharedMemory

with SharedWeights() as shared:
    with shared.offer([("weight", torch.ones(2))]) as source:
        pass
    number = int(source.settings["area"].rpartition("/")[2])
    child = os.fork()
    if not child:
        with open(os.devnull) as other:  # the descriptor is another file's by now, which stays open
            shared.close()
            os._exit(other.fileno() != number or os.fstat(number).st_size)
    _, status = os.waitpid(child, 0)
    assert dict(SharedMemory(source.settings).tensors())["weight"].tolist() == [1, 1]
sys.exit(os.waitstatus_to_exitcode(status))
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_they_are_checked_as_a_directory_is(shared):
    wanted = {"weight": TensorHeader((2,), torch.float32)}
    good = offer(shared, {"weight": torch.ones(2)})
    assert dict(open_checked(good, wanted, [], torch.float32).tensors())["weight"].tolist() == [1, 1]
    for tensor, fact in (
        (torch.tensor([1.0, torch.nan]), "no finite numbers"),
        (torch.ones(3), r"has the shape \[3\]"),
        (torch.ones(2, dtype=torch.int8), "holds int8"),
    ):
        with pytest.raises(Rejected, match=fact):
            open_checked(offer(shared, {"weight": tensor}), wanted, [], torch.float32)
    with pytest.raises(Rejected, match="no tensors"):
        open_checked(offer(shared, {}), wanted, [], torch.float32)


def test_without_memory_the_error_says_what_to_do(shared, monkeypatch):
    def full(*_):
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(OutputError, match="Cannot allocate memory; free some, or use a directory"):
        offer(shared, TENSORS)


def test_a_pipe_in_the_place_of_the_weights_is_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(EngineError, match="the weights in shared memory cannot be read"):
        SharedMemory({"area": str(tmp_path / "pipe"), "table": [], "digest": "d"})
