"""Groups of one process have one thread together, and what they compute is theirs alone."""

import subprocess
import sys

GROUPS = """
import sys
from pathlib import Path

import torch
from torch import distributed

from seer_worker.process.lone_groups import share_thread

share_thread()
distributed.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=0, world_size=1)
first, second = (distributed.new_group([0], backend="gloo") for _ in range(2))
names = [each.read_text().strip() for each in Path("/proc/self/task").glob("*/comm")]
print(names.count("gloo_tcp_loop"))
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


def test_groups_of_one_process_share_a_thread(tmp_path):
    output, _ = start(GROUPS, tmp_path / "meeting").communicate()
    assert output.splitlines() == ["1", "[0.0, 1.0, 2.0] [0.0, 1.0, 2.0] ['one']"]


def test_groups_of_more_processes_are_made_as_before(tmp_path):
    pair = [start(PAIR, tmp_path / "meeting", rank) for rank in range(2)]
    assert [each.communicate()[0] for each in pair] == ["1\n", "1\n"]
