"""``seer sim``: policies on simulated engines, from the command line and as a function."""

import json
import sys

import msgspec
import pytest
from seer_host.config_files import load_config
from seer_lab.lengths import last_epoch
from seer_lab.order_notes import order_notes
from seer_lab.policies import POLICIES, parse_policy
from seer_lab.simulate import simulate
from seer_lab.table import TableRow, rows_of, to_json
from seer_lab.workload_choice import choose_workload
from seer_session.assembly import fill_slots

from seer_core.errors import ConfigError, PluginError, PromptError, StalledError

SMALL = ("groups=12", "group_size=4", "mean_tokens=300", "cap_tokens=1200", "prompt_tokens=20")

QUEUE = """
from seer_core.plugins.hookspecs import hookimpl

class Queue:
    def __init__(self):
        self.waiting, self.gone = [], []
    def push(self, request):
        self.waiting.append(request)
    def peek(self):
        {peek}
    def take(self, request):
        self.waiting.remove(request)
        self.gone.append(request)
    def group_changed(self, group, request):
        pass
    def __len__(self):
        return len(self.waiting)

@hookimpl
def seer_make_prioritizer():
    return Queue()
"""

PLACER = """
from seer_core.plugins.hookspecs import hookimpl

class Nowhere:
    def instance_changed(self, instance):
        pass
    def instance_lost(self, instance):
        pass
    def place(self, request, chunk_tokens, instances):
        return {answer}

@hookimpl
def seer_make_placer():
    return Nowhere()
"""


@pytest.fixture(scope="module")
def small():
    """A workload of 48 short responses on two crowded instances."""
    return choose_workload("synthetic", lengths=SMALL, instances=2, pressure=3.0)


@pytest.fixture
def sim(seer):
    """Return a function that runs ``seer sim`` on the small workload, or on another."""

    def run(*arguments, workload="synthetic", lengths=SMALL, instances=2):
        shape = [part for change in lengths for part in ("--lengths", change)]
        return seer("sim", workload, *shape, "--instances", instances, *arguments)

    return run


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_gives_every_response_its_length(small, name):
    run = simulate(small, POLICIES[name], seed=1)
    groups = small.groups(1)
    assert run.summary.groups == len(groups)
    assert run.summary.requests == 48
    if not POLICIES[name].over_issue > 1:
        assert run.summary.tokens == sum(sum(group.output_tokens) for group in groups)
        assert run.deferred_requests == run.deferred_tokens == 0
    assert 0 <= run.idle_share < 1
    assert 0 < run.kv_usage <= 1
    assert len(run.finish_times_s) == 48
    assert run.finish_times_s[-1] == pytest.approx(run.summary.total_time_s)


def test_the_last_epoch_has_lengths_of_the_same_group_and_others_than_this_one(small):
    groups = small.groups(0)
    earlier = [last_epoch(group, 0) for group in groups]
    assert earlier == [last_epoch(group, 0) for group in groups]
    assert all(set(found) <= set(group.output_tokens) for found, group in zip(earlier, groups, strict=True))
    assert any(found != group.output_tokens for found, group in zip(earlier, groups, strict=True))


def test_equal_arguments_give_equal_results(small):
    first, second = (simulate(small, POLICIES["context"], seed=3) for _ in range(2))
    assert msgspec.structs.replace(first, wall_s=0.0) == msgspec.structs.replace(second, wall_s=0.0)


def test_seeds_and_overrides_change_the_result(small):
    total = simulate(small, POLICIES["verl"], 0).summary.total_time_s
    assert simulate(small, POLICIES["verl"], 1).summary.total_time_s != total
    slow = simulate(small, POLICIES["verl"], 0, ["engine.sim.cost.overhead_s=1.0"])
    assert slow.summary.total_time_s > 2 * total


def test_divided_rollout_never_preempts_where_the_baseline_does(small):
    assert simulate(small, POLICIES["verl"]).summary.preemptions > 0
    assert simulate(small, POLICIES["divided"]).summary.preemptions == 0


def test_an_instance_that_always_has_work_is_not_idle():
    workload = choose_workload("synthetic", lengths=["sigma=0", "mean_tokens=100"], instances=1)
    assert simulate(workload, POLICIES["verl"]).idle_share == pytest.approx(0, abs=1e-9)


def test_an_instance_without_work_is_idle():
    lengths = ["groups=1", "sigma=0", "mean_tokens=100"]
    workload = choose_workload("synthetic", lengths=lengths, instances=4)
    run = simulate(workload, POLICIES["verl"])
    assert run.idle_share == pytest.approx(0.75)
    assert [each.busy_s > 0 for each in run.instances] == [True, False, False, False]


def test_a_lost_instance_counts_as_idle_while_it_is_down(small):
    kill = 'engine.sim.kill_at_s=[{instance="sim-0",at_s=5.0,restart_after_s=1e4}]'
    run = simulate(small, POLICIES["verl"], 0, [kill])
    assert run.instances[0].busy_s == pytest.approx(5.0)
    assert run.summary.requests == 48


def test_partial_rollout_keeps_whole_groups_and_skews_them_short(small):
    whole, partial = (simulate(small, POLICIES[name]) for name in ("verl", "partial"))
    assert (partial.summary.groups, partial.summary.requests, partial.deferred_requests) == (12, 48, 48)
    assert partial.deferred_tokens > 0
    assert partial.summary.mean_tokens < whole.summary.mean_tokens
    assert partial.summary.finish_reasons == {"stop": 48}


def test_true_lengths_are_hidden_from_policies_and_shown_to_oracles(small, distribution):
    longest = "return max(self.waiting, key=lambda each: each.group.known_lengths[each.index], default=None)"
    distribution("spy", QUEUE.format(peek=longest))
    with pytest.raises(PluginError, match=r"plug-in 'spy', slot 'prioritizer'.*'NoneType' object"):
        simulate(small, parse_policy("mine=spy"))
    assert simulate(small, parse_policy("mine=spy", has_lengths=True)).summary.requests == 48


@pytest.mark.parametrize(
    ("peek", "words"),
    [
        ("return next(iter(self.gone + self.waiting), None)", "offered a request that does not wait"),
        ("return 'g0/0'", "offered 'g0/0', which is no request"),
        ("return None", "offers none of 48 waiting requests"),
    ],
    ids=["twice", "unknown", "none"],
)
def test_a_prioritizer_that_breaks_its_contract_is_named(small, distribution, peek, words):
    distribution("bad", QUEUE.format(peek=peek))
    with pytest.raises(PluginError, match=f"plug-in 'bad', slot 'prioritizer'.*{words}"):
        simulate(small, parse_policy("mine=bad"))


@pytest.mark.parametrize(
    ("answer", "error", "words"),
    [
        ("None", StalledError, "48 requests wait and nothing runs: plug-in 'nowhere' places no chunk"),
        ("'sim-0'", PluginError, "plug-in 'nowhere', slot 'placer'.*'sim-0', an id; return one of"),
    ],
)
def test_a_placer_that_places_nowhere_is_named(small, distribution, answer, error, words):
    distribution("nowhere", PLACER.format(answer=answer))
    with pytest.raises(error, match=words):
        simulate(small, parse_policy("mine=nowhere"))


def test_a_workload_that_cannot_fit_is_refused(small):
    with pytest.raises(ConfigError, match=r"cannot hold one response of max_model_tokens = 1220"):
        simulate(small, POLICIES["verl"], 0, ["engine.sim.kv_capacity_tokens=640"])
    with pytest.raises(PromptError, match=r"group 'g0': prompt \(20\) and max_tokens \(1200\) exceed"):
        simulate(small, POLICIES["verl"], 0, ["engine.sim.max_model_tokens=640"])


# The command.


def test_policies_stand_side_by_side(sim):
    result = sim("--policy", "verl", "--policy", "context", "--policy", "own=divided_rollout")
    assert result.exit_code == 0, result.output
    assert "synthetic: 48 responses of 12 groups" in result.stdout
    assert "which they fill 3.0 times" in result.stdout
    lines = result.stdout.splitlines()
    assert [line.split("│")[1].strip() for line in lines if line.startswith("│")] == [
        "verl",
        "context",
        "own",
    ]
    assert "1.00x" in result.stdout


def test_the_first_table_has_the_recommended_order_and_says_what_each_row_adds(sim):
    result = sim()
    assert result.exit_code == 0, result.output
    rows = [line.split("│")[1].strip() for line in result.stdout.splitlines() if line.startswith("│")]
    assert rows == ["verl", "divided", "context", "posterior"]
    for line in (
        "verl: whole groups in turn, as veRL",
        "divided: adds chunks, each on the instance that has room; first come, first served",
        "posterior (recommended): adds another order to divided: ",
    ):
        assert line in result.stdout


def test_a_policy_of_one_s_own_is_not_described(sim):
    lines = sim("--policy", "verl", "--policy", "divided=divided_rollout").stdout.splitlines()
    assert "verl: whole groups in turn, as veRL" in lines
    assert not [line for line in lines if line.startswith("divided:")]


def summaries(small, times):
    """Return rows of policies that took so many seconds with each seed."""
    return [
        TableRow(
            [
                msgspec.structs.replace(run, summary=msgspec.structs.replace(run.summary, total_time_s=each))
                for each in seconds
            ]
        )
        for name, seconds in times.items()
        for run in [simulate(small, POLICIES[name])]
    ]


@pytest.mark.parametrize(
    ("times", "expected"),
    [
        ({"verl": [10], "divided": [8], "context": [7], "posterior": [6]}, []),
        (
            {"verl": [10], "divided": [8], "context": [9], "posterior": [7]},
            ["context is below divided: lengths", "One seed may be luck"],
        ),
        ({"verl": [10, 10], "divided": [8, 8], "posterior": [9, 9]}, ["posterior is below divided: lengths"]),
        ({"verl": [10], "divided": [11]}, ["divided is below verl: what chunks", "One seed may be luck"]),
        ({"context": [10], "divided": [8]}, ["context is below divided: lengths", "One seed may be luck"]),
        ({"verl": [10], "context": [11]}, []),
        ({"verl": [10], "divided": [10.02]}, []),  # the table shows 1.00x
    ],
    ids=str,
)
def test_a_row_below_one_that_it_builds_upon_has_a_reason(small, times, expected):
    notes = list(order_notes(summaries(small, times), drawn=True))
    assert len(notes) == len(expected)
    for note, begin in zip(notes, expected, strict=True):
        assert note.startswith(begin)


def test_a_recording_is_not_rolled_out_with_other_seeds(small):
    notes = list(order_notes(summaries(small, {"verl": [10], "divided": [11]}), drawn=False))
    assert [note.split(":")[0] for note in notes] == ["divided is below verl"]


def test_figures_are_written_as_json(sim, tmp_path):
    path = tmp_path / "deep" / "sim.json"
    result = sim("--policy", "verl", "--policy", "seer", "--repeat", "2", "--json", path)
    assert result.exit_code == 0, result.output
    assert "medians of 2 runs" in result.stdout
    verl, ours = json.loads(path.read_text())
    assert (verl["name"], ours["plugins"]) == ("verl", list(POLICIES["seer"].plugins))
    assert verl["seeds"] == [0, 1]
    assert verl["ratio_to_first"]["total_time_s"] == 1.0
    least, most = verl["spread"]["total_time_s"]
    assert least <= verl["total_time_s"] <= most
    assert ours["acceptance_length"] > 1
    assert len(ours["summaries"]) == 2


def test_ratios_are_medians_of_those_of_each_seed(small):
    runs = [simulate(small, POLICIES[name], seed) for seed in range(3) for name in ("verl", "context")]
    first, second = rows_of(runs)
    ratios = sorted(
        theirs.summary.total_time_s / ours.summary.total_time_s
        for ours, theirs in zip(first.runs, second.runs, strict=True)
    )
    assert to_json([first, second])[1]["ratio_to_first"]["total_time_s"] == pytest.approx(ratios[1])


@pytest.mark.parametrize("suffix", [".svg", ".png"])
def test_a_plot_is_drawn(sim, tmp_path, suffix):
    pytest.importorskip("matplotlib", reason="the extra 'plot' of seer-sim is not installed")
    path = tmp_path / f"sim{suffix}"
    result = sim("--policy", "verl", "--policy", "context", "--plot", path)
    assert result.exit_code == 0, result.output
    assert path.read_bytes().startswith({".svg": b"<?xml", ".png": b"\x89PNG"}[suffix])


def test_a_plot_without_matplotlib_says_how_to_get_it(sim, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "seer_lab.plots", None)
    result = sim("--plot", tmp_path / "sim.svg")
    assert result.exit_code == 2
    assert "pip install matplotlib" in result.stderr
    assert not (tmp_path / "sim.svg").exists()


def test_a_finished_run_can_be_simulated_again(seer, write_config, write_prompts, tmp_path):
    config = write_config(["divided_rollout"], "[engine.sim.lengths]\nmean_tokens = 100\ncap_tokens = 300")
    prompts = write_prompts(*({"prompt": f"count to {n}", "n": 3, "max_tokens": 200} for n in range(5)))
    assert seer("run", config, "--prompts", prompts, "--out", tmp_path / "out").exit_code == 0
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    path = tmp_path / "sim.json"
    result = seer("sim", tmp_path / "out", "--policy", "verl", "--policy", "oracle", "--json", path)
    assert result.exit_code == 0, result.output
    for row in json.loads(path.read_text()):
        assert row["summaries"][0]["tokens"] == summary["tokens"]
        assert row["summaries"][0]["requests"] == 15


def test_a_run_that_did_not_finish_cannot_be_simulated(seer, write_config, write_prompts, tmp_path):
    config = write_config(["divided_rollout"])
    prompts = write_prompts({"prompt": "hi", "n": 2, "max_tokens": 200})
    assert seer("run", config, "--prompts", prompts, "--out", tmp_path / "out").exit_code == 0
    trace = tmp_path / "out" / "trace.jsonl"
    lines = trace.read_text().splitlines(keepends=True)
    last = max(number for number, line in enumerate(lines) if '"Complete"' in line)
    trace.write_text("".join(lines[:last]))
    result = seer("sim", tmp_path / "out")
    assert result.exit_code == 2
    assert "is unfinished, so its length is unknown" in result.stderr


def test_a_reader_is_reminded_of_what_was_assumed(sim, seer, tmp_path):
    assert "pressure 3 is assumed" in sim().stdout
    assert "is assumed" not in sim("--pressure", "2").stdout
    alone = sim(
        "--pressure", "20", lengths=("groups=1", "group_size=2", "mean_tokens=300", "cap_tokens=1200")
    )
    assert "pressure 20 was asked for, and is " in alone.stdout
    path = tmp_path / "lengths.jsonl"
    line = '{"group": 1, "prompt_tokens": 3, "output_tokens": [5, 9], "iteration": %d}\n'
    path.write_text(line % 0 + line % 1 + line % 2)
    assert "iteration 2 of 3; --repeat 3 takes all" in seer("sim", path, "--seed", "1").stdout
    assert "of 3; --repeat" not in seer("sim", path, "--repeat", "3").stdout


def test_a_trace_has_so_many_iterations_and_no_more(seer, tmp_path):
    path = tmp_path / "lengths.jsonl"
    path.write_text('{"group": 1, "prompt_tokens": 3, "output_tokens": [5]}\n')
    result = seer("sim", path, "--repeat", "2")
    assert result.exit_code == 2
    assert "holds 1 iteration; leave --repeat out" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--policy", "velr"], "no policy is called 'velr'; did you mean 'verl'?"),
        (["--policy", "mine=velr"], "no installed plug-in is called 'velr'"),
        (["--policy", "=verl"], "give a name and plug-ins"),
        (["--policy", "a=divided_rollout,divided_rollout"], "name 'divided_rollout' once"),
        (
            ["--policy", "a=divided_rollout,mine,placer:mine"],
            "name plug-ins each once; 'placer:mine' already names 'mine', so leave the other out",
        ),
        (["--policy", "a=divided_rollout,placer:mine,placer:seer-core"], "name 'placer' once"),
        (["--policy", "a=:mine"], "give a name and plug-ins"),
        (["--policy", "a=divided_rollout,group_round_robin"], "slot 'placer' is claimed by"),
        (["--policy", "verl", "--policy", "verl"], "two policies are called 'verl'"),
        (["--policy", "a=oracle_longest_first"], "--oracle in `seer sim`"),
        (["--set", "engine.sim.max_running=0"], "[engine.sim].max_running: expected `int` >= 1"),
        (["--set", "engine.sim.instances=3"], "--instances and --set engine.sim.instances give the same"),
        (["--set", "engine.sim.presett=x"], "unknown key 'presett' in [engine.sim]"),
        (["--plot", "sim.pdf"], "name a .svg or a .png file"),
    ],
    ids=str,
)
def test_mistakes_are_named_before_any_work(sim, arguments, words):
    result = sim(*arguments)
    assert result.exit_code == 2
    assert words in result.stderr
    assert result.stdout == ""


def test_the_help_shows_an_example_and_every_policy(seer):
    result = seer("sim", "--help")
    assert "seer sim qwen2-vl-72b --scale 0.25" in result.stdout
    for policy in POLICIES.values():
        assert policy.name in result.stdout


def test_a_policy_without_plug_ins_is_the_core_alone():
    assert parse_policy("core=").plugins == ()


@pytest.mark.parametrize(
    "arguments",
    [
        ("moonlight", "--scale", "nan"),
        ("moonlight", "--scale", "inf"),
        ("synthetic", "--pressure", "inf"),
        ("synthetic", "--pressure", "nan"),
        ("synthetic", "--pressure", "1e-300"),
        ("synthetic", "--lengths", "sigma=40"),
        ("synthetic", "--lengths", "sigma=\udcff"),
        ("synthetic", "--instances", "1000000000000"),
    ],
    ids=ascii,
)
def test_numbers_that_cannot_be_meant_are_refused_before_any_work(seer, arguments):
    result = seer("sim", *arguments)
    assert result.exit_code == 2, result.output
    assert result.stderr.lower().count("error: ") == 1


@pytest.mark.parametrize("option", ["--lengths cap_tokens=", "--lengths prompt_tokens=", "--instances "])
def test_a_number_of_hundreds_of_digits_is_one_error(seer, option):
    result = seer("sim", "synthetic", *f"{option}{'9' * 400}".split())
    assert result.exit_code == 2
    assert "Traceback" not in result.output
    assert "99999" in result.output


def test_a_policy_may_choose_the_plug_in_of_a_slot(sim):
    policies = (
        "divided",
        "core=divided_rollout,placer:seer-core",
        "rr=divided_rollout,placer:group_round_robin",
    )
    result = sim(*[word for policy in policies for word in ("--policy", policy)])
    assert result.exit_code == 0, result.output
    figures = {
        line.split("│")[1].strip(): line.split("│")[2:] for line in result.stdout.splitlines() if "│" in line
    }
    rows = [figures[name] for name in ("divided", "core", "rr")]
    assert len({tuple(row) for row in rows}) == 3


@pytest.mark.parametrize(
    ("policy", "words"),
    [
        (
            "mine=divided_rollout,plaser:seer-core",
            "unknown key 'plaser' in [seer.slots]; did you mean 'placer'?",
        ),
        ("mine=divided_rollout,placer:", "give a name and plug-ins, each once"),
        ("mine=divided_rollout,placer:context_sched", "context_sched"),
    ],
)
def test_a_policy_that_chooses_wrongly_is_a_sentence(sim, policy, words):
    result = sim("--policy", policy)
    assert result.exit_code == 2
    assert words in result.stderr


TWO = """
from seer_core.plugins.hookspecs import hookimpl
from seer_core.scheduling.scheduler import Policies

class Halves:
    def split(self, request):
        return min(64, request.remaining_tokens)

@hookimpl
def seer_make_splitter():
    return Halves()

@hookimpl
def seer_make_placer():
    return type(Policies().placer.strategy)()
"""


def test_a_plug_in_fills_two_slots_beside_another_in_a_simulation_and_in_a_run(
    sim, distribution, write_config
):
    distribution("two", TWO)
    result = sim("--policy", "mine=divided_rollout,splitter:two,placer:two")
    assert result.exit_code == 0, result.output
    config = write_config(["divided_rollout", "two"], '[seer.slots]\nsplitter = "two"\nplacer = "two"')
    strategies = fill_slots(load_config(config))
    assert {slot.name: slot.owner for slot in strategies.slots if slot.owner != "seer-core"} == {
        "splitter": "two",
        "placer": "two",
    }
    assert strategies.passed_over["splitter"] == ("divided_rollout",)


def test_a_user_s_policy_may_not_change_what_it_is_given(sim, distribution):
    distribution("greedy", PLACER.replace("return {answer}", "instances[0].running += 1"))
    result = sim("--policy", "mine=divided_rollout,placer:greedy")
    assert result.exit_code == 2
    assert "place() changed what it was given: running of instance 'sim-0'" in result.stderr
