"""Code that torch compiles lies where no other user can put anything first."""

import os
import subprocess
import sys

import pytest
from seer_worker.process.compiled import VARIABLE, keep_compiled_private

COMPILE = """
import os

from seer_worker.process.compiled import keep_compiled_private

keep_compiled_private()

from torch._inductor.runtime.cache_dir_utils import cache_dir

print(cache_dir())
"""


@pytest.fixture(autouse=True)
def _unset(monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    yield
    os.environ.pop(VARIABLE, None)


def test_torch_takes_a_directory_below_the_users_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    done = subprocess.run([sys.executable, "-c", COMPILE], capture_output=True, text=True, check=True)
    place = tmp_path / "cache/seer/torchinductor"
    assert done.stdout == f"{place}\n"
    assert place.stat().st_mode & 0o777 == 0o700


def test_a_directory_that_is_named_stays(monkeypatch):
    monkeypatch.setenv(VARIABLE, "elsewhere")
    keep_compiled_private()
    assert os.environ[VARIABLE] == "elsewhere"


def test_without_a_cache_of_the_user_torch_decides(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    keep_compiled_private()
    assert VARIABLE not in os.environ
