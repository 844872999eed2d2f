"""The entry point of ``seer``: it handles signals while the rest is still being imported.

A module of its own, because to import anything of ``seer_core`` takes a good part of a second.
"""

import os
import signal

__all__ = ["main"]


def main() -> None:
    """Run the command line."""
    handled = [number for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if _is_handled(number)]
    for number in handled:
        signal.signal(number, _leave)
    from seer_cli import main as command
    from seer_cli.standard_error import outlive_reader

    for number in handled:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    outlive_reader()
    try:
        command()
    finally:
        for number in handled:  # everything is written: what comes now may end the process as it is
            signal.signal(number, signal.SIG_DFL)


def _is_handled(number: int) -> bool:
    """Return whether the parent has left a signal to this process; ``nohup`` has it ignored."""
    return signal.getsignal(number) is not signal.SIG_IGN


def _leave(number: int, frame: object) -> None:
    os.write(2, b"interrupted before anything began\n")
    os._exit(128 + number)
