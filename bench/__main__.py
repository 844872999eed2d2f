"""``python -m bench``: run a part of a case, list the cases, render stored results, list the stale ones."""

from __future__ import annotations

import signal
import sys

from bench import render
from bench.cases import CASES
from bench.harness import measure

USAGE = """\
usage: python -m bench CASE [PART] [--json FILE] [options]
                                 run a case, by default its first part; CASE [PART] --help: its options
       python -m bench --list    what each case asks, and its parts
       python -m bench render    write docs/results and the README's number
       python -m bench stale     list the results whose code has changed since"""


def main(arguments: list[str]) -> int:
    """Do what the command line asks for; return the exit status."""
    match arguments:
        case ["--list"]:
            for name, case in CASES.items():
                parts = f" ({', '.join(case.parts)})" if len(case.parts) > 1 else ""
                print(f"{name:11} {case.question}{parts}")
        case ["render"]:
            render.write()
        case ["stale"]:
            return render.stale()
        case [name, *_] if name in CASES:
            signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # servers end with it
            measure(arguments)
        case _:
            print(USAGE, file=sys.stderr)
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
