"""Memory that is freed, and can be used by other processes."""

import platform
import subprocess
import sys

import pytest

PROGRAM = """
import os
from seer_rl.memory import return_freed_memory

def held():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

blocks = [bytes([1]) * 100_000 for _ in range(1000)]
del blocks[:-1]  # the last one keeps glibc from giving back what lies below
before = held()
return_freed_memory()
print(before - held())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries than glibc keep less")
def test_what_has_been_freed_is_given_back_to_the_system():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120)
    assert int(done.stdout) > 50_000_000, done.stderr


RANK = """
import os, socket, sys
from seer_host.frames import encode
from seer_rl import megatron_rank
from seer_rl.config import TrainTable
from seer_rl.rank_messages import CallLearner, StartRank

class Learner:
    def __init__(self, *_):
        pass

    def load(self, directory):
        print("load")

megatron_rank.Learner = Learner
megatron_rank._meet = lambda *_: None
megatron_rank.return_freed_memory = lambda: print("give back")
for colocated in (False, True):
    ours, theirs = socket.socketpair()
    for message in (StartRank(TrainTable("", "", colocated=colocated), "", 0), CallLearner("load", "")):
        ours.sendall(encode(message))
    ours.shutdown(socket.SHUT_WR)
    sys.argv = ["", "0", str(os.dup(theirs.fileno())), "0", "-1"]
    theirs.close()
    megatron_rank.main()
"""


def test_a_rank_gives_back_what_it_has_freed_where_engines_share_its_device():
    pytest.importorskip("megatron", reason="Megatron-core is not installed: `make setup` installs it")
    command = [sys.executable, "-W", "ignore", "-c", RANK]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.stdout.splitlines() == ["load", "load", "give back"], done.stderr
