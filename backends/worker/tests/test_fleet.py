"""Settings of an engine's plug-in, its fleet, and a model that is named if it is none."""

import json
import os
import sys

import msgspec
import pytest
from seer_worker.client.fleet import WorkerSettings, _remove_old_logs, make_fleet

from seer_core.errors import ConfigError
from seer_core.plugins.hookspecs import Startup
from seer_core.ports.engine import EngineFleet, InstanceClient


@pytest.fixture
def model(tmp_path):
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps({"vocab_size": 10, "max_position_embeddings": 100}))
    return directory


def fleet(directory, **settings):
    read = msgspec.convert({"model": "model", "instances": 2, **settings}, WorkerSettings)
    environments = [{"INDEX": str(index)} for index in range(read.instances)]
    return make_fleet("mine", read, Startup(0, directory), "mine.instance:Mine", {"a": 1}, environments)


def test_a_fleet_has_an_instance_for_each_environment(model, tmp_path):
    made = fleet(tmp_path)
    assert isinstance(made, EngineFleet)
    assert all(isinstance(engine, InstanceClient) for engine in made.engines)
    assert [engine.id for engine in made.engines] == ["mine-0", "mine-1"]
    assert [engine.spec.environment for engine in made.engines] == [
        {"INDEX": "0"},
        {"INDEX": "1"},
    ]
    assert (made.model.vocab_size, made.model.max_model_tokens) == (10, 100)
    assert made.tokenizer is None
    assert made.engines[0].spec.interpreter == sys.executable
    assert {engine.spec.model for engine in made.engines} == {made.model.digest} != {""}


def test_another_interpreter_is_taken_relative_to_the_config(model, tmp_path):
    made = fleet(tmp_path, python="other/bin/python", instances=1)
    assert made.engines[0].spec.interpreter == str(tmp_path / "other/bin/python")


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"model": "nowhere"}, r"engine.mine.model: .*nowhere is no directory"),
        ({"max_model_tokens": 101}, r"engine.mine.max_model_tokens = 101, but the model in .* takes 100"),
        ({"labels": [{"gpu": "a"}]}, r"engine.mine.labels lists 1 tables for 2 instances"),
    ],
)
def test_a_setting_that_does_not_fit_is_named_in_its_table(model, tmp_path, settings, complaint):
    with pytest.raises(ConfigError, match=complaint):
        fleet(tmp_path, **settings)


def test_logs_that_are_old_are_removed_from_the_temporary_directory(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    digits = "0123456789abcdef"
    names = (f"seer-toy-{digits}", f"seer-toy-{digits[::-1]}", "seer-toy-mine", f"seer-other-{digits}")
    for name in names:
        (tmp_path / name).mkdir()
        (tmp_path / name / "toy-0.log").write_text("why")
    for name in names[1:]:
        os.utime(tmp_path / name, (0, 0))
    _remove_old_logs("seer-toy-")
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted({*names} - {names[1]})
