"""Each process that runs tests records what they cost, and ``scripts/test-costs`` prints a table of it.

The records lie in build/test-costs, a line for each test: its seconds, those of its fixtures included, the
processor's seconds of this process and of those that it has started and that have ended, how many engines
this process has started in that time, with their seconds, how many fork servers, each of which imports an
engine, and by how many MiB this process has grown.  What a command starts in a process of its own is not
counted as an engine.  The name of a file of a whole run of the gate ends with that run's.
"""

import functools
import importlib.util
import json
import os
import resource
import sys
import time

import pytest

from tests.harness.late_errors import resident_bytes

CLIENT = "seer_worker.client.process_client"
"""The module that starts the processes of engines."""

SERVERS = "seer_worker.client.fork_server"
"""The module that starts processes which import an engine."""


def pytest_configure(config):
    """Record in this process; the one that distributes tests to others runs none."""
    folder = config.rootpath / "build" / "test-costs"
    config.pluginmanager.register(Recorder(folder, _whole_gate(config)), "costs")


def _whole_gate(config):
    """Return the name of a run of all tests of the gate, nothing of another run."""
    if hasattr(config, "workerinput"):
        return config.workerinput.get("whole_gate", "")
    whole = config.getoption("--gate", False) and config.args_source is pytest.Config.ArgsSource.TESTPATHS
    return f"-gate-{time.time_ns()}" if whole and not config.getoption("markexpr") else ""


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node):
    """Send a worker of xdist the name of the run."""
    recorder = node.config.pluginmanager.getplugin("costs")
    node.workerinput["whole_gate"] = recorder.whole_gate


class Recorder:
    """The costs of the test that runs, and the file of those before it."""

    def __init__(self, folder, whole_gate):
        self.whole_gate = whole_gate
        self._path = folder / f"{time.time_ns()}-{os.getpid()}{whole_gate}.jsonl"
        self._file = None
        self._clear()
        on_import(CLIENT, self._watch)
        on_import(SERVERS, self._watch_servers)

    def _clear(self):
        self._seconds, self._engines, self._engine_seconds, self._imports = 0.0, 0, 0.0, 0

    def _watch(self, module):
        opens = module.ProcessClient._open

        @functools.wraps(opens)
        async def open(*arguments):
            begun_s = time.perf_counter()
            try:
                return await opens(*arguments)
            finally:
                self._engines += 1
                self._engine_seconds += time.perf_counter() - begun_s

        module.ProcessClient._open = open

    def _watch_servers(self, module):
        makes = module.ForkServer.__init__

        @functools.wraps(makes)
        def make(*arguments, **options):
            self._imports += 1
            makes(*arguments, **options)

        module.ForkServer.__init__ = make

    def pytest_runtest_logreport(self, report):
        """Add what a phase took."""
        self._seconds += report.duration

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item):
        """Write the costs of a test when it has ended."""
        self._clear()
        begun_s, resident = processor_s(), resident_bytes()
        result = yield
        if self._file is None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._path.open("a", buffering=1)
        costs = {"test": item.nodeid, "seconds": round(self._seconds, 4)}
        costs["processor_seconds"] = round(processor_s() - begun_s, 2)
        costs["grown_mib"] = round((resident_bytes() - resident) / 2**20, 1)
        if self._engines:
            costs |= {"engines": self._engines, "engine_seconds": round(self._engine_seconds, 3)}
        if self._imports:
            costs["imports"] = self._imports
        self._file.write(json.dumps(costs) + "\n")
        return result

    def pytest_unconfigure(self):
        """Close the file."""
        if self._file is not None:
            self._file.close()


def processor_s():
    """Return the seconds that this process has computed, and those that it started and has waited for."""
    used = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(each.ru_utime + each.ru_stime for each in used)


def on_import(name, watch):
    """Call ``watch`` with a module once it is imported, at once if it is already."""
    if sys.modules.get(name) is not None:
        watch(sys.modules[name])
    else:
        sys.meta_path.insert(0, _Finder(name, watch))


class _Finder:
    """Finds one module as all others would be found, and calls a function after its execution."""

    def __init__(self, name, watch):
        self._name, self._watch = name, watch

    def find_spec(self, name, path=None, target=None):
        if name != self._name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module):
                execute(module)
                self._watch(module)

            spec.loader.exec_module = exec_module
        return spec
