"""The kernels of keyed sampling, compiled for GPUs that are not there."""

import pytest

pytest.importorskip("triton")

from bench.gpu.compiled import KERNELS, compiled
from bench.gpu.devices import TARGETS

REGISTERS = 96
"""With eight warps, two programs then share a multiprocessor of any of the targets."""


@pytest.mark.parametrize(
    "target", [pytest.param(name, marks=() if name == "sm_90" else pytest.mark.long) for name in TARGETS]
)
@pytest.mark.parametrize("name", KERNELS)
def test_a_kernel_compiles_for_each_gpu_without_spills_and_rounds_as_often_as_pytorch(name, target):
    found = compiled(name, target)
    assert found["registers"] <= REGISTERS
    assert found["spilled"] == 0
    assert found["fused"] == 0 or name.startswith("join")  # whose log-probs need not have the same bits
