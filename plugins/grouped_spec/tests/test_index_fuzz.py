"""Random operations on the C++ index, malformed ones among them, under AddressSanitizer and UBSan."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1]
SECONDS = 4


@pytest.fixture(scope="module")
def fuzzer(tmp_path_factory):
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")
    if compiler is None or shutil.which("cmake") is None:
        pytest.skip("no C++ compiler or no cmake")
    build = tmp_path_factory.mktemp("fuzz")
    probe = build / "probe.cpp"
    probe.write_text("int main() {}\n")
    flags = ["-fsanitize=address,undefined", "-o", str(build / "probe")]
    if subprocess.run([compiler, str(probe), *flags], capture_output=True).returncode:
        pytest.skip(f"{compiler} cannot link AddressSanitizer")
    for command in (["cmake", "-S", SOURCE, "-B", build, "-DSEER_FUZZ=ON"], ["cmake", "--build", build]):
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    return build / "draft_index_fuzz"


def test_nothing_reads_or_writes_out_of_bounds(fuzzer):
    done = subprocess.run([fuzzer, str(SECONDS), "1"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    assert "operations" in done.stdout
