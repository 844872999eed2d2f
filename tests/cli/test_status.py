"""``seer status``: what a run is doing, and whether it does anything at all."""

import json
import os
import signal
import time

import pytest

from seer_core.line_files import claim
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


def test_what_is_no_run_is_refused(fails, seer, tmp_path, directory):
    assert "holds no run; name the --out" in fails("status", tmp_path)
    assert "No such file or directory; name the --out of a run" in fails("status", tmp_path / "absent")
    (directory / "status.json").write_text("{")
    assert "is no status of a run" in fails("status", directory)
    os.unlink(directory / "status.json")
    assert "holds no run" in fails("status", directory)
