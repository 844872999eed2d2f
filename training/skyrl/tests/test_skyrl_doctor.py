"""The adapter's answer to ``seer doctor``."""

import importlib.machinery
import subprocess
import sys

from seer_skyrl.doctor import seer_doctor


def test_skyrl_that_is_missing_is_no_fault_and_has_a_remedy(monkeypatch):
    monkeypatch.setattr("seer_core.plugins.interpreters.find_spec", lambda _: None)
    [check] = seer_doctor()
    assert (check.part, check.ok) == ("skyrl", True)
    assert check.finding == "SkyRL not in this environment; only training with SkyRL needs it"
    assert check.remedy == "git clone https://github.com/NovaSky-AI/SkyRL (docs/skyrl.md)"


def test_another_package_of_the_name_is_not_skyrl(monkeypatch, tmp_path):
    spec = importlib.machinery.ModuleSpec("skyrl", None, is_package=True)
    spec.submodule_search_locations = [str(tmp_path)]
    monkeypatch.setattr("seer_core.plugins.interpreters.find_spec", lambda _: spec)
    [check] = seer_doctor()
    assert check.remedy
    (tmp_path / "train/entrypoints/main_base.py").parent.mkdir(parents=True)
    (tmp_path / "train/entrypoints/main_base.py").touch()
    [check] = seer_doctor()
    assert (check.ok, check.remedy) == (True, "")
    assert check.finding.startswith(f"SkyRL in {tmp_path}, seer-skyrl ")


def test_the_doctor_can_be_asked_where_skyrl_is_not_installed():
    program = "import seer_skyrl.doctor; print(*(check.part for check in seer_skyrl.doctor.seer_doctor()))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.stdout == "skyrl\n", done.stderr
