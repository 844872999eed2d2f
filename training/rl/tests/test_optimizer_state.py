"""The optimizer's file in a checkpoint."""

import pytest
import torch
from seer_rl.optimizer_state import load_optimizer, save_optimizer

from seer_core.errors import ConfigError


def stepped(updates):
    """Return a parameter after so many steps along the same gradient, and its optimizer."""
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([parameter], lr=0.1)
    for _ in range(updates):
        parameter.grad = torch.tensor([1.0, 2.0, 3.0])
        optimizer.step()
    return parameter, optimizer


def test_an_optimizer_that_is_restored_takes_the_step_that_it_would_have_taken(tmp_path):
    parameter, optimizer = stepped(2)
    save_optimizer(tmp_path / "optimizer.pt", optimizer, 2)
    noise = torch.rand(4)
    expected, _ = stepped(3)
    again, fresh = stepped(0)
    again.data = parameter.data.clone()
    assert load_optimizer(tmp_path / "optimizer.pt", fresh, "cpu") == 2
    assert torch.equal(torch.rand(4), noise)
    again.grad = torch.tensor([1.0, 2.0, 3.0])
    fresh.step()
    assert torch.equal(again, expected)


@pytest.mark.parametrize("content", [None, b"", b"not a checkpoint"])
def test_a_file_that_is_missing_or_damaged_is_one_error(tmp_path, content):
    file = tmp_path / "optimizer.pt"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError, match=r"optimizer\.pt is no state of an optimizer: .*; delete "):
        load_optimizer(file, stepped(0)[1], "cpu")
