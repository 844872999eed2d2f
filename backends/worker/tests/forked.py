"""Imports for fork servers of tests, and toys that report what they have from where they run."""

import json
import os
import random
import resource
import signal
import socket
import sys
import tempfile
import threading

import numpy as np
from seer_worker.wire import Degraded
from toys import Toy

from seer_core.errors import EngineError

__all__ = ["Facts", "preload", "preload_and_fail", "preload_torch", "preload_with_a_thread"]

HELD = [socket.socket()]
os.environ["SET_BY_AN_IMPORT"] = "1"


def preload():
    """Import nothing more: this module is imported already."""


def preload_torch():
    """Have torch decide where it keeps what it compiles, as engines' imports do."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    cache_dir()


def preload_and_fail():
    """Fail as an engine does that lacks a library."""
    raise ImportError("libtoy.so: cannot open shared object file")


def preload_with_a_thread():
    """Leave a thread behind."""
    threading.Thread(target=threading.Event().wait, daemon=True).start()


class Facts(Toy):
    """Reports what it has; with ``import`` among its settings, where that module comes from, too.

    It chooses no tokens, so that its servers need no PyTorch.
    """

    emulated = True

    def __init__(self, start):
        super().__init__(start)
        status = open("/proc/self/status").read()  # noqa: SIM115
        facts = {
            "pid": os.getpid(),
            "parent": os.getppid(),
            "session": os.getsid(0),
            "group": os.getpgid(0),
            "fds": {int(fd): _target(fd) for fd in os.listdir("/proc/self/fd")},
            "environment": dict(os.environ),
            "directory": os.getcwd(),
            "umask": next(line.split()[1] for line in status.splitlines() if line.startswith("Umask")),
            "files": resource.getrlimit(resource.RLIMIT_NOFILE),
            "core": resource.getrlimit(resource.RLIMIT_CORE),
            "cpus": sorted(os.sched_getaffinity(0)),
            "random": [random.random(), float(np.random.random())],
            "temporary": tempfile.gettempdir(),
            "interrupt": signal.getsignal(signal.SIGINT) is signal.SIG_IGN,
            "terminate": signal.getsignal(signal.SIGTERM) is signal.SIG_DFL,
            "path": sys.path,
        }
        if name := start.settings.get("import"):
            try:
                facts["imported"] = __import__(name).__file__
            except ImportError as error:
                raise EngineError(f"no {name}") from error
        self.reports.append(Degraded("drafting", json.dumps(facts)))


def _target(fd):
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except OSError:
        return "gone"
