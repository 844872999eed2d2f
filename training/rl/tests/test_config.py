"""The ``[train]`` tables: what they compute, and how a file of them is read."""

import json
from importlib.metadata import EntryPoints

import msgspec
import pytest
from click.testing import CliRunner
from seer_cli import main
from seer_rl.config import MegatronTable, OptimizerTable, engine_models, first_model, load_training

from reference.packages import repository_entry_points
from seer_core.errors import ConfigError

CONFIG = """
[train]
prompts = "prompts.jsonl"
reward = "reward.py:reward"
[seer]
plugins = ["divided_rollout"]
engine = "vllm"
[engine.vllm]
model = "engine"
"""


@pytest.fixture
def path(tmp_path):
    (tmp_path / "train.toml").write_text(CONFIG, "utf-8")
    return tmp_path / "train.toml"


def test_the_learning_rate_warms_up_and_falls_to_zero():
    table = OptimizerTable(learning_rate=1.0, warmup=4, decay=10)
    assert [table.rate(update) for update in (0, 1, 3, 5, 10, 11)] == pytest.approx(
        [0.25, 0.5 * 0.9, 0.7, 0.5, 0.0, 0.0]
    )


def test_the_number_of_ranks_is_the_product():
    assert msgspec.convert({"tensor_parallel": 2, "data_parallel": 3}, MegatronTable).ranks == 6


def test_overrides_reach_the_train_table_and_the_other_tables(path):
    table, config = load_training(path, ["train.groups=3", "seer.seed=7"])
    assert (table.groups, config.seer.seed) == (3, 7)
    assert "train" not in config.plugin


def test_the_first_model_is_that_of_the_engine_unless_another_is_named(path):
    table, config = load_training(path)
    engine = path.parent / "engine"
    assert engine_models(config) == {"vllm": engine}
    assert first_model(table, config) == engine
    table, config = load_training(path, ["train.model=other"])
    assert first_model(table, config) == path.parent / "other"


def test_without_any_model_the_first_weights_have_to_be_named(path):
    table, config = load_training(path, ["engine.vllm.model=''"])
    with pytest.raises(ConfigError, match="name the first weights"):
        first_model(table, config)


def test_commands_that_do_not_train_take_a_config_of_training_too(path, monkeypatch):
    offers = EntryPoints(repository_entry_points("seer.tables"))
    monkeypatch.setattr("seer_host.config_files.offered", lambda group: offers)
    path.write_text(CONFIG.replace('"vllm"', '"sim"').partition("[engine.vllm]")[0], "utf-8")
    result = CliRunner().invoke(main, ["plugins", str(path)])
    assert result.exit_code == 0, result.output
    values = path.with_name("values.json")
    result = CliRunner().invoke(main, ["config", str(path), "--set", "train.groups=5", "--json", str(values)])
    assert result.exit_code == 0, result.output
    assert {"key": "train.groups", "value": 5, "origin": "--set train.groups=5"} in json.loads(
        values.read_text()
    )


@pytest.mark.parametrize(
    ("text", "match"),
    [("[seer]\n", r"has no \[train\] table; add one"), ("[train", "is not valid TOML"), (None, "cannot")],
)
def test_a_file_without_a_train_table_is_refused(path, text, match):
    if text is None:
        path.unlink()
    else:
        path.write_text(text, "utf-8")
    with pytest.raises(ConfigError, match=match):
        load_training(path)


@pytest.mark.parametrize("table", ["train", "train.evaluation"])
@pytest.mark.parametrize("value", [0, 1_000_001, 2**62])
def test_the_prompts_of_an_iteration_have_bounds(path, table, value):
    with pytest.raises(ConfigError, match=r"groups: expected `int` [<>]= 1"):
        load_training(path, [f"{table}.groups={value}"])
