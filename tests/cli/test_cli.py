"""The command line: what it writes and prints, one clear error for each mistake, and its exit status."""

import contextlib
import fcntl
import io
import json
import os
import pty
import select
import signal
import subprocess
import sys
import termios
from types import SimpleNamespace

import pytest
import structlog
from seer_cli import display
from seer_cli.common import _configure_logs
from seer_cli.display import Display
from seer_cli.progress import RunProgress
from seer_cli.verl_environment import examine_verl

from seer_core.errors import OutputError
from seer_core.model import InstanceInfo
from seer_core.model.events import (
    ChunkFinished,
    Complete,
    Dispatch,
    GroupSpec,
    GroupsSubmitted,
    InstanceLost,
    InstanceStarted,
)
from seer_core.scheduling.scheduler import Policies, Scheduler, Slot
from seer_core.scheduling.trace import TraceWriter, replay

SMALL = "[rollout]\nn = 2\nmax_tokens = 8\n"
TECHNIQUES = ["divided_rollout", "context_sched"]
BOUND_S = 60
"""How long to wait for a process before calling it stuck; never reached when all is well."""


@pytest.fixture
def prompts(write_prompts):
    return write_prompts(
        {"prompt": "a", "group_id": "1", "metadata": {"answer": 1}}, {"prompt": "b", "group_id": "mine"}
    )


@pytest.fixture
def fails(seer):
    """Return a function that runs the command line, expects exit status 2, and returns the one error."""

    def run(*arguments, code=2):
        result = seer(*arguments)
        assert result.exit_code == code, result.output
        assert "Traceback" not in result.output
        errors = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
        assert len(errors) == 1, result.stderr
        return result.stderr[result.stderr.index("error: ") :]

    return run


def lines_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


# run


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


# Output that cannot be written.


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


# What a user can get wrong in the config.


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


@pytest.fixture
def trickle(local_plugin, write_config, write_prompts):
    """Return a function that configures an engine of which responses are one token long, by its settings."""
    local_plugin("trickle")

    def configure(plugins=(), **settings):
        more = "".join(f"{key} = {json.dumps(value)}\n" for key, value in settings.items())
        return write_config(plugins, f"[rollout]\nmax_tokens = 8\n[engine.trickle]\n{more}", engine="trickle")

    return configure


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


# Interruption, in processes of their own.


@pytest.fixture
def trickling(local_plugin, write_config, write_prompts, tmp_path):
    """Return a function that gives the arguments of a run whose first responses finish, and others never."""
    local_plugin("trickle")
    prompts = write_prompts(*({"prompt_token_ids": [5], "n": 2, "group_id": str(each)} for each in (1, 2, 3)))

    def arguments(**settings):
        more = "[engine.trickle]\n" + "".join(f"{key} = {value}\n" for key, value in settings.items())
        config = write_config((), f"[rollout]\nmax_tokens = 8\n{more}", engine="trickle")
        return ("run", config, "--prompts", prompts, "--out", tmp_path / "out")

    return arguments


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_run_keeps_what_has_finished_and_stops_its_engines(
    start_seer, trickling, tmp_path, number, status
):
    # The signal comes in the very moment in which the third response finishes.
    process = start_seer(*trickling(signal=int(number), signal_after=3))
    output, errors = process.communicate(timeout=BOUND_S)
    assert process.returncode == status, errors
    assert output == ""
    assert errors.splitlines()[-1] == "interrupted; what had finished is kept"
    assert "Traceback" not in errors
    finished = [each["request_id"] for each in lines_of(tmp_path / "out" / "completions.jsonl")]
    assert finished == ["1/0", "2/0", "3/0"]
    assert (tmp_path / "trickle-0.stopped").exists()
    summary = json.loads((tmp_path / "out" / "summary.json").read_bytes())
    assert (summary["ended"], summary["requests"], summary["requested"]) == ("interrupted", 3, 6)


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_while_engines_start_stops_those_that_are_up(
    start_seer, trickling, tmp_path, number, status
):
    process = start_seer(*trickling(instances=2, stuck=1))
    while "trickle-1 is coming up" not in process.stderr.readline():
        assert process.poll() is None
    process.send_signal(number)
    process.communicate(timeout=BOUND_S)
    assert process.returncode == status
    assert all((tmp_path / f"trickle-{engine}.stopped").exists() for engine in range(2))
    assert not (tmp_path / "out").exists()


def test_a_killed_run_s_trace_holds_all_that_happened_in_whole_lines(start_seer, trickling, tmp_path):
    process = start_seer(*trickling(signal=int(signal.SIGKILL), signal_after=3))
    process.communicate(timeout=BOUND_S)
    assert process.returncode == -signal.SIGKILL
    trace = tmp_path / "out" / "trace.jsonl"
    finished = [line for line in lines_of(trace) if line["event"]["type"] == "ChunkFinished"]
    assert [line["event"]["request_id"] for line in finished] == ["1/0", "2/0", "3/0"]
    assert replay(trace, Scheduler(Policies())) == len(lines_of(trace))


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.parametrize("module", ["seer_core", "rich.console", "seer_cli.run", "seer_lab.cli"])
def test_a_signal_while_the_command_is_still_being_imported_is_one_line(module, number, status):
    program = (
        "import os, sys\n"
        "class Signals:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name == {module!r}:\n"
        f"            os.kill(os.getpid(), {int(number)})\n"
        "sys.meta_path.insert(0, Signals())\n"
        "from seer_main import main\n"
        "main()\n"
    )
    command = [sys.executable, "-W", "error", "-c", program, "sim", "--help"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=BOUND_S)
    assert result.returncode == status, result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert result.stderr.startswith("interrupted")
    assert result.stdout == ""


def test_a_terminal_shows_a_live_display_and_gets_its_cursor_back(start_seer, trickling, tmp_path):
    master, slave = pty.openpty()
    process = start_seer(
        *trickling(),
        stdin=slave,
        stdout=slave,
        stderr=slave,
        text=False,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "100", "LINES": "30"},
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )
    os.close(slave)
    with os.fdopen(master, "r+b", buffering=0) as terminal:
        text = read_terminal(terminal, until="requests 0/6")
        terminal.write(b"\x03")
        text += read_terminal(terminal)
    assert process.wait(BOUND_S) == 130
    assert "rollout: groups 0/3" in text
    assert "trickle-0" in text
    assert "running 0" in text
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")
    assert text.endswith("interrupted; what had finished is kept\r\n")
    assert len(lines_of(tmp_path / "out" / "completions.jsonl")) <= 3


def read_terminal(terminal, until=None):
    """Read what is shown, until some text of it or the end."""
    shown = ""
    while until is None or until not in shown:
        assert select.select([terminal], [], [], BOUND_S)[0], f"shown so far: {shown!r}"
        try:
            shown += terminal.read(4096).decode()
        except OSError:  # EIO: no process holds the terminal any more
            break
    return shown


def test_without_a_terminal_a_line_appears_now_and_then(monkeypatch):
    monkeypatch.setattr(display, "LINE_EVERY_S", 0.0)
    stream = io.StringIO()
    with Display("run", stream) as view:
        view.observe(0.0, InstanceStarted(InstanceInfo("x", 64, 16, 4, 64)), [])
        view.observe(0.0, GroupsSubmitted((GroupSpec("a", 4, 2, 64),)), [])
        view.observe(2.0, ChunkFinished("a/0", "x", 50, True), [Complete("a/0", "stop")])
        view.observe(3.0, InstanceLost("x", "gone"), [])
    lines = stream.getvalue().splitlines()
    assert lines[0] == "run: groups 0/0  requests 0/0  tokens 0  0 tok/s  left ?  x kv 0% run 0 queue 0"
    assert lines[2].startswith("run: groups 0/1  requests 1/2  tokens 50  25 tok/s  left 0:02")
    assert lines[3].endswith("x lost")
    assert len(lines) == 4


def test_no_escape_of_a_file_reaches_the_screen_and_no_message_is_endless(
    seer, fails, write_config, write_prompts, tmp_path
):
    escape = "\x1b]0;owned\x07\x9b31m"
    config = write_config((), SMALL)
    bad = write_prompts(
        {"prompt": "a", "group_id": escape}, {"prompt": "a", escape: 1}, name=f"{escape}.jsonl"
    )
    message = fails("run", config, "--prompts", bad, "--out", tmp_path / "out")
    assert message.count(r"\x1b]0;owned\x07\x9b31m") == 4
    good = write_prompts({"prompt": "a"}, {"prompt": "a", "group_id": escape}, name=f"{escape}.jsonl")
    run = seer("run", config, "--prompts", good, "--out", tmp_path / escape, "--skip-bad")
    assert run.exit_code == 0, run.output
    listed = seer("config", config, "--set", f"compare.prompts={escape}")
    assert listed.exit_code == 0, listed.output
    huge = write_prompts({"prompt": "a", "k" * 20_000_000: 1}, name="huge.jsonl")
    endless = fails("run", config, "--prompts", huge, "--out", tmp_path / "out")
    assert len(endless) < 1000
    for shown in (message, run.output, listed.output, endless):
        assert shown.replace("\n", "").isprintable()


def test_logs_and_display_show_ids_without_their_escapes(capsys, monkeypatch):
    _configure_logs("info")
    structlog.get_logger("seer").warning("chunk_failed", instance="\x1b[2J", reason="gone\x9b1m")
    monkeypatch.setattr(display, "LINE_EVERY_S", 0.0)
    with Display("\x1b[2Jrun") as view:
        view.observe(0.0, InstanceStarted(InstanceInfo("\x1b[31m", 64, 16, 4, 64)), [])
        view.observe(1.0, InstanceLost("\x1b[31m", "gone"), [])
    errors = capsys.readouterr().err
    assert errors.replace("\n", "").isprintable()
    assert r"\x1b[31m lost" in errors
    assert r"gone\x9b1m" in errors


def test_the_time_left_is_what_the_last_response_needs_at_its_own_pace():
    progress = RunProgress()
    progress.observe(0.0, InstanceStarted(InstanceInfo("x", 64, 16, 4, 64)), [])
    groups = tuple(GroupSpec(name, 4, 10, 4000) for name in "ab")
    names = [f"{group}/{index}" for group in "ab" for index in range(10)]
    sent = [Dispatch(name, "x", 100, 128, False) for name in names]
    progress.observe(0.0, GroupsSubmitted(groups), sent)
    for name in names[1:]:
        progress.observe(10.0, ChunkFinished(name, "x", 100, True), [Complete(name, "stop")])
    for round_s in range(10, 110, 10):  # the last goes on at 10 tokens per second, alone
        progress.observe(float(round_s), ChunkFinished("a/0", "x", 100, False), [sent[0]])
    # 2,900 tokens came in 100 s, but what is missing comes at 10 per second; responses have 150 tokens.
    assert progress.left_s == pytest.approx(15.3, rel=0.1)
    for round_s in range(110, 400, 10):
        progress.observe(float(round_s), ChunkFinished("a/0", "x", 100, False), [sent[0]])
    assert progress.left_s == pytest.approx(10.0, rel=0.1)  # 100 tokens more are its limit
    progress.observe(400.0, ChunkFinished("a/0", "x", 100, False), [Complete("a/0", "length")])
    assert progress.left_s == 0


# compare


@pytest.fixture
def compared(seer, write_config, prompts, tmp_path):
    """Return a function that compares and returns click's result and the JSON written."""

    def run(*options, more=""):
        config = write_config(TECHNIQUES, f"{SMALL}\n[plugin.divided_rollout]\nchunk_tokens = 4\n{more}")
        result = seer("compare", config, "--json", tmp_path / "compare.json", *options)
        document = (tmp_path / "compare.json").read_bytes()
        return result, json.loads(document) if document else None

    return run


def test_compare_prints_a_table_and_writes_one_object_per_arm(compared):
    result, arms = compared("--log-level", "error")
    assert result.exit_code == 0, result.output
    assert [arm["name"] for arm in arms] == ["baseline", "+ divided_rollout", "+ context_sched", "oracle"]
    assert all(arm["tokens_equal_to_baseline"] for arm in arms)
    assert all(arm["tokens"] == arms[0]["tokens"] for arm in arms)
    assert arms[1]["chunks"] == 2 * arms[0]["chunks"] == 8
    keys = {"throughput_tokens_per_s", "total_time_s", "tail_time_s", "preemptions", "recomputed_tokens"}
    assert all(keys | {"chunks", "migrations"} < set(arm) for arm in arms)
    for text in ("4 responses of 2 groups", "tail time, s", "same tokens", "(2.00x)", "baseline"):
        assert text in result.stdout


def test_compare_repeats_and_takes_other_prompts(compared, write_prompts):
    other = write_prompts({"prompt": "c", "n": 3}, name="other.jsonl")
    result, arms = compared("--repeat", 2, "--prompts", other, "-p", "no:context_sched")
    assert result.exit_code == 0, result.output
    assert "3 responses of 1 groups; medians of 2 runs [least, most]" in result.stdout
    assert [(arm["name"], arm["repeats"]) for arm in arms] == [
        ("baseline", 2),
        ("+ divided_rollout", 2),
        ("oracle", 2),
    ]


def test_compare_refuses_what_cannot_be_compared(fails, write_config, prompts):
    assert "no technique to compare" in fails("compare", write_config((), SMALL))
    config = write_config(TECHNIQUES, f"{SMALL}[compare]\nbaseline = ['group_round_robn']")
    assert "did you mean 'group_round_robin'?" in fails("compare", config)
    config = write_config(TECHNIQUES, f"{SMALL}[compare]\nprompts = 'none.jsonl'")
    assert "none.jsonl: No such file" in fails("compare", config)


# plugins, config, doctor


def test_plugins_lists_what_is_installed_and_what_is_enabled(seer, write_config):
    result = seer("plugins")
    assert result.exit_code == 0, result.output
    for text in ("divided_rollout", "seer-divided-rollout", "0.1.0", "sim"):
        assert text in result.stdout
    result = seer("plugins", write_config(TECHNIQUES))
    row = next(line for line in result.stdout.splitlines() if " divided_rollout " in line)
    assert "yes" in row
    assert "splitter, placer" in row


def test_config_shows_every_effective_value_and_its_origin(seer, write_config, tmp_path):
    path = write_config(["divided_rollout"], "[engine.sim.lengths]\nsigma = 0.5")
    result = seer("config", path, "--set", "rollout.n=4", "--json", tmp_path / "config.json")
    assert result.exit_code == 0, result.output
    rows = {row["key"]: row for row in json.loads((tmp_path / "config.json").read_bytes())}
    for key, value, origin in [
        ("seer.plugins", ["divided_rollout"], str(path)),
        ("rollout.n", 4, "--set rollout.n=4"),
        ("rollout.temperature", 1.0, "default"),
        ("engine.sim.instances", 2, "default"),
        ("engine.sim.lengths.sigma", 0.5, str(path)),
        ("engine.sim.lengths.cap_tokens", 4096, "default"),
        ("plugin.divided_rollout.chunk_tokens", "auto", "default"),
    ]:
        assert rows[key] == {"key": key, "value": value, "origin": origin}
    assert "engine.sim.lengths.sigma" in result.stdout


def test_doctor_looks_at_all_plug_ins_and_fails_if_one_lacks_something(seer, distribution, tmp_path):
    distribution(
        "sickly",
        "from seer_core.plugins.hookspecs import Check, hookimpl\n"
        "@hookimpl\n"
        "def seer_doctor(settings, startup):\n"
        "    assert settings is None and startup is None\n"
        "    return [Check('sickly', False, 'no thermometer', 'buy one in a [shop]')]\n",
    )
    distribution("broken", "import a_module_that_nobody_has\n")
    distribution(
        "fainting",
        "from seer_core.plugins.hookspecs import hookimpl\n"
        "@hookimpl\n"
        "def seer_doctor():\n"
        "    raise OSError('black')\n",
    )
    result = seer("doctor", "--json", tmp_path / "doctor.json")
    assert result.exit_code == 1
    assert "buy one in a [shop]" in result.stdout
    checks = {check["part"]: check for check in json.loads((tmp_path / "doctor.json").read_bytes())}
    assert checks["core"]["ok"]
    assert checks["sickly"] == {
        "part": "sickly",
        "ok": False,
        "finding": "no thermometer",
        "remedy": "buy one in a [shop]",
    }
    assert "a_module_that_nobody_has" in checks["broken"]["finding"]
    finding = checks["fainting"]["finding"]
    assert finding.startswith("hook 'seer_doctor' raised OSError: black at ")
    assert finding.endswith("fainting_module.py:4")


def test_doctor_names_the_remedy_where_there_is_no_environment_of_verl(tmp_path):
    check = examine_verl(tmp_path / ".venv-verl" / "bin" / "python")
    assert check.ok
    assert str(tmp_path / ".venv-verl") in check.finding
    assert check.remedy.startswith("make setup-verl")


@pytest.mark.parametrize(
    ("answer", "ok", "finding"),
    [
        ("verl 0.9.1\nseer-verl 0.1.0\nseer-client 0.1.0\ntorch 2.13.0", True, "verl 0.9.1, seer-verl 0.1.0"),
        ("verl 0.9.1\nseer-verl -\nseer-client 0.1.0\ntorch -", False, "seer-verl, torch not in"),
        ("nonsense", False, "does not answer"),
    ],
)
def test_doctor_looks_into_the_environment_of_verl(tmp_path, answer, ok, finding):
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\necho '{answer}'\n")
    python.chmod(0o755)
    check = examine_verl(python)
    assert (check.ok, finding in check.finding) == (ok, True)
    assert ("make setup-verl" in check.remedy) == (not ok)


def test_doctor_with_a_config_looks_at_what_it_enables(seer, distribution, write_config):
    distribution("broken", "import a_module_that_nobody_has\n")
    result = seer("doctor", write_config(TECHNIQUES))
    assert result.exit_code == 0, result.output
    assert "Python" in result.stdout


def test_an_observer_slot_of_the_display_is_the_core_s():
    view = Display("run", io.StringIO())
    assert view.slot == Slot("observer", "seer-core", view)
