"""Settings and fixtures of all tests.

Hypothesis never judges by time, Ctrl-C interrupts, a skipped test fails the run, and each test begins with
the default configuration of logs.  The fixtures are those that tests of several distributions need: config
and prompts files, plug-ins installed on the spot, the command line.
"""

import importlib
import json
import os
import re
import signal
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest
import structlog
from click.testing import CliRunner
from hypothesis import settings
from seer_cli import main

settings.register_profile("seer", deadline=None)
settings.load_profile("seer")

# What a script starts with `&` ignores SIGINT, and under nohup SIGHUP.  So would processes that tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)


def pytest_addoption(parser):
    """Add the options of tests that may go on for as long as asked."""
    group = parser.getgroup("soak and fuzz")
    group.addoption(
        "--soak-minutes",
        type=float,
        default=0.0,
        help="tests/soak: checks in full, and campaigns of faults for so many minutes",
    )
    group.addoption("--soak-seed", type=int, default=0, help="tests/soak: of the campaign of faults")
    group.addoption(
        "--soak-set", action="append", default=[], metavar="KEY=VALUE", help="tests/soak: as for seer run"
    )
    group.addoption("--long", action="store_true", help="also the tests marked `long`")
    group.addoption("--fuzz-seconds", type=float, default=0.0, help="tests/fuzz: for each target")
    group.addoption("--fuzz-seed", type=int, default=11, help="tests/fuzz: of the changes")


collect_ignore = ["training/verl", "tests/clients"]
"""What is tested in environments of their own: make verl-test, make clients-test."""

ALLOWED_SKIPS = {
    r"no C\+\+ compiler|cannot link AddressSanitizer": "fuzzing in C++ needs sanitizers",
    r"vLLM is not built for CPU": "the kernel under test is that of CPUs",
    r"machines are made of namespaces": "only root may make networks; clusters of raylets are tested anyway",
    r"no Prometheus here": "make prometheus brings it only from Debian's packages",
    r"no OpenEnv here": "make setup-environments brings it into an environment of its own",
    r"shared/data": "recorded lengths and texts are not part of the project",
}
"""Why a test may be skipped, by a pattern of its reason.  In CI, whose machine is known, none may."""

_refused: list[str] = []


def pytest_runtest_logreport(report):
    """Note a skipped test that is not allowed to be."""
    if report.skipped and not hasattr(report, "wasxfail"):
        _judge(report)


def pytest_collectreport(report):
    """Note a skipped file that is not allowed to be."""
    if report.skipped:
        _judge(report)


def _judge(report):
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    allowed = () if os.environ.get("CI") else ALLOWED_SKIPS
    if not any(re.search(pattern, reason) for pattern in allowed):
        _refused.append(report.nodeid)


def pytest_sessionfinish(session):
    """Fail a run that would otherwise have passed without some of its tests."""
    if _refused and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter):
    """Say why a run without failures failed."""
    if _refused:
        terminalreporter.section("skipped tests are failures", red=True)
        terminalreporter.line(
            f"{len(_refused)} tests were skipped for want of something that the set-up should have brought;"
            " their reasons stand above, allowed ones in ALLOWED_SKIPS of conftest.py"
        )


CLUSTERS = ("backends/ray/", "tests/soak/test_cluster_campaign.py")
"""Where tests start clusters."""

LONGEST = (
    *CLUSTERS,
    "training/rl/tests/test_resume.py",
    "training/rl/tests/test_megatron.py",
    "tests/soak/",
    "tests/test_gpu_check.py",
    "backends/vllm/tests/test_vllm_tensor_parallel.py",
    "tests/test_packages.py",
    "tests/integration/",
    "serving/server/tests/test_against_vllm.py",
    "plugins/openenv/",
    "training/",
    "backends/",
    "tests/test_new_plugin.py",
)
"""Files of long tests.  They begin first, or one process would be left with one of them at the end."""


def pytest_collection_modifyitems(config, items):
    """Leave the tests marked ``long`` out, unless they are asked for, and put the longest others first."""
    if not (config.getoption("--long") or config.getoption("--soak-minutes")):
        left_out = [item for item in items if item.get_closest_marker("long")]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not item.get_closest_marker("long")]

    def place(item):
        starts = (place for place, start in enumerate(LONGEST) if item.nodeid.startswith(start))
        return next(starts, len(LONGEST))

    items.sort(key=place)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Let one of several processes run all tests on clusters, so that each is started once, one at a time.

    The groups of xdist itself do nothing under pytest 9.2.
    """
    from xdist.scheduler import LoadFileScheduling

    config.option.loadscopereorder = False  # by number of tests, which says nothing about their length

    class ByFileOrCluster(LoadFileScheduling):
        def _split_scope(self, nodeid):
            return "cluster" if nodeid.startswith(CLUSTERS) else super()._split_scope(nodeid)

    return ByFileOrCluster(config, log) if config.getvalue("dist") == "loadfile" else None


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
