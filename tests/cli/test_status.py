"""``seer status``: what a run is doing, and whether it does anything at all."""

import json
import os
import signal
import time

import pytest
from seer_host.line_files import claim

from tests.support.eventually import eventually
from tests.support.processes import stopped

from .helpers import BOUND_S


@pytest.fixture
def directory(tmp_path):
    """The directory of a run that wrote its status an hour ago."""
    (tmp_path / "out").mkdir()
    status = {"pid": 7, "doing": "rolling out", "since": time.time() - 7200, "at": time.time() - 3600}
    status |= {"progress": "3 of 8 responses", "beats": True}
    (tmp_path / "out" / "status.json").write_text(json.dumps(status))
    return tmp_path / "out"


def says(process, result, words):
    """Return a command's result, if it shows these words of a run that is at work."""
    assert process.poll() is None, result.output
    return result if words in result.output else None


def test_a_run_that_is_alive_says_what_it_does(start_seer, seer, trickling, tmp_path):
    process = start_seer(*trickling())
    out = tmp_path / "out"
    result = eventually(lambda: says(process, seer("status", out), "rolling out"))
    assert result.exit_code == 0
    assert f"process {process.pid}, last sign of life " in result.output
    # Three responses end, and the other three never do.
    eventually(lambda: says(process, seer("status", out), "3 of 6 responses"))
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=BOUND_S)
    result = seer("status", out)
    assert (result.exit_code, "the last one ended in order" in result.output) == (0, True)
    assert not (out / "status.json").exists()


def test_the_status_says_how_many_requests_wait_for_what(start_seer, seer, trickle, write_prompts, tmp_path):
    prompts = write_prompts({"prompt_token_ids": [5], "n": 12})
    out = tmp_path / "out"
    process = start_seer("run", trickle(), "--prompts", prompts, "--out", out)
    # One response ends, and the eight that then run never do.
    words = "1 of 12 responses; waiting: 3 for a slot; process"
    eventually(lambda: says(process, seer("status", out), words))
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=BOUND_S)


def test_a_run_that_was_killed_is_called_dead(start_seer, seer, trickling, tmp_path):
    process = start_seer(*trickling(signal=int(signal.SIGKILL), signal_after=3))
    process.communicate(timeout=BOUND_S)
    result = seer("status", tmp_path / "out", "--json", tmp_path / "status-found.json")
    assert result.exit_code == 1
    assert f"process {process.pid} died" in result.output
    assert "while it was rolling out" in result.output
    assert "go on with the same command and --resume" in result.output
    assert json.loads((tmp_path / "status-found.json").read_bytes())["state"] == "died"


def test_a_run_that_hangs_is_not_taken_for_one_that_is_at_work(seer, directory):
    with claim(directory, "this test"):
        result = seer("status", directory)
        assert result.exit_code == 1
        assert (
            "rolling out for 2 h 0 min, 3 of 8 responses, and no sign of life for 1 h 0 min" in result.output
        )
        status = json.loads((directory / "status.json").read_bytes())
        (directory / "status.json").write_text(json.dumps(status | {"beats": False}))
        assert seer("status", directory).exit_code == 0  # training promises no sign of life within a phase


def test_a_run_that_stands_still_gives_no_sign_of_life(start_seer, seer, trickling, tmp_path):
    process = start_seer(*trickling())
    status = tmp_path / "out" / "status.json"
    eventually(lambda: status.exists() and b"rolling out" in status.read_bytes())
    process.send_signal(signal.SIGSTOP)
    eventually(lambda: stopped(process.pid))
    before = status.read_bytes()
    time.sleep(2.5)  # more than twice the time between two signs of life
    assert status.read_bytes() == before
    process.send_signal(signal.SIGCONT)
    eventually(lambda: status.read_bytes() != before)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=BOUND_S)


def ended(directory, how, responses, requested=6, error=None):
    """Write what a run leaves that has ended so."""
    directory.mkdir(exist_ok=True)
    (directory / "status.json").unlink(missing_ok=True)
    summary = {"ended": how, "error": error, "requested": requested, "requests": 999}
    (directory / "summary.json").write_text(json.dumps(summary))
    (directory / "completions.jsonl").write_text("{}\n" * responses + '{"cut')


@pytest.mark.parametrize(
    ("how", "responses", "code", "state", "words"),
    [
        ("finished", 6, 0, "ended", "ended in order, finished with 6 of 6 responses"),
        (
            "interrupted",
            3,
            0,
            "ended",
            "ended in order, interrupted with 3 of 6 responses; go on with the same",
        ),
        (
            "failed",
            2,
            1,
            "failed",
            "failed with 2 of 6 responses: all engines\\u202e are lost; go on with the",
        ),
        ("finished", 5, 1, "damaged", "completions.jsonl has 5 of 6 responses"),
    ],
)
def test_the_end_of_the_last_run_is_reported_with_the_responses_of_its_file(
    seer, directory, tmp_path, how, responses, code, state, words
):
    ended(directory, how, responses, error="all engines\u202e are lost" if how == "failed" else None)
    result = seer("status", directory, "--json", tmp_path / "found.json")
    assert (result.exit_code, words in result.output) == (code, True), result.output
    found = json.loads((tmp_path / "found.json").read_bytes())
    assert (found["state"], found["ended"], found["responses"]) == (state, how, responses)


def test_a_run_that_failed_is_not_called_ended_in_order(seer, trickle, write_prompts, tmp_path):
    prompts, out = write_prompts({"prompt_token_ids": [5], "n": 2}), tmp_path / "out"
    assert seer("run", trickle(refusal="no"), "--prompts", prompts, "--out", out).exit_code
    assert json.loads((out / "summary.json").read_bytes())["ended"] == "failed"
    result = seer("status", out)
    words = (
        "the last one failed with 2 of 2 responses: all 2 requests ended in an error, the first on instance"
    )
    assert (result.exit_code, words in result.output) == (1, True), result.output


def test_a_run_without_a_summary_has_failed(seer, directory):
    (directory / "status.json").unlink()
    (directory / "completions.jsonl").touch()
    result = seer("status", directory)
    assert (result.exit_code, "failed before it could write its summary" in result.output) == (1, True)


def test_the_responses_of_a_dead_run_are_those_of_its_file(seer, directory):
    (directory / "completions.jsonl").write_text("{}\n" * 5)
    result = seer("status", directory)
    assert (result.exit_code, "while it was rolling out, 5 of 8 responses" in result.output) == (1, True)


def test_a_run_whose_process_was_killed_after_its_summary_has_ended(seer, directory):
    status = (directory / "status.json").read_bytes()
    ended(directory, "finished", 6)
    (directory / "status.json").write_bytes(status)
    assert "finished with 6 of 6 responses" in seer("status", directory).output
    # The summary is an earlier run's if the process died while it was starting.
    (directory / "status.json").write_bytes(status.replace(b"rolling out", b"starting"))
    assert seer("status", directory).exit_code == 1


def test_what_is_no_run_is_refused(fails, seer, tmp_path, directory):
    assert "holds no run; name the --out" in fails("status", tmp_path)
    assert "No such file or directory; name the --out of a run" in fails("status", tmp_path / "absent")
    (directory / "status.json").write_text("{")
    assert "is no status of a run" in fails("status", directory)
    os.unlink(directory / "status.json")
    assert "holds no run" in fails("status", directory)
    (directory / "summary.json").write_text('{"ended": "well"}')
    assert "is no summary of a run" in fails("status", directory)
