"""Weights are looked at before an engine loads anything of them, from any source."""

import json
import os
import sys

import pytest
import torch
from safetensors.torch import save_file
from seer_worker.process.adapter import Rejected
from seer_worker.weights.checkpoint import Directory, TensorHeader, headers_of, open_checked, ties

from seer_core.ports.weights import WeightSpec, directory

HERE = "test_host_checkpoint"
WANTED = {
    "embed": TensorHeader((4, 3), torch.float32),
    "up": TensorHeader((2, 3), torch.float32),
    "steps": TensorHeader((1,), torch.int64),
}
GOOD = {"embed": torch.ones(4, 3), "up": torch.ones(2, 3), "steps": torch.tensor([7])}
TIES = [["embed", "head"]]


class Memory:
    """A source that reads what a test has left in this module, and counts how often."""

    left = None
    readings = 0

    def __init__(self, settings):
        self.scale = settings["scale"]

    def tensors(self):
        type(self).readings += 1
        for name, tensor in self.left.items():
            yield name, tensor * self.scale


class Torn(Memory):
    """One that breaks in the middle."""

    def tensors(self):
        yield from super().tensors()
        raise KeyError("the trainer is gone")


class Stammering(Memory):
    """One that says everything twice."""

    def tensors(self):
        yield from super().tensors()
        yield from super().tensors()


class Mute:
    """One that has nothing to say."""

    def __init__(self, settings):
        pass


@pytest.fixture(autouse=True)
def _module(monkeypatch):
    """Workers would import this module."""
    monkeypatch.setitem(sys.modules, HERE, sys.modules[__name__])
    monkeypatch.setattr(Memory, "left", dict(GOOD))
    monkeypatch.setattr(Memory, "readings", 0)


def look(name="Memory", dtype=torch.float32, **left):
    """Open a source of this module."""
    Memory.left |= left
    return open_checked(WeightSpec(f"{HERE}:{name}", {"scale": 1}), WANTED, TIES, dtype)


def test_a_source_that_holds_the_models_tensors_may_be_read_again():
    source = look()
    readings = Memory.readings
    for _ in range(2):
        assert {name: tensor.tolist() for name, tensor in source.tensors()} == {
            name: tensor.tolist() for name, tensor in GOOD.items()
        }
    assert Memory.readings == readings + 2


@pytest.mark.parametrize(
    ("left", "fact"),
    [
        ({"extra": torch.ones(1)}, "tensor 'extra' is none of the model's"),
        ({"up": torch.ones(3, 2)}, r"tensor 'up' has the shape \[3, 2\], the model's has \[2, 3\]"),
        ({"up": torch.ones(2, 3, dtype=torch.int8)}, "tensor 'up' holds int8, the model's float32"),
        ({"up": torch.full((2, 3), float("nan"))}, "tensor 'up' has values that are no finite numbers"),
        (
            {"up": torch.full((2, 3), 1e30)},
            "tensor 'up' has values beyond 65504, too large for torch.float16",
        ),
        ({"head": torch.zeros(4, 3)}, "tensor 'head' differs from 'embed'"),
    ],
)
def test_a_tensor_that_will_not_do_is_named(left, fact):
    with pytest.raises(Rejected, match=fact):
        look(dtype=torch.float16, **left)


def test_what_converts_is_taken_and_so_is_a_tied_tensor_by_either_name_or_both():
    look(up=torch.ones(2, 3, dtype=torch.bfloat16), head=torch.ones(4, 3))
    Memory.left.pop("embed")
    look()
    Memory.left.pop("head")
    with pytest.raises(Rejected, match="tensor 'embed' is missing; save all"):
        look()


@pytest.mark.parametrize(
    ("name", "fact"),
    [
        ("Torn", f"weight source '{HERE}:Torn' failed: KeyError: 'the trainer is gone'"),
        ("Stammering", "tensor 'embed' is there twice"),
        ("Mute", "is no WeightSource: it lacks tensors; correct what update_weights was given"),
        ("Missing", f"weight source '{HERE}:Missing' cannot be imported"),
    ],
)
def test_a_source_that_is_none_or_fails_is_refused_by_its_name(name, fact):
    with pytest.raises(Rejected, match=fact):
        look(name)
    Memory.left.clear()
    with pytest.raises(Rejected, match=f"no tensors in '{HERE}:Memory'"):
        look()


def test_a_directory_holds_the_tensors_of_its_index_or_of_all_its_files(tmp_path):
    with pytest.raises(Rejected, match=f"no safetensors in '{tmp_path}'"):
        open_checked(directory(tmp_path), WANTED, TIES, torch.float32)
    save_file({"embed": GOOD["embed"]}, tmp_path / "1.safetensors")
    save_file({"up": GOOD["up"], "steps": GOOD["steps"]}, tmp_path / "2.safetensors")
    assert headers_of(str(tmp_path)) == WANTED
    source = open_checked(directory(tmp_path), WANTED, TIES, torch.float32)
    assert isinstance(source, Directory)
    assert {name: tensor.tolist() for name, tensor in source.tensors()} == {
        name: tensor.tolist() for name, tensor in GOOD.items()
    }
    save_file({"up": GOOD["up"]}, tmp_path / "3.safetensors")
    with pytest.raises(Rejected, match=r"tensor 'up' is in both 2\.safetensors and 3\.safetensors"):
        open_checked(directory(tmp_path), WANTED, TIES, torch.float32)
    index = {"weight_map": {"embed": "1.safetensors", "up": "2.safetensors", "steps": "2.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    open_checked(directory(tmp_path), WANTED, TIES, torch.float32)
    (tmp_path / "2.safetensors").write_bytes(b"\x10\x00\x00\x00\x00\x00\x00\x00{")
    with pytest.raises(Rejected, match="its safetensors cannot be read"):
        open_checked(directory(tmp_path), WANTED, TIES, torch.float32)


def test_ties_are_the_names_of_one_and_the_same_parameter():
    model = torch.nn.ModuleDict({"embed": torch.nn.Linear(2, 2), "head": torch.nn.Linear(2, 2)})
    assert ties(model) == []
    model["head"].weight = model["embed"].weight
    assert ties(model) == [["embed.weight", "head.weight"]]


def test_a_pipe_and_files_of_other_directories_are_refused_and_not_opened(tmp_path):
    os.mkfifo(tmp_path / "model.safetensors")
    with pytest.raises(Rejected, match=r"its model\.safetensors is no file"):
        open_checked(directory(tmp_path), WANTED, TIES, torch.float32)
    (tmp_path / "elsewhere").mkdir()
    save_file(GOOD, tmp_path / "elsewhere/1.safetensors")
    for name in (str(tmp_path / "elsewhere/1.safetensors"), "elsewhere/1.safetensors", "../x"):
        index = {"weight_map": dict.fromkeys(GOOD, name)}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
        with pytest.raises(Rejected, match="which is no file of this directory"):
            open_checked(directory(tmp_path), WANTED, TIES, torch.float32)
