"""The adapter's answer to ``seer doctor``."""

import importlib.machinery
import subprocess
import sys

from seer_slime.doctor import seer_doctor


def test_slime_that_is_missing_is_no_fault_and_has_a_remedy(monkeypatch):
    monkeypatch.setattr("seer_core.plugins.interpreters.find_spec", lambda _: None)
    [check] = seer_doctor()
    assert (check.part, check.ok) == ("slime", True)
    assert check.finding == "slime not in this environment; only training with slime needs it"
    assert check.remedy == "git clone https://github.com/THUDM/slime (docs/slime.md)"


def test_another_package_of_the_name_is_not_slime(monkeypatch, tmp_path):
    spec = importlib.machinery.ModuleSpec("slime", None, is_package=True)
    spec.submodule_search_locations = [str(tmp_path)]
    monkeypatch.setattr("seer_core.plugins.interpreters.find_spec", lambda _: spec)
    [check] = seer_doctor()
    assert check.remedy
    (tmp_path / "rollout/base_types.py").parent.mkdir(parents=True)
    (tmp_path / "rollout/base_types.py").touch()
    [check] = seer_doctor()
    assert (check.ok, check.remedy) == (True, "")
    assert check.finding.startswith(f"slime in {tmp_path}, seer-slime ")


def test_the_doctor_can_be_asked_where_slime_is_not_installed():
    program = "import seer_slime.doctor; print(*(check.part for check in seer_slime.doctor.seer_doctor()))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.stdout == "slime\n", done.stderr
