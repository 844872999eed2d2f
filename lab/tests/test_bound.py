"""The least time of a workload: no policy takes less, it is not far below, and shares add up."""

import json

import msgspec
import pytest
from seer_lab.bound import Machine, bounds_of, lower_bound
from seer_lab.lengths import GroupLengths, RecordedTurn, with_longer_turns
from seer_lab.policies import POLICIES
from seer_lab.simulate import simulate
from seer_lab.workloads import CLUSTERS, SYNTHETIC, WORKLOADS, crowded, scaled
from seer_sim.drafts import Drafts
from seer_sim.presets import PRESETS

NAMES = ("verl", "divided", "context", "oracle", "seer", "grouped-sd-on-verl", "verl+sd")
LENGTHS = ("groups=16", "group_size=8", "mean_tokens=900", "cap_tokens=4000", "prompt_tokens=200")
SHRUNK_BY = 20
GROUPS = 6


def shrunk(name, cluster, pressure):
    """Return a built-in workload with fewer and shorter responses, as crowded as the whole one."""
    drawn = SYNTHETIC if name == "synthetic" else WORKLOADS[name].lengths
    lengths = msgspec.structs.replace(
        drawn,
        groups=GROUPS,
        mean_tokens=drawn.mean_tokens / SHRUNK_BY,
        cap_tokens=drawn.cap_tokens // SHRUNK_BY,
    )
    return crowded(name, lengths, CLUSTERS[cluster], 2, pressure)


@pytest.fixture(
    params=[
        pytest.param(("qwen2-vl-72b", "qwen2-vl-72b", 3.9), marks=pytest.mark.long, id="qwen2-vl-72b"),
        pytest.param(("moonlight", "moonlight", 1.8), id="moonlight"),
        pytest.param(("kimi-k2", "kimi-k2", 6.0), marks=pytest.mark.long, id="kimi-k2"),
        pytest.param(("synthetic", "qwen2.5-14b", 3.0), id="synthetic"),
    ],
)
def workload(request):
    return shrunk(*request.param)


def test_no_policy_takes_less_than_the_bound_and_its_shares_add_up(workload):
    policies = [POLICIES[name] for name in NAMES]
    bounds = bounds_of(workload, policies, [0])
    assert bounds["seer", 0].total_time_s < bounds["context", 0].total_time_s
    for policy in policies:
        run = simulate(workload, policy, 0, shares=True)
        if (policy.name, 0) in bounds:
            assert run.summary.total_time_s >= bounds[policy.name, 0].total_time_s, policy.name
        assert run.shares is not None
        shares = msgspec.structs.astuple(run.shares)
        assert min(shares) >= 0
        assert sum(shares) == pytest.approx(1, abs=1e-9)
        assert run.shares.idle == pytest.approx(run.idle_share, abs=1e-3)
        assert len(run.kv_by_tenths) == 10
        assert all(0 <= usage <= 1 for usage in run.kv_by_tenths)
        assert max(run.kv_by_tenths) > 0
        if not {"grouped_spec", "vanilla_sd"} & set(policy.plugins):
            assert run.shares.drafts == 0
    for bound in bounds.values():
        shares = msgspec.structs.astuple(bound.shares)
        assert min(shares) >= 0
        assert sum(shares) == pytest.approx(1, abs=1e-6)


def test_an_account_changes_nothing():
    workload = shrunk("qwen2-vl-72b", "qwen2-vl-72b", 3.9)
    plain, accounted = (simulate(workload, POLICIES["seer"], 0, shares=shares) for shares in (False, True))
    assert plain.finish_times_s == accounted.finish_times_s
    assert plain.shares is None


def test_a_good_policy_comes_close_to_the_bound_of_the_paper_s_workload():
    workload = scaled(WORKLOADS["qwen2-vl-72b"], 0.125)
    [bound] = bounds_of(workload, [POLICIES["oracle"]], [0]).values()
    assert bound.total_time_s > 0.75 * simulate(workload, POLICIES["oracle"], 0).summary.total_time_s


def machine(**changes):
    facts = {"instances": 1, "kv_capacity_tokens": 100_000, "max_running": 64, "max_batched_tokens": 8192}
    facts |= changes
    return Machine(PRESETS["h800-qwen2-vl-72b-tp8"], **facts)


def test_the_longest_response_leaves_the_other_instances_idle():
    bound = lower_bound(groups(1, 2000), machine(instances=4))
    assert bound.shares.idle == pytest.approx(0.75, abs=0.01)


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


def test_a_row_of_drafts_counts_for_all_rows_behind_it():
    fine, poor = (0.6, 0.4), (0.1, 0.0)
    rising = Drafts(siblings=(0, 2), rates=(fine, fine))
    falling = Drafts(siblings=(0, 2), rates=(fine, poor))
    best = lower_bound(groups(20, 500, size=4), machine(), rising)
    assert lower_bound(groups(20, 500, size=4), machine(), falling) == best


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
    assert "KV in use" in shown
    assert "bound+drafts" in shown
    assert sum(verl["shares"][0].values()) == pytest.approx(1)
    assert drafting["bound_shares"][0]["drafts"] > 0
    assert len(other["kv_by_tenths"][0]) == 10


AGENTS = ("sticky", "cache-ttl", "program-pause", "migrate-in-tools", "divided", "context", "oracle")


def trajectory(*turns):
    return tuple(RecordedTurn(*turn) for turn in turns)


def agents(*trajectories):
    """Return groups of one trajectory each."""
    groups = [GroupLengths(f"g{number}", 100, (1,), 1, (each,)) for number, each in enumerate(trajectories)]
    return with_longer_turns([groups], 1.0, 1.0)[0]


def crowd(groups=6, size=4):
    """Return trajectories of one to four turns, with answers several times as long as turns."""
    found = []
    for group in range(groups):
        each = [
            trajectory(
                *[(30 + 9 * index + group, 0.1 * (group % 5), 200 + 60 * turn) for turn in range(index)],
                (25 + 40 * (group % 3), None, 0),
            )
            for index in range(size)
        ]
        found.append(GroupLengths(f"g{group}", 150, (1,) * size, 1, tuple(each)))
    return with_longer_turns([found], 1.0, 1.0)


@pytest.mark.parametrize(
    ("cluster", "pressure", "times", "longer"),
    [
        pytest.param("qwen2.5-14b", 4.0, 1.0, 1.0, marks=pytest.mark.long),
        ("qwen2.5-14b", 8.0, 5.0, 3.0),
        ("moonlight", 0.5, 50.0, 1.0),
        pytest.param("kimi-k2", 4.0, 1.0, 3.0, marks=pytest.mark.long),
    ],
)
def test_no_policy_rolls_trajectories_out_in_less_than_the_bound(cluster, pressure, times, longer):
    lengths = with_longer_turns(crowd(), longer, times)
    workload = crowded("agents", lengths, CLUSTERS[cluster], 2, pressure)
    policies = [POLICIES[name] for name in AGENTS]
    bounds = bounds_of(workload, policies, [0])
    totals = [simulate(workload, policy, 0).summary.total_time_s for policy in policies]
    [least_s] = {bound.total_time_s for bound in bounds.values()}
    assert len(bounds) == len(policies)
    assert 0.5 * min(totals) < least_s <= min(totals)
    shares = msgspec.structs.astuple(bounds["sticky", 0].shares)
    assert min(shares) >= 0
    assert sum(shares) == pytest.approx(1, abs=1e-6)


def test_drafts_of_turns_have_no_bound():
    workload = crowded("agents", crowd(), CLUSTERS["qwen2.5-14b"], 2, 4.0)
    assert bounds_of(workload, [POLICIES["seer"]], [0]) == {}


def test_a_trajectory_alone_takes_its_tools_time_and_its_tokens_behind_their_contexts():
    alone = lower_bound(agents(trajectory((40, 7.0, 500), (60, None, 0))), machine())
    cost = machine().cost
    contexts = 40 * (100 + 20) + 60 * (100 + 40 + 500 + 30)
    expected_s = 7.0 + 100 * cost.pass_s(1, 1, 1) + contexts * cost.attention_s(1)
    assert alone.longest_s == pytest.approx(expected_s)
    assert alone.total_time_s == pytest.approx(expected_s, rel=1e-3)


def test_answers_are_computed_once_and_are_context_of_what_follows():
    short, long = (
        lower_bound(agents(*[trajectory((40, 0.0, tokens), (60, None, 0))] * 300), machine())
        for tokens in (1, 801)
    )
    cost = machine().cost
    alone_s = 300 * 800 * (cost.layer_s + cost.position_s)  # some of it while weights are read
    assert 0.5 * alone_s < long.shares.prefill * long.total_time_s <= alone_s
    assert short.shares.prefill < 0.02
    more_s = 300 * 60 * 800 * cost.attention_s(1)
    read_s = [bound.shares.attention * bound.total_time_s for bound in (short, long)]
    assert read_s[1] - read_s[0] == pytest.approx(more_s, rel=1e-3)
