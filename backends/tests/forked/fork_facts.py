"""Facts about a fork server, for scripts in its forks; it imports nothing that the server has not."""

import contextlib
import json
import os
import sys


def cmdline(pid):
    """Return the title or the command of a process; empty once it has ended."""
    with open(f"/proc/{pid}/cmdline") as file:
        return file.read().rstrip("\0")


def children(pid):
    """Return the processes that a process has started."""
    with open(f"/proc/{pid}/task/{pid}/children") as file:
        return file.read().split()


def server_facts():
    """Return what a process that is to be forked must not have, of the one that has forked this one."""
    import torch

    server, paths = os.getppid(), []
    for name in os.listdir(f"/proc/{server}/fd"):
        with contextlib.suppress(OSError):
            paths.append(os.readlink(f"/proc/{server}/fd/{name}"))
    return {
        "title": cmdline(server),
        "threads": len(os.listdir(f"/proc/{server}/task")),
        "children": [title for pid in children(server) if (title := cmdline(pid))],
        "cuda": torch.cuda.is_initialized(),
        "devices": [path for path in paths if path.startswith(("/dev/nvidia", "/dev/kfd", "/dev/dri"))],
    }


def started():
    """Return a worker with the instance that the first argument describes, which samples by key."""
    from seer_worker.process.adapter import ADAPTER
    from seer_worker.process.selftest import check_keyed
    from seer_worker.process.worker import Worker
    from seer_worker.wire import Start

    instance, settings, scratch = json.loads(sys.argv[1])
    asked = Start(instance, "forked-0", settings, scratch)
    worker = Worker(print, ADAPTER.load(instance)(asked), asked)
    check_keyed(worker)
    return worker
