"""A test run that skips what its set-up should have brought is no success."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LACKING = """
import seer_mooncake.system
seer_mooncake.system.LIBRARIES = {"libwhale.so.9": "libwhale9"}
"""
SKIPS = {
    "a test": "import pytest\n\ndef test_it():\n    pytest.skip('no whale here')\n",
    "a file": "import pytest\n\npytest.importorskip('whale', reason='no whale here')\n",
}


@pytest.fixture
def run(tmp_path):
    """Return a function that runs tests under the project's own settings: exit status and output."""
    (tmp_path / "conftest.py").write_text((ROOT / "conftest.py").read_text())
    (tmp_path / "lacking.py").write_text(LACKING)
    (tmp_path / "test_other.py").write_text("def test_other():\n    pass\n")

    def run(*arguments, ci=False):
        environment = {name: value for name, value in os.environ.items() if name != "CI"}
        environment |= {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"} | ({"CI": "true"} if ci else {})
        command = [sys.executable, "-m", "pytest", "-ra", "-p", "no:cacheprovider", *arguments, str(tmp_path)]
        ended = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True)
        return ended.returncode, ended.stdout

    return run


@pytest.mark.parametrize("workers", [(), ("-n", "1")], ids=["here", "in a worker"])
@pytest.mark.parametrize("kind", SKIPS)
def test_a_skip_fails_the_run(run, tmp_path, kind, workers):
    (tmp_path / "test_skipped.py").write_text(SKIPS[kind])
    status, output = run(*workers)
    assert status == pytest.ExitCode.TESTS_FAILED
    assert "1 tests were skipped for want of something" in output
    assert re.search("1 passed, 1 skipped", output)


def test_an_allowed_skip_passes_but_in_ci(run, tmp_path):
    (tmp_path / "test_skipped.py").write_text(
        "import pytest\n\ndef test_it():\n    pytest.skip('shared/data is absent')\n"
    )
    assert run()[0] == pytest.ExitCode.OK
    assert run(ci=True)[0] == pytest.ExitCode.TESTS_FAILED


def test_a_long_test_is_left_out_unless_it_is_asked_for(run, tmp_path):
    (tmp_path / "test_long.py").write_text(
        "import pytest\n\n@pytest.mark.long\ndef test_it():\n    assert False\n"
    )
    status, output = run()
    assert status == pytest.ExitCode.OK
    assert "1 passed, 1 deselected" in output
    assert run("--long")[0] == pytest.ExitCode.TESTS_FAILED


def test_without_mooncakes_libraries_only_its_own_tests_are_skipped(run, tmp_path):
    (tmp_path / "mooncake").mkdir()
    own = (ROOT / "backends" / "mooncake" / "tests" / "conftest.py").read_text()
    (tmp_path / "mooncake" / "conftest.py").write_text(own)
    (tmp_path / "mooncake" / "test_own.py").write_text("def test_own():\n    pass\n")
    status, output = run("-p", "lacking")
    assert status == pytest.ExitCode.TESTS_FAILED
    assert re.search("1 passed, 1 skipped", output)
    assert "libwhale.so.9; run scripts/install-system-packages" in output
