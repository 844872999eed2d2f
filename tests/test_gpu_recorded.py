"""Part 10 of ``scripts/gpu-check``, as far as it needs no engine: tokens, sizes, and time of all arms."""

import pytest
import torch
from seer_lab.policies import POLICIES
from seer_lab.simulate import simulate
from seer_sim.machines import GPUS, cost_on
from seer_sim.sizes import sizes_of

from bench.gpu import recorded_checks, recorded_part
from bench.gpu.check import BUDGET_S, GpuMachine
from bench.gpu.recorded_part import START_S, STARTS, part_of, shape_of, workload_of
from bench.gpu.recorded_worker import FIRST_SEED, RecordedTokens, save_texts
from seer_core.model.requests import request_seed

SMALL = GpuMachine("cpu", small=True)
LARGE = GpuMachine("cuda", small=False)
TEXTS = [(2, [10, 11, 12]), (3, [20, 21])]


@pytest.fixture
def texts(tmp_path):
    save_texts(tmp_path / "texts.npz", TEXTS)
    return RecordedTokens(tmp_path / "texts.npz")


def test_a_recorded_token_follows_from_the_request_s_seed_and_its_place(texts):
    rows = [(0, 2, 10), (0, 4, 12), (1, 3, 20), (1, 4, 21)]
    seeds = torch.tensor([FIRST_SEED + number for number, _, _ in rows])
    positions = torch.tensor([position for _, position, _ in rows])
    found = texts.in_place_of(torch.full((len(rows),), 5), seeds, positions)
    assert found.tolist() == [token for _, _, token in rows]


@pytest.mark.parametrize(
    ("seed", "position"),
    [(FIRST_SEED, 1), (FIRST_SEED, 5), (FIRST_SEED + 2, 3), (0, 3), (request_seed(0, 0), 3)],
)
def test_a_token_of_no_recording_and_one_inside_a_prompt_stay_the_sampler_s(texts, seed, position):
    found = texts.in_place_of(torch.tensor([5]), torch.tensor([seed]), torch.tensor([position]))
    assert found.tolist() == [5]


def test_what_is_drawn_by_key_gives_way_to_the_text_and_keeps_its_log_prob(texts):
    choose = texts.behind(lambda logits, *_: (torch.tensor([5]), torch.tensor([-0.5])))
    chosen, logprobs = choose(
        torch.zeros(1, 9), torch.ones(1), None, None, torch.tensor([FIRST_SEED]), torch.tensor([3])
    )
    assert (chosen.tolist(), logprobs.tolist()) == ([11], [-0.5])


def test_lengths_are_hidden_and_all_responses_of_a_group_may_be_as_long_as_the_longest():
    part = part_of(SMALL)
    records = recorded_checks.records_of(part)
    assert {each["max_tokens"] for each in records} == {part.longest}
    assert sum(each["n"] for each in records) == len(part.responses)
    seeds = [seed for each in records for seed in each["seeds"]]
    assert seeds == list(range(FIRST_SEED, FIRST_SEED + len(part.responses)))


def test_joined_responses_are_as_unlike_in_length_as_those_that_they_are_made_of():
    groups = [
        (f"g{n}", (n,), [(7,) * each + (2,) for each in lengths])
        for n, lengths in enumerate([[1, 9], [4, 30], [8, 2]])
    ]
    [(name, prompt, texts)] = recorded_part.joined(groups, 2)
    assert (name, prompt, [len(each) for each in texts]) == ("g0", (0, 2), [4, 18])
    assert all(each[-1] == 2 and 2 not in each[:-1] for each in texts)


def test_all_arms_fit_the_budget_on_half_an_h100_each():
    half = GPUS["h100"]
    half = type(half)(half.memory_bytes / 2, half.bytes_per_s / 2, *[each / 2 for each in _rates(half)])
    part, sizes = part_of(LARGE), sizes_of(shape_of(LARGE))
    sim = {
        "kv_capacity_tokens": part.kv_tokens,
        "block_tokens": recorded_part.BLOCK_TOKENS,
        "max_running": recorded_checks.MOST_RUNNING,
        "max_model_tokens": part.context_tokens,
    }
    cost = {"cost": dict_of(cost_on(sizes, half))}
    times = {}
    for name, policy in recorded_checks.ARMS.items():
        load = workload_of(part, sim | cost, {"step_s": 0.4e-3, "request_s": 0.08e-3}, policy)
        times[name] = simulate(load, POLICIES[policy]).summary.total_time_s
    times["stock vLLM"] = times["veRL's policy"]
    assert sum(times.values()) + STARTS * START_S < BUDGET_S


def _rates(gpu):
    return gpu.bf16_flops_per_s, gpu.fp8_flops_per_s, gpu.link_bytes_per_s


def dict_of(struct):
    return {name: getattr(struct, name) for name in struct.__struct_fields__}
