"""The answers of the adapters to ``seer doctor``."""

import importlib.machinery
import subprocess
import sys
from importlib import import_module

import pytest

ADAPTERS = {
    "trl": ("TRL", "trainer/grpo_trainer.py", "pip install 'trl>=1.16,<1.17'"),
    "skyrl": (
        "SkyRL",
        "train/entrypoints/main_base.py",
        "git clone https://github.com/NovaSky-AI/SkyRL",
    ),
    "slime": ("slime", "rollout/base_types.py", "git clone https://github.com/THUDM/slime"),
}
"""The adapter's package: its framework's name, a file of that, and the remedy where it is missing."""


def ask(package, spec, monkeypatch):
    """Return what an adapter answers where Python finds this package."""
    monkeypatch.setattr("seer_host.interpreters.find_spec", lambda _: spec)
    [check] = import_module(f"seer_{package}.doctor").seer_doctor()
    return check


@pytest.mark.parametrize("package", ADAPTERS)
def test_a_framework_that_is_missing_is_no_fault_and_has_a_remedy(package, monkeypatch):
    name, _, remedy = ADAPTERS[package]
    check = ask(package, None, monkeypatch)
    assert (check.part, check.ok) == (package, True)
    assert check.finding == f"{name} not in this environment; only training with {name} needs it"
    assert check.remedy == f"{remedy} (docs/guides/{package}.md)"


@pytest.mark.parametrize("package", ADAPTERS)
def test_another_package_of_the_name_is_not_the_framework(package, monkeypatch, tmp_path):
    name, file, _ = ADAPTERS[package]
    spec = importlib.machinery.ModuleSpec(package, None, is_package=True)
    spec.submodule_search_locations = [str(tmp_path)]
    assert ask(package, spec, monkeypatch).remedy
    (tmp_path / file).parent.mkdir(parents=True)
    (tmp_path / file).touch()
    check = ask(package, spec, monkeypatch)
    assert (check.ok, check.remedy) == (True, "")
    assert check.finding.startswith(f"{name} in {tmp_path}, seer-{package} ")


@pytest.mark.parametrize("package", ADAPTERS)
def test_the_doctor_can_be_asked_where_the_framework_is_not_installed(package):
    program = f"from seer_{package}.doctor import seer_doctor; print(*(each.part for each in seer_doctor()))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.stdout == f"{package}\n", done.stderr
