"""The sweep of a run's cleanup: what it removes, what it leaves alone, and that nothing there stops it."""

import os
import subprocess
import sys

import pytest
from seer_mooncake import cleanup

from tests.support.eventually import eventually
from tests.support.patience import PATIENCE_S

pytestmark = pytest.mark.no_mooncake

PROCESSES = 8


def left_by_a_killed_run(root, name, files=200):
    directory = root / f"{cleanup.PREFIX}{name}"
    for instance in ("a", "b"):
        (directory / instance).mkdir(parents=True)
        for number in range(files):
            (directory / instance / f"{number}.bucket").write_bytes(b"x")
    return directory


def start_cleanup(directory):
    command = [sys.executable, "-I", cleanup.__file__, str(directory)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_several_processes_may_sweep_one_leftover_at_once(tmp_path):
    for number in range(5):
        left_by_a_killed_run(tmp_path, f"left{number}")
    processes = [start_cleanup(tmp_path / f"{cleanup.PREFIX}run{number}") for number in range(PROCESSES)]
    ended = [one.communicate(timeout=PATIENCE_S) for one in processes]
    assert [(one.returncode, errors) for one, (_, errors) in zip(processes, ended, strict=True)] == [
        (0, "")
    ] * PROCESSES
    assert list(tmp_path.iterdir()) == []


def test_what_has_such_a_name_and_is_no_directory_of_a_run_of_ours_is_left_alone(tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "precious").touch()
    root = tmp_path / "root"
    root.mkdir()
    os.mkfifo(root / f"{cleanup.PREFIX}fifo")
    (root / f"{cleanup.PREFIX}file").touch()
    (root / f"{cleanup.PREFIX}link").symlink_to(elsewhere)
    before = sorted(root.iterdir())
    left_by_a_killed_run(root, "left")
    _, errors = start_cleanup(root / f"{cleanup.PREFIX}run").communicate(timeout=PATIENCE_S)
    assert errors == ""
    assert sorted(root.iterdir()) == before
    assert (elsewhere / "precious").exists()


def test_another_user_s_directory_is_left_alone(tmp_path, monkeypatch):
    directory = left_by_a_killed_run(tmp_path, "left")
    monkeypatch.setattr(cleanup.os, "geteuid", lambda: os.getuid() + 1)
    cleanup.sweep(tmp_path)
    assert directory.is_dir()
    monkeypatch.undo()
    cleanup.sweep(tmp_path)
    assert not directory.exists()


def test_the_directory_of_a_run_that_lives_is_left_alone_and_no_other_user_may_read_it(tmp_path):
    mine = tmp_path / f"{cleanup.PREFIX}mine"
    one = start_cleanup(mine)
    try:
        eventually(lambda: mine.is_dir() or one.poll() is not None)
        assert one.poll() is None
        for _ in range(3):
            start_cleanup(tmp_path / f"{cleanup.PREFIX}other").communicate(timeout=PATIENCE_S)
        assert mine.stat().st_mode & 0o077 == 0
    finally:
        one.communicate(timeout=PATIENCE_S)
    assert not mine.exists()
