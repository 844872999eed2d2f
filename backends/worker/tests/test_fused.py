"""The kernels of keyed sampling, in Triton's interpreter: their tokens are PyTorch's."""

from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import pytest

pytest.importorskip("torch")

import torch
from seer_worker.sampling import fused, kernels, keyed, noise
from seer_worker.sampling.fused import chosen_by_key
from torch.utils._python_dispatch import TorchDispatchMode

from bench.gpu import drawn_cases
from bench.gpu.drawn_cases import KINDS, NEAR

MANY = 1_000_000
SEEDS = range(len(KINDS))
"""One seed for each kind of cut."""


@pytest.fixture(scope="module")
def interpreted():
    """Return a function that calls another in a process whose Triton interprets kernels."""
    with ProcessPoolExecutor(1, get_context("spawn"), drawn_cases.interpret) as pool:
        yield lambda function, *arguments: pool.submit(function, *arguments).result()


@pytest.mark.parametrize(
    ("seed", "dtype"),
    [*((seed, "float32") for seed in SEEDS), (1, "bfloat16"), (4, "bfloat16"), (5, "float16")],
)
def test_tokens_are_those_of_pytorch_and_log_probs_are_near(interpreted, seed, dtype):
    found = interpreted(drawn_cases.differences, seed, 256, 61, dtype, "cpu", (256, 16))
    assert found["differing"] == 0
    assert found["logprob_off"] < NEAR


@pytest.mark.parametrize("seed", SEEDS[-1:])
def test_a_program_of_one_row_and_long_blocks_chooses_the_same_tokens(interpreted, seed):
    found = interpreted(drawn_cases.differences, seed, 2, 2_500, "bfloat16")
    assert found["differing"] == 0


@pytest.mark.parametrize("seed", SEEDS[-2:])
def test_a_row_has_the_same_token_alone_and_in_any_blocks(interpreted, seed):
    whole = interpreted(drawn_cases.differences, seed, 3, 61, "bfloat16", "cpu", (2, 32))
    assert interpreted(drawn_cases.row_by_row, seed, 3, 61, "bfloat16") == whole["tokens"]


@pytest.mark.long
def test_a_million_drawn_cases_have_equal_tokens(interpreted):
    rows, cases = 4_096, 0
    for seed in range(MANY // rows + 1):
        dtype = "bfloat16" if seed // len(KINDS) % 2 else "float32"
        found = interpreted(drawn_cases.differences, seed, rows, 37, dtype, "cpu", (rows, 64))
        assert found["differing"] == 0, seed
        assert found["logprob_off"] < NEAR, seed
        cases += found["cases"]
    assert cases >= MANY


class Refuser(TorchDispatchMode):
    """Counts operations, and refuses those for which the host waits for the device."""

    def __init__(self):
        super().__init__()
        self.operations = 0

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        name = str(function._overloadpacket)
        assert name not in ("aten._local_scalar_dense", "aten.nonzero", "aten.equal", "aten.unique"), name
        found = function(*arguments, **(options or {}))
        if name == "aten._to_copy":
            assert found.device == arguments[0].device, name
        self.operations += 1
        return found


def operations_of(choose, kind):
    """Return how many operations PyTorch is asked for, on tensors that hold no numbers."""
    case = drawn_cases.draw(KINDS.index(kind), 8, 512, "bfloat16", "meta")
    with Refuser() as refuser:
        choose(**case)
    return refuser.operations


LAUNCHES = {"tally": 0, "settle": 0, "score": 0, "join": 0}


@pytest.mark.parametrize(
    ("kind", "launches", "operations"),
    [
        ((), {"score": 1, "join": 1}, 9),
        (("top_p",), {"score": 1, "join": 1}, 12),
        (("top_k",), {"score": 1, "join": 1}, 10),
        (("top_k", "top_p", "min_p"), {"tally": 4, "settle": 1, "score": 1, "join": 1}, 48),
    ],
)
def test_on_a_device_the_host_never_waits_and_asks_for_few_operations(
    monkeypatch, kind, launches, operations
):
    found = dict(LAUNCHES)

    class Launched:
        """Stands in for a kernel, which a tensor without numbers cannot have."""

        def __init__(self, name):
            self.name = name

        def __getitem__(self, grid):
            def launch(*arguments, enable_fp_fusion, **options):
                assert enable_fp_fusion is False
                found[self.name] += 1

            return launch

    for name in LAUNCHES:
        monkeypatch.setattr(kernels, name, Launched(name))
    monkeypatch.setattr(fused, "usable", lambda logits: True)
    assert operations_of(chosen_by_key, kind) <= operations
    assert found == LAUNCHES | launches


@pytest.mark.parametrize("kind", KINDS)
def test_without_triton_the_host_never_waits_either(kind):
    noise.noise_steps.cache_clear()
    assert operations_of(keyed.keyed_choices, kind) > 60


def test_the_kernels_run_on_gpus_alone():
    assert not fused.usable(torch.zeros(1, 4))
    assert not fused.usable(torch.zeros(1, 4, device="meta"))
