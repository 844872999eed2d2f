"""vLLM's CPU build loses sampling parameters where drafts are verified; the cure does not."""

import pytest

torch = pytest.importorskip("torch")

from seer_vllm import cpu_cure  # noqa: E402

COUNTS = [3, 0, 7, 1, 26]


@pytest.fixture
def totals():
    return torch.tensor(COUNTS, dtype=torch.int32).cumsum(0).to(torch.int32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int32, torch.int64])
def test_each_parameter_is_repeated_for_each_token_of_its_request(totals, dtype):
    values = [5, 8, 2, 9, 4]
    expanded = cpu_cure.expand_batch_to_tokens(torch.tensor(values, dtype=dtype), totals, sum(COUNTS), 9, 1)
    wanted = [
        1 if value == 9 else value for value, count in zip(values, COUNTS, strict=True) for _ in range(count)
    ]
    assert expanded.tolist() == wanted
    assert expanded.dtype is dtype


def test_the_cure_is_what_vllm_s_rejection_sampler_calls_once_it_is_installed(totals, monkeypatch):
    sampler = pytest.importorskip("vllm.v1.sample.rejection_sampler")
    stock = sampler.expand_batch_to_tokens
    monkeypatch.setattr(sampler, "expand_batch_to_tokens", stock)
    cpu_cure.install()
    assert sampler.expand_batch_to_tokens is cpu_cure.expand_batch_to_tokens
