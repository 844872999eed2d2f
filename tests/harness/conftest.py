"""Runs of small test files under single plug-ins of the harness."""

import os
import subprocess
import sys
from pathlib import Path

import attrs
import pytest

ROOT = Path(__file__).parents[2]


@attrs.frozen
class Run:
    """How a run has ended."""

    status: int
    output: str

    @property
    def lines(self):
        return self.output.splitlines()


@pytest.fixture
def run_tests(tmp_path):
    """Return a function that runs test files, given by name and source, under plug-ins of the harness."""
    (tmp_path / "pytest.ini").write_text("[pytest]\nfilterwarnings = error\n")

    def run(plugins, *arguments, **sources):
        for name, source in sources.items():
            (tmp_path / f"{name}.py").write_text(source)
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider"]
        command += [word for name in plugins for word in ("-p", f"tests.harness.{name}")]
        # What else is installed takes most of the start of a process.
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
        ended = subprocess.run(
            [*command, *arguments],
            env=environment,
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        return Run(ended.returncode, ended.stdout)

    return run
