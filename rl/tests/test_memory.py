"""Memory that is freed, and can be used by other processes."""

import platform
import subprocess
import sys

import pytest

PROGRAM = """
import os
from seer_rl.memory import give_back

def held():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

blocks = [bytes([1]) * 100_000 for _ in range(1000)]
del blocks[:-1]  # the last one keeps glibc from giving back what lies below
before = held()
give_back()
print(before - held())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries than glibc keep less")
def test_what_has_been_freed_is_given_back_to_the_system():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120)
    assert int(done.stdout) > 50_000_000, done.stderr
