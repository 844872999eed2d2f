"""Run contracts again and again, each time with fresh randomness, until one fails or the time is up.

    python -m seer_testing --seconds 3600 tests/test_mine.py -k Contract

What is no option of ours goes to pytest.  The seed of a failure is printed with the command that repeats it.
"""

from __future__ import annotations

import argparse
import os
import secrets
import shlex
import subprocess
import sys
from time import monotonic

from seer_testing.support import VARIABLE

__all__ = ["main"]

SEEDS = 1 << 32


def main(arguments: list[str]) -> int:
    """Explore as the command line says; return the exit status, which is pytest's if a round failed."""
    parser = argparse.ArgumentParser(
        prog="python -m seer_testing",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--seconds", type=float, default=600.0, help="begin no round after (default 600)")
    parser.add_argument("--seed", type=int, help="of the first round; each next one's is higher by one")
    options, chosen = parser.parse_known_args(arguments)
    first = secrets.randbelow(SEEDS) if options.seed is None else options.seed
    end_s, rounds = monotonic() + options.seconds, 0
    while rounds == 0 or monotonic() < end_s:
        seed = str(first + rounds)
        command = ["-m", "pytest", "-x", "-q", f"--hypothesis-seed={seed}", *chosen]
        done = subprocess.run(
            [sys.executable, *command],
            env={**os.environ, VARIABLE: seed},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        if done.returncode != 0:
            print(done.stdout, f"again: {VARIABLE}={seed} python {shlex.join(command)}", sep="\n", flush=True)
            return done.returncode
        rounds += 1
        print(f"seed {seed}: {done.stdout.rstrip().rpartition(chr(10))[2]}", flush=True)
    print(f"{rounds} rounds, seeds {first} to {first + rounds - 1}: every contract was kept")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
