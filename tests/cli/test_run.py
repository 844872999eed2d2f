"""``seer run``: what it writes and prints, one clear error for each mistake, and its exit status."""

import contextlib
import json
from types import SimpleNamespace

import pytest
from seer_trace.records import TraceWriter, replay

from seer_core.errors import OutputError
from seer_core.model.events import (
    GroupSpec,
    GroupsSubmitted,
)
from seer_core.scheduling.scheduler import Policies, Scheduler

from .helpers import SMALL, TECHNIQUES, lines_of


def test_run_writes_completions_trace_and_summary(seer, write_config, prompts, tmp_path):
    config = write_config(TECHNIQUES, SMALL)
    out = tmp_path / "deep" / "out"
    result = seer("run", config, "--prompts", prompts, "--out", out, "--json", tmp_path / "summary.json")
    assert result.exit_code == 0, result.output
    assert "4 responses of 2 groups" in result.stdout
    assert f"results in {out}" in result.stdout

    completions = lines_of(out / "completions.jsonl")
    assert {each["request_id"] for each in completions} == {"1/0", "1/1", "mine/0", "mine/1"}
    for each in completions:
        assert len(each["token_ids"]) == len(each["logprobs"]) > 0
        assert each["finish_reason"] in ("stop", "length")
        assert each["chunks"][0]["instance"] in each["instances"]
        assert each["metadata"] == ({"answer": 1} if each["group_id"] == "1" else {})

    summary = json.loads((out / "summary.json").read_bytes())
    assert summary == json.loads((tmp_path / "summary.json").read_bytes())
    assert summary["requests"] == 4
    assert summary["tokens"] == sum(len(each["token_ids"]) for each in completions)
    assert [plugin["name"] for plugin in summary["plugins"]] == TECHNIQUES
    assert summary["skipped_prompts"] == []


def test_a_run_s_trace_replays(seer, write_config, prompts, tmp_path):
    config = write_config((), SMALL)
    assert seer("run", config, "--prompts", prompts, "--out", tmp_path / "out").exit_code == 0
    trace = tmp_path / "out" / "trace.jsonl"
    assert replay(trace, Scheduler(Policies())) == len(lines_of(trace))


def test_one_run_can_be_changed_from_the_command_line(seer, write_config, prompts, tmp_path):
    config = write_config(TECHNIQUES, SMALL)
    out = tmp_path / "out"
    run = ("run", config, "--prompts", prompts, "--out", out)
    result = seer(*run, "--set", "rollout.n=3", "-p", "no:context_sched", "--set", "rollout.max_tokens=5")
    assert result.exit_code == 0, result.output
    summary = json.loads((out / "summary.json").read_bytes())
    assert (summary["requests"], summary["max_tokens"]) == (6, 5)
    assert [plugin["name"] for plugin in summary["plugins"]] == ["divided_rollout"]


def test_plain_log_lines_and_no_control_codes_where_there_is_no_terminal(
    seer, write_config, prompts, tmp_path
):
    result = seer("run", write_config((), SMALL), "--prompts", prompts, "--out", tmp_path / "out")
    assert "\x1b" not in result.output
    assert "instance_started instance=sim-0" in result.stderr
    assert "rollout_finished requests=4" in result.stderr
    quiet = ("--overwrite", "--log-level", "error")
    result = seer("run", write_config((), SMALL), "--prompts", prompts, "--out", tmp_path / "out", *quiet)
    assert "instance_started" not in result.stderr


def test_bad_prompts_stop_a_run_before_anything_starts(fails, write_config, write_prompts, tmp_path):
    path = write_prompts({"prompt": "a"}, {"prompt": "b", "n": 0}, "{")
    message = fails("run", write_config((), SMALL), "--prompts", path, "--out", tmp_path / "out")
    assert f"{path}:2: n: expected `int` >= 1" in message
    assert f"{path}:3: not valid JSON" in message
    assert "--skip-bad" in message
    assert not (tmp_path / "out").exists()


def test_skip_bad_runs_the_rest_and_lists_the_skipped(seer, write_config, write_prompts, tmp_path):
    path = write_prompts({"prompt": "a"}, {"prompt": "b", "n": 0}, "{")
    run = ("run", write_config((), SMALL), "--prompts", path, "--out", tmp_path / "out", "--skip-bad")
    result = seer(*run)
    assert result.exit_code == 0, result.output
    assert f"skipped {path}:2: n: expected `int` >= 1" in result.stderr
    summary = json.loads((tmp_path / "out" / "summary.json").read_bytes())
    assert summary["requests"] == 2
    assert [skipped["line"] for skipped in summary["skipped_prompts"]] == [2, 3]


def test_an_earlier_run_s_results_are_kept_without_overwrite(fails, seer, write_config, prompts, tmp_path):
    run = ("run", write_config((), SMALL), "--prompts", prompts, "--out", tmp_path / "out")
    assert seer(*run).exit_code == 0
    before = (tmp_path / "out" / "completions.jsonl").read_bytes()
    message = fails(*run, "--set", "rollout.max_tokens=3")
    assert "already holds completions.jsonl, trace.jsonl, summary.json" in message
    assert "--overwrite" in message
    assert (tmp_path / "out" / "completions.jsonl").read_bytes() == before
    assert seer(*run, "--set", "rollout.max_tokens=3", "--overwrite").exit_code == 0
    assert all(len(each["token_ids"]) <= 3 for each in lines_of(tmp_path / "out" / "completions.jsonl"))


def test_an_unwritable_output_is_reported_before_anything_starts(fails, write_config, prompts, tmp_path):
    config = write_config((), SMALL)
    (tmp_path / "file").touch()
    run = ("run", config, "--prompts", prompts, "--out")
    for out in (tmp_path / "file", tmp_path / "file" / "out"):
        message = fails(*run, out)
        assert f"cannot write {out}" in message
        assert "name another place" in message
    message = fails(*run, tmp_path / "out", "--json", tmp_path / "file" / "x.json")
    assert f"cannot write {tmp_path / 'file' / 'x.json'}" in message
    assert not (tmp_path / "out").exists()
    message = fails("compare", config, "--prompts", prompts, "--json", tmp_path / "file" / "x.json")
    assert "starting" not in message


def test_too_little_space_is_an_error_before_any_start(fails, write_config, prompts, tmp_path, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=9))
    message = fails("run", write_config((), SMALL), "--prompts", prompts, "--out", tmp_path / "out")
    assert "has 9 bytes free; 4 requests need at least 16,384" in message


@pytest.mark.parametrize("full", ["completions.jsonl", "trace.jsonl"])
def test_a_disk_that_fills_up_ends_the_run_with_a_clear_error(fails, write_config, prompts, tmp_path, full):
    out = tmp_path / "out"
    out.mkdir()
    (out / full).symlink_to("/dev/full")
    run = ("run", write_config((), SMALL), "--prompts", prompts, "--out", out, "--overwrite")
    message = fails(*run)
    assert "cannot write" in message
    assert "No space left on device" in message
    assert str(out) in message


def test_a_long_trace_on_a_full_disk_names_the_trace(tmp_path):
    (tmp_path / "trace.jsonl").symlink_to("/dev/full")
    trace = TraceWriter(tmp_path / "trace.jsonl")
    event = GroupsSubmitted((GroupSpec("x" * 100_000, 1, 1, 1),))
    with pytest.raises(OutputError, match=r"cannot write the trace .*trace.jsonl: No space left on device"):
        trace.observe(0.0, event, [])
    with contextlib.suppress(OSError):
        trace.close()


def test_each_mistake_in_the_config_is_one_clear_error(fails, write_config, prompts, tmp_path):
    run = ("--prompts", prompts, "--out", tmp_path / "out")
    for config, options, fact in [
        (write_config(), ("--set", "rollout.m=1"), "unknown key 'm' in [rollout]"),
        (write_config(), ("-p", "context_sched"), "only no:NAME is understood"),
        (write_config(), ("--set", "seer.engine=simm"), "did you mean 'sim'?"),
        (write_config(), ("--set", "rollout.max_tokens=9000"), "[rollout].max_tokens is 9000"),
        (
            write_config(["divided_rollout"], SMALL),
            ("--set", "plugin.divided_rollout.chunk_tokens=20000"),
            "[plugin.divided_rollout].chunk_tokens is 20000, but the KV cache of instance 'sim-0' holds",
        ),
    ]:
        assert fact in fails("run", config, *run, *options)


def test_a_plug_in_that_raises_in_a_decision_is_one_clear_error(
    fails, seer, distribution, write_config, prompts, tmp_path
):
    distribution(
        "grumpy",
        "from seer_core.plugins.hookspecs import hookimpl\n"
        "class Grumpy:\n"
        "    def split(self, request):\n"
        "        raise LookupError('no idea')\n"
        "@hookimpl\n"
        "def seer_make_splitter():\n"
        "    return Grumpy()\n",
    )
    run = ("run", write_config(["grumpy"], SMALL), "--prompts", prompts, "--out", tmp_path / "out")
    message = fails(*run)
    for fact in ("'grumpy'", "'splitter'", "'1/0'", "LookupError: no idea", "-p no:grumpy"):
        assert fact in message
    result = seer(*run, "--overwrite", "--debug")
    assert "LookupError" in str(result.exception.__cause__.__class__)
    assert seer(*run, "--overwrite", "-p", "no:grumpy").exit_code == 0


WRITING = """
from seer_core.scheduling.defaults import FirstComeFirstServed
from seer_core.plugins.hookspecs import hookimpl

class Writing(FirstComeFirstServed):
    def peek(self):
        request = super().peek()
        if request is not None and request.remaining_tokens > 1:
            request.generated_tokens += 1
        return request

@hookimpl
def seer_make_prioritizer():
    return Writing()
"""


def test_with_debug_a_plug_in_that_changes_what_it_was_given_is_named_by_every_command_that_rolls_out(
    fails, seer, distribution, write_config, prompts, tmp_path
):
    distribution("writing", WRITING)
    config = write_config(["writing"], f'{SMALL}\n[compare]\ntechniques = ["writing"]\noracle = []')
    run = ("run", config, "--prompts", prompts, "--out", tmp_path / "out")
    assert "run with --debug" in fails(*run)
    for command in (
        (*run, "--overwrite"),
        ("compare", config, "--prompts", prompts),
        ("sim", "qwen2-vl-72b", "--scale", "0.02", "--policy", "mine=writing"),
    ):
        result = seer(*command, "--debug")
        told = f"{result.exception} {result.output}"
        assert "'writing', slot 'prioritizer': peek() changed what it was given: generated_tokens of" in told


def test_all_engines_dead_is_exit_status_1_with_what_finished_saved(fails, write_config, prompts, tmp_path):
    kills = "".join(f"[[engine.sim.kill_at_s]]\ninstance = 'sim-{n}'\nat_s = 0.4\n" for n in (0, 1))
    config = write_config((), f"[rollout]\nn = 40\nmax_tokens = 600\n{kills}", seer="restarts.attempts = 0")
    message = fails("run", config, "--prompts", prompts, "--out", tmp_path / "out", code=1)
    assert "no instance is left" in message
    assert 0 < len(lines_of(tmp_path / "out" / "completions.jsonl")) < 80


def test_a_run_of_which_nothing_came_but_errors_is_a_failure_in_the_engine_s_words(
    fails, trickle, write_prompts, tmp_path
):
    config = trickle(["context_sched"], refusal="the sampler is out of order")
    prompts = write_prompts({"prompt_token_ids": [5], "n": 2})
    out = tmp_path / "out"
    words = "all 2 requests ended in an error, the first on instance 'trickle-0': the sampler is out of order"
    assert words in fails("run", config, "--prompts", prompts, "--out", out, code=1)
    assert [each["finish_reason"] for each in lines_of(out / "completions.jsonl")] == ["error"] * 2
    assert words in json.loads((out / "summary.json").read_bytes())["error"]
    assert words in fails("compare", config, "--prompts", prompts, code=1)


def test_how_far_steps_overran_their_pace_is_printed_and_written_down(seer, trickle, write_prompts, tmp_path):
    prompts = write_prompts({"prompt_token_ids": [5], "n": 1})
    config = trickle(["divided_rollout"], overrun_s=0.125)
    out, table = tmp_path / "out", tmp_path / "table.json"
    run = seer("run", config, "--prompts", prompts, "--out", out)
    assert "steps overran the pace that they emulate by 12.5%" in run.stdout
    assert json.loads((out / "summary.json").read_bytes())["overrun_share"] == 0.125
    compared = seer("compare", config, "--prompts", prompts, "--json", table)
    assert "steps overran their pace by" in compared.stdout
    assert "12.5%" in compared.stdout
    assert json.loads(table.read_bytes())[0]["overrun_share"] == 0.125


def test_a_trouble_is_in_the_log_the_summary_the_trace_and_the_last_lines(
    seer, trickle, write_prompts, tmp_path
):
    prompts = write_prompts({"prompt_token_ids": [5], "n": 1})
    result = seer("run", trickle(degradation="no server"), "--prompts", prompts, "--out", tmp_path / "out")
    assert result.exit_code == 0, result.output
    for text in ("instance_degraded", "instance=trickle-0", "what=drafting", "no server", "log=trickle.log"):
        assert text in result.stderr
    assert "TROUBLE with drafting (1)" in result.stdout
    assert json.loads((tmp_path / "out" / "summary.json").read_bytes())["degradations"] == {"drafting": 1}
    assert any(
        each["event"]["type"] == "InstanceDegraded" for each in lines_of(tmp_path / "out" / "trace.jsonl")
    )


ENVIRONMENT = """
from seer_core.plugins.hookspecs import hookimpl
from seer_session.environment import EnvironmentAnswer

class Twice:
    async def step(self, trajectory, turn):
        if turn.number == 2:
            return EnvironmentAnswer(done=True, reward=1.0)
        return EnvironmentAnswer(text="ab", delay_s=3.0, reward=0.25)

@hookimpl
def seer_make_environment():
    return Twice()
"""


def test_a_run_with_an_environment_writes_its_turns_and_explains_them(
    seer, write_config, write_prompts, tmp_path, distribution
):
    distribution("twice", ENVIRONMENT)
    config = write_config([*TECHNIQUES, "twice"], f"{SMALL}[engine.sim.lengths]\ncap_tokens = 40\n")
    prompts = write_prompts({"prompt": "abc", "group_id": "mine", "n": 4, "max_tokens": 400})
    result = seer("run", config, "--prompts", prompts, "--out", tmp_path / "out")
    assert result.exit_code == 0, result.output
    completions = lines_of(tmp_path / "out/completions.jsonl")
    for each in completions:
        assert [turn["answer_tokens"] for turn in each["turns"]] == [2, 2, 0]
        assert (each["reward"], each["error"]) == (1.5, None)
        mask = [bit for turn in each["turns"] for bit in [1] * turn["tokens"] + [0] * turn["answer_tokens"]]
        assert len(mask) == len(each["token_ids"])
        assert [each["logprobs"][at] for at, bit in enumerate(mask) if not bit] == [0.0] * 4
    assert "12 turns answered by the environment, with 16 tokens; 2.00 s for each" in result.stdout
    shown = seer("explain", tmp_path / "out", "mine/0").output
    assert "waits 3.00 s for its environment" in shown
    assert "4 from its environment" in shown
    result = seer("run", config, "-p", "no:twice", "--prompts", prompts, "--out", tmp_path / "plain")
    assert result.exit_code == 0, result.output
    assert not any(each["turns"] for each in lines_of(tmp_path / "plain/completions.jsonl"))


HALF_BROKEN = """
from seer_core.plugins.hookspecs import hookimpl
from seer_session.environment import EnvironmentAnswer

class HalfBroken:
    async def step(self, trajectory, turn):
        if trajectory.index == 1:
            raise OSError("the sandbox is gone")
        return EnvironmentAnswer(done=True)

@hookimpl
def seer_make_environment():
    return HalfBroken()
"""


def test_a_run_says_how_many_responses_failed_and_how_many_were_given_up(
    seer, write_config, write_prompts, tmp_path, distribution
):
    distribution("halfbroken", HALF_BROKEN)
    config = write_config([*TECHNIQUES, "halfbroken"], f"{SMALL}[engine.sim.lengths]\ncap_tokens = 40\n")
    late = {"prompt": "abc", "n": 1, "max_tokens": 400, "timeout_s": 0.001}
    prompts = write_prompts({"prompt": "abc", "n": 3, "max_tokens": 400}, late)
    result = seer("run", config, "--prompts", prompts, "--out", tmp_path / "out")
    assert result.exit_code == 0, result.output
    assert "1 response FAILED: `error` in completions.jsonl has the reasons" in result.stdout
    assert "1 response given up before the end" in result.stdout
    arms = seer("compare", config, "--prompts", prompts, "--set", "compare.oracle=[]")
    assert "1 response FAILED in baseline" in arms.stdout
    assert "1 response FAILED in + divided_rollout" in arms.stdout


def test_an_environment_is_in_every_arm_of_a_comparison(
    seer, write_config, write_prompts, tmp_path, distribution
):
    distribution("twice", ENVIRONMENT)
    config = write_config(["divided_rollout", "twice"], f"{SMALL}\n[compare]\noracle = []\n")
    path = write_prompts({"prompt": "abc", "n": 3, "max_tokens": 400})
    out = tmp_path / "arms.json"
    result = seer("compare", config, "--prompts", path, "--json", out)
    assert result.exit_code == 0, result.output
    assert "not compared" not in result.output
    arms = json.loads(out.read_bytes())
    assert [arm["plugins"] for arm in arms] == [["group_round_robin", "twice"], ["divided_rollout", "twice"]]
    assert all(arm["tokens_equal_to_baseline"] for arm in arms)
