"""``seer plugins``, ``seer config`` and ``seer doctor``."""

import io
import json
from importlib.metadata import EntryPoint, EntryPoints, entry_points, version

import pytest
from seer_cli.display import Display
from seer_cli.verl_environment import examine_verl

from seer_core.scheduling.scheduler import Slot

from .helpers import TECHNIQUES


def test_plugins_lists_what_is_installed_and_what_is_enabled(seer, write_config):
    result = seer("plugins")
    assert result.exit_code == 0, result.output
    for text in ("divided_rollout", "seer-divided-rollout", version("seer-divided-rollout"), "sim"):
        assert text in result.stdout
    below = result.stdout.rpartition("┘")[2]
    assert "experimental: works where it has been run; a part of its purpose" in below
    assert "supported: runs in every test run" in below
    result = seer("plugins", write_config(TECHNIQUES))
    row = next(line for line in result.stdout.splitlines() if " divided_rollout " in line)
    assert "yes" in row
    assert "splitter, placer" in row


def test_config_shows_every_effective_value_and_its_origin(seer, write_config, tmp_path):
    path = write_config(["divided_rollout"], "[engine.sim.lengths]\nsigma = 0.5")
    result = seer("config", path, "--set", "rollout.n=4", "--json", tmp_path / "config.json")
    assert result.exit_code == 0, result.output
    rows = {row["key"]: row for row in json.loads((tmp_path / "config.json").read_bytes())}
    for key, value, origin in [
        ("seer.plugins", ["divided_rollout"], str(path)),
        ("rollout.n", 4, "--set rollout.n=4"),
        ("rollout.temperature", 1.0, "default"),
        ("engine.sim.instances", 2, "default"),
        ("engine.sim.lengths.sigma", 0.5, str(path)),
        ("engine.sim.lengths.cap_tokens", 4096, "default"),
        ("plugin.divided_rollout.chunk_tokens", "auto", "default"),
    ]:
        assert rows[key] == {"key": key, "value": value, "origin": origin}
    assert "engine.sim.lengths.sigma" in result.stdout


def test_doctor_looks_at_all_plug_ins_and_fails_if_one_lacks_something(seer, distribution, tmp_path):
    distribution(
        "sickly",
        "from seer_core.plugins.hookspecs import Check, hookimpl\n"
        "@hookimpl\n"
        "def seer_doctor(settings, startup):\n"
        "    assert settings is None and startup is None\n"
        "    return [Check('sickly', False, 'no thermometer', 'buy one in a [shop]')]\n",
    )
    distribution("broken", "import a_module_that_nobody_has\n")
    distribution(
        "fainting",
        "from seer_core.plugins.hookspecs import hookimpl\n"
        "@hookimpl\n"
        "def seer_doctor():\n"
        "    raise OSError('black')\n",
    )
    result = seer("doctor", "--json", tmp_path / "doctor.json")
    assert result.exit_code == 1
    assert "buy one in a [shop]" in result.stdout
    checks = {check["part"]: check for check in json.loads((tmp_path / "doctor.json").read_bytes())}
    assert checks["core"]["ok"]
    assert checks["sickly"] == {
        "part": "sickly",
        "ok": False,
        "finding": "no thermometer",
        "remedy": "buy one in a [shop]",
    }
    assert "a_module_that_nobody_has" in checks["broken"]["finding"]
    finding = checks["fainting"]["finding"]
    assert finding.startswith("hook 'seer_doctor' raised OSError: black at ")
    assert finding.endswith("fainting_module.py:4")


def test_doctor_names_the_remedy_where_there_is_no_environment_of_verl(tmp_path):
    check = examine_verl(tmp_path / ".venv-verl" / "bin" / "python")
    assert check.ok
    assert str(tmp_path / ".venv-verl") in check.finding
    assert "make setup-verl" in check.remedy


@pytest.mark.parametrize(
    ("answer", "ok", "finding"),
    [
        ("verl 0.9.1\nseer-verl 0.1.0\nseer-client 0.1.0\ntorch 2.13.0", True, "verl 0.9.1, seer-verl 0.1.0"),
        ("verl 0.9.1\nseer-verl -\nseer-client 0.1.0\ntorch -", False, "seer-verl, torch not in"),
        ("nonsense", False, "does not answer"),
    ],
)
def test_doctor_looks_into_the_environment_of_verl(tmp_path, answer, ok, finding):
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\necho '{answer}'\n")
    python.chmod(0o755)
    check = examine_verl(python)
    assert (check.ok, finding in check.finding) == (ok, True)
    assert ("make setup-verl" in check.remedy) == (not ok)


def test_doctor_with_a_config_looks_at_what_it_enables(seer, distribution, write_config):
    distribution("broken", "import a_module_that_nobody_has\n")
    result = seer("doctor", write_config(TECHNIQUES))
    assert result.exit_code == 0, result.output
    assert "Python" in result.stdout


def test_an_observer_slot_of_the_display_is_the_core_s():
    view = Display("run", io.StringIO())
    assert view.slot == Slot("observer", "seer-core", view)


@pytest.mark.parametrize(
    "arguments",
    [
        ("serve",),
        ("serve", "--help"),
        ("serve", "x.toml", "--port", 8000, "--dashboard", "-p", "no:x"),
        ("train", "x.toml", "--out", "y", "--resume", "--", "-h"),
    ],
)
def test_a_command_whose_distribution_is_not_installed_takes_any_arguments_and_has_a_remedy(
    seer, monkeypatch, arguments
):
    monkeypatch.setattr("seer_cli.entry_points", lambda **_: EntryPoints(()))
    result = seer(*arguments)
    assert result.exit_code == 1
    sentence = f"command {arguments[0]!r} is not installed; run `make setup` in Seer's checkout"
    assert sentence in result.stderr


def test_a_command_that_cannot_be_imported_takes_any_arguments_and_names_its_distribution(seer, monkeypatch):
    point = EntryPoint("tune", "a_module_that_nobody_has:command", "seer.commands")
    monkeypatch.setattr("seer_cli.entry_points", lambda **_: EntryPoints([point]))
    result = seer("tune", "x.toml", "--out", "y")
    assert result.exit_code == 1
    assert "command 'tune' cannot be imported: ModuleNotFoundError" in result.stderr
    assert "mend or reinstall a_module_that_nobody_has:command" in result.stderr


def test_a_plug_in_of_ours_that_is_not_installed_has_a_remedy(seer, write_config, monkeypatch):
    config = write_config(["vllm"])
    rest = [point for point in entry_points(group="seer") if point.name == "sim"]
    monkeypatch.setattr("seer_session.assembly._entry_points", lambda: EntryPoints(rest))
    result = seer("plugins", config)
    assert result.exit_code == 2
    assert "the plug-in 'vllm' is not installed here; run `make setup` in Seer's checkout" in result.stderr
