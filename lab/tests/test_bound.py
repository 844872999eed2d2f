"""The least time of a workload: no policy takes less, and it is not far below."""

import json

import pytest
from seer_lab.bound import Machine, bounds_of, lower_bound
from seer_lab.choose import choose_workload
from seer_lab.lengths import GroupLengths
from seer_lab.policies import POLICIES
from seer_lab.simulate import simulate
from seer_lab.workloads import WORKLOADS, scaled
from seer_sim.cost import PRESETS
from seer_sim.drafts import Drafts

NAMES = ("verl", "divided", "context", "oracle", "seer", "grouped-sd-on-verl")
LENGTHS = ("groups=16", "group_size=8", "mean_tokens=900", "cap_tokens=4000", "prompt_tokens=200")


@pytest.fixture(params=[("qwen2-vl-72b", 3.0), ("moonlight", 1.0), ("kimi-k2", 6.0), ("qwen2.5-14b", 0.4)])
def workload(request):
    cluster, pressure = request.param
    return choose_workload("synthetic", on=cluster, instances=2, pressure=pressure, lengths=LENGTHS)


def test_no_policy_takes_less_than_the_bound(workload):
    policies = [POLICIES[name] for name in NAMES]
    bounds = bounds_of(workload, policies, [0])
    for policy in policies:
        took_s = simulate(workload, policy, 0).summary.total_time_s
        assert took_s >= bounds[policy.name, 0] > 0.3 * took_s, policy.name
    assert bounds["seer", 0] < bounds["context", 0]


def test_a_good_policy_comes_close_to_the_bound_of_the_paper_s_workload():
    workload = scaled(WORKLOADS["qwen2-vl-72b"], 0.125)
    [bound] = bounds_of(workload, [POLICIES["oracle"]], [0]).values()
    assert bound > 0.75 * simulate(workload, POLICIES["oracle"], 0).summary.total_time_s


def machine(**changes):
    facts = {"instances": 1, "kv_capacity_tokens": 100_000, "max_running": 64} | changes
    return Machine(PRESETS["h800-qwen2-vl-72b-tp8"], **facts)


def groups(count, tokens, size=1):
    return [GroupLengths(f"g{number}", 100, (tokens,) * size, tokens) for number in range(count)]


def test_one_response_takes_as_long_as_alone_on_any_number_of_instances():
    alone = lower_bound(groups(1, 2000), machine())
    assert alone.total_time_s == pytest.approx(alone.longest_s)
    assert lower_bound(groups(1, 2000), machine(instances=8)).total_time_s == pytest.approx(alone.longest_s)


def test_twice_the_instances_take_half_the_time_where_kv_is_short():
    short = lower_bound(groups(200, 2000), machine(kv_capacity_tokens=20_000)).total_time_s
    half = lower_bound(groups(200, 2000), machine(kv_capacity_tokens=20_000, instances=2)).total_time_s
    assert half == pytest.approx(short / 2, rel=1e-3)


def test_slots_bind_where_kv_does_not():
    few = lower_bound(groups(100, 500), machine(max_running=4)).total_time_s
    many = lower_bound(groups(100, 500), machine(max_running=64)).total_time_s
    assert few > 3 * many


def test_drafts_that_cost_nothing_lower_the_bound_by_their_acceptance_at_most():
    plain = lower_bound(groups(20, 500, size=4), machine()).total_time_s
    free = Drafts(request_s=0.0)
    drafted = lower_bound(groups(20, 500, size=4), machine(), free).total_time_s
    assert plain / (1 + sum(free.table()[-1])) < drafted < plain


def test_the_command_prints_and_writes_the_bound(seer, tmp_path):
    file = tmp_path / "sim.json"
    arguments = [f"--lengths={each}" for each in LENGTHS]
    arguments += ["--instances", "2", "--policy", "verl", "--policy", "seer", "--policy", "verl+sd"]
    shown = seer("sim", "synthetic", *arguments, "--bound", "--json", file).output
    assert "over bound: total time over the least that any schedule takes" in shown
    verl, drafting, other = json.loads(file.read_text())
    assert verl["over_bound"][0] == pytest.approx(verl["total_time_s"] / verl["bounds_s"][0])
    assert 1 <= drafting["over_bound"][0] < 3
    assert "over_bound" not in other
