"""Groups of one process have one thread together, and what they compute is theirs alone."""

import subprocess
import sys

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


def start(script, *arguments):
    command = [sys.executable, "-c", script, *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def test_further_groups_of_one_process_start_no_thread_that_looks_for_messages(tmp_path):
    # Torch gives each group two threads that wait for work, and gloo one that looks for messages.
    for kind, started in (("shared", 2), ("each", 6)):
        output, _ = start(GROUPS, tmp_path / kind, kind).communicate()
        assert output.splitlines() == [str(started), "[0.0, 1.0, 2.0] [0.0, 1.0, 2.0] ['one']"]


def test_groups_of_more_processes_are_made_as_before(tmp_path):
    pair = [start(PAIR, tmp_path / "meeting", rank) for rank in range(2)]
    assert [each.communicate()[0] for each in pair] == ["1\n", "1\n"]
