"""Tests that a script starts in the background."""

import subprocess
import sys
from pathlib import Path

SCRIPT = """import signal, subprocess, sys
signal.signal(signal.SIGINT, signal.SIG_IGN)
import conftest
interrupted = subprocess.run([sys.executable, "-c", "import signal; signal.raise_signal(signal.SIGINT)"])
assert interrupted.returncode == -signal.SIGINT, interrupted.returncode
"""


def test_ctrl_c_ends_what_a_test_starts_also_where_the_tests_began_with_it_ignored():
    command = [sys.executable, "-c", SCRIPT]
    done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
