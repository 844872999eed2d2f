"""Scratch directories of living processes stay, those of killed ones go."""

import os
import subprocess
import sys

from seer_host.scratch import SHARED_MEMORY, Scratch


def test_a_directory_goes_with_its_process_or_with_the_next(tmp_path):
    script = f"""
import os, signal
from seer_host.scratch import Scratch
print(Scratch("mine-", {str(tmp_path)!r}).path, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    left = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    ).stdout.strip()
    assert os.path.isdir(left)
    one = Scratch("mine-", tmp_path)
    assert os.path.isdir(left)  # it may just be in the making
    for path in (left, one.path):
        os.utime(path, (0, 0))
    two = Scratch("mine-", tmp_path)
    assert not os.path.exists(left)
    assert one.path.is_dir()
    for each in (one, two):
        each.close()
        each.close()
    assert list(tmp_path.iterdir()) == []


def test_directories_of_other_names_and_links_are_left_alone(tmp_path):
    for name in ("other-1", "elsewhere"):
        (tmp_path / name).mkdir()
    (tmp_path / "mine-link").symlink_to(tmp_path / "elsewhere")
    os.utime(tmp_path / "mine-link", (0, 0), follow_symlinks=False)
    Scratch("mine-", tmp_path).close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["elsewhere", "mine-link", "other-1"]


def test_shared_memory_that_is_named_after_a_directory_goes_with_it(tmp_path, monkeypatch):
    memory = tmp_path / "shm"
    memory.mkdir()
    monkeypatch.setattr("seer_host.scratch.SHARED_MEMORY", memory)
    place = tmp_path / "scratch"
    closed, killed = Scratch("mine-", place), place / "mine-killed"
    killed.mkdir()
    os.utime(killed, (0, 0))
    for name in (
        f"{closed.path.name}-tp:0-[0-1]-cpushm_0",
        "mine-killed-tp:0-[0-1]-cpushm_1",
        f"sem.{closed.path.name}-x1",
        "sem.mine-killed-x2",
        "mine-other-1",
    ):
        (memory / name).touch()
    Scratch("mine-", place).close()
    closed.close()
    assert [path.name for path in memory.iterdir()] == ["mine-other-1"]


def test_what_a_killed_process_shared_by_multiprocessing_goes_with_its_directory(tmp_path):
    script = f"""
import os, signal
from multiprocessing import get_context
from multiprocessing.resource_tracker import _resource_tracker
from multiprocessing.shared_memory import SharedMemory
from seer_host.scratch import Scratch, name_shared_memory

scratch = Scratch("seer-test-", {str(tmp_path)!r})
name_shared_memory(scratch.path)
shared, lock = SharedMemory(create=True, size=4096), get_context("spawn").Lock()
if os.fork() == 0:
    SharedMemory(create=True, size=4096)
    os.kill(_resource_tracker._pid, signal.SIGKILL)
    os._exit(0)
os.wait()
print(scratch.path.name, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    name = ran.stdout.strip()
    shared = SHARED_MEMORY.glob
    assert len([*shared(f"{name}-*")]) == 2
    assert len([*shared(f"sem.{name}-*")]) == 1
    os.utime(tmp_path / name, (0, 0))
    Scratch("seer-test-", tmp_path).close()
    assert [*shared(f"*{name}*")] == []
