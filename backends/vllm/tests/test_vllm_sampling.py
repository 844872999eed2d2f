"""Keyed sampling as vLLM's model runner asks for it."""

import warnings
from types import SimpleNamespace

import numpy as np
import pytest

from seer_core.model import Sampling
from seer_core.ports.engine import ChunkJob

torch = pytest.importorskip("torch")

from seer_vllm.sampling import Rows, StepDrafts, VllmSampler  # noqa: E402
from seer_vllm.second_runner_sampling import SecondRunnerSampler  # noqa: E402
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
        SimpleNamespace(sampling_params=SimpleNamespace(extra_args={"seed": i}, logprobs=0))
        for i in range(count)
    ]
    sampler = VllmSampler(SimpleNamespace(input_batch=batch, requests=requests))
    logits = torch.randn(2 * count, 131, generator=torch.Generator().manual_seed(4)) * 3
    columns = np.arange(2 * count) // 2, np.arange(2 * count) * 5
    rows = Rows(*columns, *map(torch.from_numpy, columns))
    together, _ = sampler._choose(logits, rows)
    monkeypatch.setattr(keyed, "CPU_BLOCK", block)
    assert torch.equal(sampler._choose(logits, rows)[0], together)


def test_a_temperature_below_the_least_of_vllm_is_that_of_the_request_on_both_runners():
    asked, raised = [0.0002, 0.5, 0.0005], [0.01, 0.5, 0.01]
    seeds, places = torch.tensor([17, 8, 9]), torch.tensor([3, 4, 5])
    extras = [{"seed": seed} for seed in seeds.tolist()]
    extras[0]["temperature"], extras[2]["temperature"] = asked[0], asked[2]
    logits = torch.randn(3, 500, generator=torch.Generator().manual_seed(1)) * 0.004
    logits[1] *= 100
    wanted, other = (
        keyed.keyed_choices(logits, torch.tensor(each), None, None, seeds, places) for each in (asked, raised)
    )
    assert (wanted != other).tolist() == [True, False, True]
    metadata = SimpleNamespace(all_greedy=False, temperature=torch.tensor(raised), top_k=None, top_p=None)
    requests = [SimpleNamespace(sampling_params=SimpleNamespace(extra_args=e, logprobs=0)) for e in extras]
    batch = SimpleNamespace(req_ids=[0, 1, 2], sampling_metadata=metadata)
    first = VllmSampler(SimpleNamespace(input_batch=batch, requests=requests))
    for owner in (None, np.array([0, 1, 2])):
        owners = None if owner is None else torch.from_numpy(owner)
        rows = Rows(owner, places.numpy(), owners, places)
        assert torch.equal(first._choose(logits, rows)[0], wanted)

    def state(dtype, value):
        host = torch.full((3,), value, dtype=dtype)
        return SimpleNamespace(np=host.numpy(), gpu=host)

    states = SimpleNamespace(
        vocab_size=500,
        seeds=state(torch.int64, 0),
        temperature=state(torch.float32, 0.0),
        top_k=state(torch.int32, 500),
        top_p=state(torch.float32, 1.0),
        min_p=state(torch.float32, 0.0),
    )

    def add_request(slot, params):
        states.temperature.np[slot] = raised[slot]

    samplers = SimpleNamespace(sampling_states=states, add_request=add_request)
    second = SecondRunnerSampler(
        SimpleNamespace(
            model_config=SimpleNamespace(model=""),
            req_states=None,
            num_speculative_steps=0,
            sampler=samplers,
        )
    )
    for slot, extra in enumerate(extras):
        second.add_request(slot, SimpleNamespace(extra_args=extra))
    slots = torch.arange(3)
    chosen, _ = second.sample(logits, slots, slots, slots.numpy(), places - 1, slots, slots, slots.numpy())
    assert torch.equal(chosen, wanted)


@pytest.mark.engine  # imports vLLM
@pytest.mark.parametrize("temperature", [0.0, 0.000001, 0.002, 0.01, 0.7])
def test_the_parameters_of_a_chunk_have_the_temperature_that_vllm_would_raise(temperature):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # vLLM's own imports
        from seer_vllm.instance import _sampling_params

    job = ChunkJob("c", "r", "g", [1, 2], 2, 8, Sampling(temperature), 0, 0)
    params = _sampling_params(job, [2], None)
    assert params.extra_args.get("temperature", params.temperature) == temperature


def test_in_the_second_runner_the_host_never_waits_for_a_device():
    slots, rows, vocab = 8, 5, 64

    def state(dtype, value):
        host = torch.full((slots,), value, dtype=dtype)
        return SimpleNamespace(np=host.numpy(), gpu=host.to("meta"))

    states = SimpleNamespace(
        vocab_size=vocab,
        seeds=state(torch.int64, 7),
        temperature=state(torch.float32, 0.8),
        top_k=state(torch.int32, 9),
        top_p=state(torch.float32, 0.9),
        min_p=state(torch.float32, 0.1),
    )
    sampler = SecondRunnerSampler(
        SimpleNamespace(
            model_config=SimpleNamespace(model=""),
            req_states=None,
            num_speculative_steps=0,
            sampler=SimpleNamespace(sampling_states=states, add_request=None),
        )
    )
    column = torch.zeros(rows, dtype=torch.int32, device="meta")
    logits = torch.zeros(rows, vocab, dtype=torch.bfloat16, device="meta")  # to read one raises
    batch = np.arange(rows)
    chosen, _ = sampler.sample(logits, column, column, batch, column, column, column, batch)
    assert (chosen.shape, chosen.dtype, chosen.device.type) == ((rows,), torch.int64, "meta")


@pytest.mark.engine  # imports vLLM
@pytest.mark.parametrize("counts", [[3, 0, 2, 0, 1], [0, 0], [4]])
def test_the_drafts_of_a_step_are_where_vllm_looks_for_them(counts):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # vLLM's own imports
        from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    settled = [1, 97, 1, 3, 1][: len(counts)]
    ends = np.cumsum(np.array(counts) + settled, dtype=np.int32)
    token_ids = np.random.default_rng(0).integers(0, 1000, ends[-1], dtype=np.int32)
    runner = SimpleNamespace(
        device=torch.device("cpu"),
        arange_np=np.arange(1000, dtype=np.int64),
        _arange_scratch=np.zeros(1000, dtype=np.int64),
        input_ids=SimpleNamespace(gpu=torch.from_numpy(token_ids)),
    )
    runner._get_cumsum_and_arange = GPUModelRunner._get_cumsum_and_arange.__get__(runner)
    theirs = GPUModelRunner._calc_spec_decode_metadata(runner, np.array(counts, dtype=np.int32), ends)
    ours = StepDrafts(np.array(counts), ends.astype(np.int64), token_ids, torch.device("cpu"))
    assert ours.logits_indices.tolist() == theirs.logits_indices.tolist()
    assert ours.token_ids.tolist() == theirs.draft_token_ids.tolist()
    assert ours.counts.tolist() == theirs.num_draft_tokens
