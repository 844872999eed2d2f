"""Settings and fixtures of all tests.

Ctrl-C interrupts, and each test begins with the default configuration of logs.  The plug-ins in
``tests/harness`` decide how a run goes and when it has failed.  The fixtures are those that tests of several
distributions need: config and prompts files, plug-ins installed on the spot, the command line.
"""

import importlib
import json
import os
import signal
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest
import structlog
from click.testing import CliRunner
from seer_cli import main

# What a script starts with `&` ignores SIGINT, and under nohup SIGHUP.  So would processes that tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)


pytest_plugins = [
    f"tests.harness.{name}"
    for name in (
        "selection",
        "gate",
        "order",
        "time_limits",
        "skips",
        "late_errors",
        "environment",
        "second_runs",
        "costs",
        "ended_early",
        "adapters",
    )
]

collect_ignore = ["training/verl", "tests/clients"]
"""What is tested in environments of their own: make verl-test, make clients-test."""


@pytest.fixture(autouse=True)
def _default_logs():
    """Undo what a command has configured: its level would hold for the tests that follow in this process."""
    yield
    structlog.reset_defaults()


@pytest.fixture
def write_config(tmp_path):
    """Return a function that writes a config for the sim engine, with more TOML below, and returns it."""

    def write(plugins=(), more="", *, engine="sim", seer=""):
        path = tmp_path / "seer.toml"
        path.write_text(
            f'[seer]\nplugins = {json.dumps(list(plugins))}\nengine = "{engine}"\n{seer}\n{more}\n'
        )
        return path

    return write


@pytest.fixture
def write_prompts(tmp_path):
    """Return a function that writes a prompts file: mappings as JSON, strings and bytes as they are."""

    def write(*lines, name="prompts.jsonl"):
        path = tmp_path / name
        path.write_bytes(b"".join(_line(line) + b"\n" for line in lines))
        return path

    return write


def _line(line):
    if isinstance(line, bytes):
        return line
    return (line if isinstance(line, str) else json.dumps(line)).encode()


@pytest.fixture
def distribution(tmp_path, monkeypatch):
    """Return a function that installs a plug-in module as a distribution of its own.

    It becomes visible to this process and, by PYTHONPATH, to those that it starts.
    """
    modules = []

    def install(name, source, *, version="1.0", project=None, module=None):
        module = module or f"{name}_module"
        project = project or f"seer-{name.replace('_', '-')}"
        site = tmp_path / f"site-{project}"
        info = site / f"{project.replace('-', '_')}-{version}.dist-info"
        info.mkdir(parents=True)
        (site / f"{module}.py").write_text(source)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project}\nVersion: {version}\n")
        (info / "entry_points.txt").write_text(f"[seer]\n{name} = {module}\n")
        monkeypatch.syspath_prepend(str(site))
        monkeypatch.setenv("PYTHONPATH", str(site), prepend=os.pathsep)
        importlib.invalidate_caches()
        modules.append(module)
        return site

    yield install
    for module in modules:
        sys.modules.pop(module, None)


@pytest.fixture
def no_model(distribution):
    """Install the example ``no_model``: engines without a model, whose tokens are real and keyed."""
    source = Path(__file__).parent / "examples/plugins/engines/seer_no_model/__init__.py"
    distribution("no_model", source.read_text("utf-8"), module="seer_no_model")


@pytest.fixture(scope="session")
def read_exposition():
    """Return a function that reads Prometheus' text: the values by name and labels, and the kinds by name."""
    from prometheus_client.parser import text_string_to_metric_families

    def read(text):
        values, kinds = defaultdict(dict), {}
        for family in text_string_to_metric_families(text):
            kinds[family.name] = family.type
            for sample in family.samples:
                values[sample.name][tuple(sorted(sample.labels.items()))] = sample.value
        return values, kinds

    return read


@pytest.fixture
def seer():
    """Return a function that runs the command line in this process and returns click's result."""

    def run(*arguments):
        return CliRunner().invoke(main, [str(argument) for argument in arguments])

    return run


@pytest.fixture
def start_seer():
    """Return a function that starts the command line as a process; all are ended with the test."""
    processes = []

    def start(*arguments, **options):
        command = [
            sys.executable,
            "-W",
            "error",
            "-c",
            "from seer_main import main; main()",
            *map(str, arguments),
        ]
        options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, **options}
        process = subprocess.Popen(command, **options)
        processes.append(process)
        return process

    yield start
    for process in processes:
        process.kill()
        process.wait()
        for pipe in (process.stdout, process.stderr, process.stdin):
            if pipe is not None:
                pipe.close()
