"""Keyed sampling as vLLM's model runner asks for it."""

from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from seer_vllm.sampling import VllmSampler  # noqa: E402
from seer_worker.sampling import keyed  # noqa: E402


@pytest.mark.parametrize("block", [1, 131, 1000])
def test_rows_sampled_in_blocks_are_the_same(monkeypatch, block):
    count = 30
    metadata = SimpleNamespace(
        all_greedy=False,
        temperature=torch.tensor([0.0, 0.7, 1.0]).repeat(count // 3),
        top_k=torch.arange(1, count + 1),
        top_p=torch.full((count,), 0.9),
    )
    batch = SimpleNamespace(req_ids=list(range(count)), sampling_metadata=metadata)
    requests = [
        SimpleNamespace(sampling_params=SimpleNamespace(extra_args={"seed": i})) for i in range(count)
    ]
    sampler = VllmSampler(SimpleNamespace(input_batch=batch, requests=requests))
    logits = torch.randn(2 * count, 131, generator=torch.Generator().manual_seed(4)) * 3
    owners, positions = torch.arange(2 * count) // 2, torch.arange(2 * count) * 5
    together = sampler._choose(logits, owners, positions)
    monkeypatch.setattr(keyed, "CPU_BLOCK", block)
    assert torch.equal(sampler._choose(logits, owners, positions), together)
