"""Signals to the command line: one line, an exit status, and what had finished is kept."""

import json
import signal
import subprocess
import sys

import pytest
from seer_trace.records import replay

from seer_core.scheduling.scheduler import Policies, Scheduler
from tests.support.eventually import eventually

from .helpers import BOUND_S, lines_of

ENDS = ((signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129))
"""Signals that end a command in order, and its exit status then."""


@pytest.mark.parametrize(("number", "status"), ENDS)
def test_an_interrupted_run_keeps_what_has_finished_and_stops_its_engines(
    start_seer, trickling, tmp_path, number, status
):
    # The signal comes in the very moment in which the third response finishes.
    copy = tmp_path / "summary.json"
    process = start_seer(*trickling(signal=int(number), signal_after=3), "--json", copy)
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
    assert json.loads(copy.read_bytes()) == summary


@pytest.mark.parametrize(("number", "status"), ENDS)
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


@pytest.mark.parametrize(("number", "status"), ENDS)
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


def test_a_run_under_nohup_outlives_its_terminal(start_seer, trickling, tmp_path):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        process = start_seer(*trickling(signal=int(signal.SIGHUP), signal_after=1))
    finally:
        signal.signal(signal.SIGHUP, before)
    completions = tmp_path / "out" / "completions.jsonl"
    eventually(
        lambda: process.poll() is not None or (completions.exists() and len(lines_of(completions)) == 3)
    )
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=BOUND_S)
    assert process.returncode == 143, errors


@pytest.mark.parametrize("lines", [0, 1])
def test_a_run_outlives_the_pipe_that_its_standard_error_goes_to(
    start_seer, no_model, write_config, write_prompts, tmp_path, lines
):
    tables = "[rollout]\nn = 2\nmax_tokens = 50\n[engine.no_model]\ntoken_s = 0.02\n"
    config = write_config(["divided_rollout"], tables, engine="no_model")
    prompts = write_prompts({"prompt_token_ids": [5]}, {"prompt_token_ids": [6]})
    process = start_seer("run", config, "--prompts", prompts, "--out", tmp_path / "out")
    for _ in range(lines):
        process.stderr.readline()
    process.stderr.close()
    assert process.wait(BOUND_S) == 0
    assert len(lines_of(tmp_path / "out" / "completions.jsonl")) == 4
    assert json.loads((tmp_path / "out" / "summary.json").read_bytes())["ended"] == "finished"
