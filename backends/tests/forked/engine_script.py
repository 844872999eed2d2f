"""A script in the place of an engine, for the fixture ``run_in_fork``."""

import contextlib
import os
import sys
import traceback
from pathlib import Path


class Script:
    """Runs a script with arguments, writes what it prints into a file, and ends the process."""

    def __init__(self, start):
        given = start.settings
        sys.argv = ["-c", *given["arguments"]]
        status = 0
        with Path(given["output"]).open("w", encoding="utf-8") as output, contextlib.redirect_stdout(output):
            try:
                exec(compile(given["script"], "<script>", "exec"), {"__name__": "__main__"})
            except BaseException:
                traceback.print_exc(file=output)
                status = 1
        os._exit(status)

    def _never(self, *arguments):
        raise NotImplementedError

    abort = close = reset_cache = step = submit = telemetry = update_weights = watch = _never
