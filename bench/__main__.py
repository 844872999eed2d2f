"""``python -m bench``: run a case, list the cases, render stored results, list the stale ones."""

from __future__ import annotations

import sys

from bench import render
from bench.harness import CASES, case_of, measure

USAGE = """\
usage: python -m bench CASE [--json FILE] [options]   run a case; CASE --help: its options
       python -m bench --list                         what each case asks
       python -m bench render                         write docs/results and the README's tables
       python -m bench stale                          list the results whose code has changed since"""


def main(arguments: list[str]) -> int:
    """Do what the command line asks for; return the exit status."""
    match arguments:
        case ["--list"]:
            for name in CASES:
                print(f"{name:17} {case_of(name).__doc__.splitlines()[0]}")
        case ["render"]:
            render.write()
        case ["stale"]:
            return render.stale()
        case [name, *options] if name in CASES:
            measure(name, options)
        case _:
            print(USAGE, file=sys.stderr)
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
