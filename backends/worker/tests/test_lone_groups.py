"""Groups of one process have one thread together, and what they compute is theirs alone."""

import socket
import subprocess
import sys

import pytest

GROUPS = """
import os
import sys

import torch
from torch import distributed

from seer_worker.process.lone_groups import share_thread

if sys.argv[2] == "shared":
    share_thread()
distributed.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=0, world_size=1)
before = os.listdir("/proc/self/task")
first, second = (distributed.new_group([0], backend="gloo") for _ in range(2))
print(len(os.listdir("/proc/self/task")) - len(before))
total, gathered, said = torch.arange(3.0), [torch.zeros(3)], [None]
distributed.all_reduce(total, group=first)
distributed.all_gather(gathered, total, group=second)
distributed.all_gather_object(said, "one", group=first)
distributed.destroy_process_group(first)
distributed.barrier(group=second)
print(total.tolist(), gathered[0].tolist(), said)
"""
PAIR = """
import sys

import torch
from torch import distributed

from seer_worker.process.lone_groups import share_thread

share_thread()
rank = int(sys.argv[2])
distributed.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=rank, world_size=2)
alone = [distributed.new_group([each], backend="gloo") for each in range(2)]
ranks = torch.tensor([rank])
distributed.all_reduce(ranks, group=alone[rank])
distributed.all_reduce(ranks)
print(ranks.item())
"""
LISTENERS = """
import sys

import psutil
from torch import distributed

from seer_worker.process.lone_groups import share_thread

share_thread()
rank, size = map(int, sys.argv[2:])
distributed.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=rank, world_size=size)
distributed.new_group([*range(size)], backend="gloo")
listening = [each for each in psutil.Process().net_connections() if each.status == psutil.CONN_LISTEN]
print(*(f"{each.laddr.ip} {each.laddr.port}" for each in listening), sep=",", flush=True)
sys.stdin.readline()
distributed.barrier()
"""


def start(script, *arguments):
    command = [sys.executable, "-c", script, *map(str, arguments)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def test_further_groups_of_one_process_start_no_thread_that_looks_for_messages(tmp_path):
    # Torch gives each group two threads that wait for work, and gloo one that looks for messages.
    for kind, started in (("shared", 2), ("each", 6)):
        output, _ = start(GROUPS, tmp_path / kind, kind).communicate()
        assert output.splitlines() == [str(started), "[0.0, 1.0, 2.0] [0.0, 1.0, 2.0] ['one']"]


def test_groups_of_more_processes_are_made_as_before(tmp_path):
    pair = [start(PAIR, tmp_path / "meeting", rank) for rank in range(2)]
    assert [each.communicate()[0] for each in pair] == ["1\n", "1\n"]


@pytest.mark.parametrize("size", [1, 2])
def test_groups_that_are_made_take_no_connection_of_another_program(tmp_path, size):
    ranks = [start(LISTENERS, tmp_path / "meeting", rank, size) for rank in range(size)]
    for rank in ranks:
        listeners = rank.stdout.readline().strip().split(",")
        assert all(listeners)
        for host, port in map(str.split, listeners):
            with pytest.raises(TimeoutError):
                socket.create_connection((host, int(port)), 0.2)
    for rank in ranks:
        rank.stdin.write("\n")
        rank.stdin.flush()
    assert [rank.communicate()[0] for rank in ranks] == [""] * size
    assert all(rank.returncode == 0 for rank in ranks)
