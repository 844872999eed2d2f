"""``seer doctor``: the compiled index, found, missing, or of another source."""

import shutil
import subprocess
import sys

import pytest
from seer_grouped_spec import _index, doctor
from seer_grouped_spec.plugin import seer_doctor

from seer_core.plugins.hookspecs import Check
from tests.support.patience import PATIENCE_S

WITHOUT = """
import sys
from importlib.abc import MetaPathFinder

class Missing(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == "seer_grouped_spec._index":
            raise ImportError(f"no {name} here")

sys.meta_path.insert(0, Missing())
from seer_grouped_spec.plugin import seer_doctor
for check in seer_doctor(None, None):
    print(check.ok, check.finding, check.remedy)
"""


def test_an_installation_that_works_is_found_to():
    checks = seer_doctor(None, None)
    assert [check.ok for check in checks] == [True]
    assert _index.VERSION in checks[0].finding


def test_what_is_missing_is_reported_with_a_remedy():
    done = subprocess.run([sys.executable, "-c", WITHOUT], capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    (index,) = done.stdout.splitlines()
    assert index.startswith("False the compiled index cannot be loaded: no seer_grouped_spec._index here")
    assert "make setup" in index


@pytest.fixture
def source(tmp_path):
    if not doctor.SOURCE.is_dir():
        pytest.skip("the source is not here")
    return shutil.copytree(doctor.SOURCE, tmp_path / "src")


def test_an_index_that_is_older_than_its_source_is_reported(source):
    assert doctor.compiled_index(source).ok
    (source / "fuzz.cpp").write_text("// not part of it\n")
    assert doctor.compiled_index(source).ok
    with (source / "votes.cpp").open("a") as file:
        file.write("// changed\n")
    check = doctor.compiled_index(source)
    assert check == Check("grouped_spec", False, f"the compiled index is older than {source}", doctor.REBUILD)


def test_an_index_of_another_version_is_reported(monkeypatch):
    monkeypatch.setattr(_index, "VERSION", "0.0.9")
    check = doctor.compiled_index()
    assert not check.ok
    assert "of version 0.0.9, the package of" in check.finding


def test_without_the_source_there_is_nothing_to_compare(tmp_path):
    assert doctor.compiled_index(tmp_path / "nowhere").ok
