"""On a device the first model runner's sampler chooses what it chooses on a CPU, and the host never waits."""

import warnings
from types import SimpleNamespace

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from seer_vllm.sampling import StepDrafts, VllmSampler  # noqa: E402

from bench.device_waits import DeviceWaits, off_device, on_device  # noqa: E402

pytestmark = pytest.mark.engine  # imports vLLM
VOCAB, LAST = 12, 3
COUNTS = np.array([3, 0, 2, 4, 1, 3], dtype=np.int64)


def sampler_of(*, top_p, logprobs, asking=0):
    requests = len(COUNTS)
    metadata = SimpleNamespace(
        all_greedy=False,
        temperature=torch.tensor([0.0, 0.7, 1.0]).repeat(requests // 3),
        top_k=None,
        top_p=torch.full((requests,), 0.9) if top_p else None,
        max_num_logprobs=logprobs,
    )
    batch = SimpleNamespace(
        req_ids=list(range(requests)),
        sampling_metadata=metadata,
        num_tokens_no_spec=np.arange(10, 10 + requests, dtype=np.int32),
    )
    params = [SimpleNamespace(extra_args={"seed": 7 * i}, logprobs=asking * (i % 2)) for i in range(requests)]
    owners = [SimpleNamespace(sampling_params=each) for each in params]
    return VllmSampler(SimpleNamespace(input_batch=batch, requests=owners), [LAST])


def sampled(drafts, logits, **settings):
    """Return the sampler's output for a step, on a CPU and on a device, and the waits for the latter."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # vLLM's own imports
        here = sampler_of(**settings).sample(logits, drafts(torch.device("cpu")))
        sampler = sampler_of(**settings)
        metadata = sampler._runner.input_batch.sampling_metadata
        metadata.temperature, metadata.top_p = on_device((metadata.temperature, metadata.top_p))
        with torch.inference_mode(), DeviceWaits() as waits:  # as in vLLM's runners
            there = sampler.sample(on_device(logits), drafts(torch.device("meta")))
    return here, off_device(vars(there)), waits


def as_read(tokens, logprobs):
    """Return what vLLM reads: the tokens, and of each its log-probs and their tokens."""
    kept = tokens.flatten() != -1
    return tokens, logprobs.logprob_token_ids[kept], logprobs.logprobs[kept]


@pytest.mark.parametrize("grad", [torch.no_grad, torch.inference_mode])
def test_a_copy_to_the_host_is_counted_in_inference_mode_too(grad):
    with grad(), DeviceWaits() as waits:
        there = torch.cat([on_device(torch.arange(4)).to(torch.int32)])
        assert there.cpu().tolist() == torch.tensor([0, 1, 2, 3], device="meta").tolist()
    assert waits.found["copy to the host"] == 2


@pytest.mark.parametrize(
    "settings", [{"top_p": False, "logprobs": 0}, {"top_p": True, "logprobs": 2, "asking": 2}]
)
@pytest.mark.parametrize("drafted", [True, False])
def test_a_step_has_the_same_tokens_and_the_host_never_waits(settings, drafted):
    random = torch.Generator().manual_seed(5)
    counts = COUNTS if drafted else np.zeros_like(COUNTS)
    rows = int((counts + 1).sum())
    logits = torch.randn(rows, VOCAB, generator=random) * 2
    # Drafts that are mostly right: what the same rows are sampled as when each follows the one before it.
    guess = np.random.default_rng(2).integers(0, VOCAB, rows).astype(np.int32)
    ends = np.cumsum(counts + 1)

    def drafts(device):
        return StepDrafts(counts, ends, guess, device) if drafted else None

    for _ in range(4):  # let drafts become right, one by one
        here, _, _ = sampled(drafts, logits, **settings)
        for row, (end, count) in zip(
            here.sampled_token_ids.tolist(), zip(ends, counts, strict=True), strict=True
        ):
            right = [token for token in row if token != -1][: int(count)]
            guess[end - count : end - count + len(right)] = right
    here, there, waits = sampled(drafts, logits, **settings)
    assert (here.sampled_token_ids != -1).sum() > (2 * len(counts) if drafted else 0)
    found = as_read(there["sampled_token_ids"], there["logprobs_tensors"])
    wanted = as_read(here.sampled_token_ids, here.logprobs_tensors)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other)
    assert not waits.total, waits.found
    assert waits.operations
