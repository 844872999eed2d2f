"""Random operations on the C++ index, malformed ones among them, under AddressSanitizer and UBSan."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.patience import PATIENCE_S

SOURCES = sorted((Path(__file__).parents[1] / "src").glob("*.cpp"))
SANITIZERS = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
FLAGS = ["-std=c++17", "-Wall", "-Wextra", "-Wshadow", "-O1", "-g", "-fno-omit-frame-pointer"]
SECONDS = 4


@pytest.fixture(scope="module")
def fuzzer(tmp_path_factory):
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    build = tmp_path_factory.mktemp("fuzz")
    probe = build / "probe.cpp"
    probe.write_text("int main() {}\n")
    if subprocess.run([compiler, probe, *SANITIZERS, "-o", build / "probe"], capture_output=True).returncode:
        pytest.skip(f"{compiler} cannot link AddressSanitizer")
    sources = [source for source in SOURCES if not source.name.startswith("binding")]
    done = subprocess.run(
        [compiler, *FLAGS, *SANITIZERS, *sources, "-o", build / "fuzz"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return build / "fuzz"


def test_nothing_reads_or_writes_out_of_bounds(fuzzer):
    # Engines that other tests have made here preload libraries, and the sanitizer has to come first.
    environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    command = [fuzzer, str(SECONDS), "1"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    assert "operations" in done.stdout
