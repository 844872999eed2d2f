"""The adapter's answer to ``seer doctor``."""

import importlib.machinery

from seer_trl.doctor import seer_doctor


def test_trl_that_is_missing_is_no_fault_and_has_a_remedy(monkeypatch):
    monkeypatch.setattr("seer_core.plugins.interpreters.find_spec", lambda _: None)
    [check] = seer_doctor()
    assert (check.part, check.ok) == ("trl", True)
    assert check.finding == "TRL not in this environment; only training with TRL needs it"
    assert check.remedy == "pip install 'trl>=1.16,<1.17' (docs/trl.md)"


def test_another_package_of_the_name_is_not_trl(monkeypatch, tmp_path):
    spec = importlib.machinery.ModuleSpec("trl", None, is_package=True)
    spec.submodule_search_locations = [str(tmp_path)]
    monkeypatch.setattr("seer_core.plugins.interpreters.find_spec", lambda _: spec)
    [check] = seer_doctor()
    assert check.remedy
    (tmp_path / "trainer/grpo_trainer.py").parent.mkdir(parents=True)
    (tmp_path / "trainer/grpo_trainer.py").touch()
    [check] = seer_doctor()
    assert (check.ok, check.remedy) == (True, "")
    assert check.finding.startswith(f"TRL in {tmp_path}, seer-trl ")
