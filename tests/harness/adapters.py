"""Fixtures that the tests of several adapters share: simulated engines, and the example's model."""

from pathlib import Path

import pytest

ENGINES = """
[seer]
plugins = ["divided_rollout", "context_sched"]
engine = "sim"
kv_pool = "none"
[engine.sim]
[engine.sim.lengths]
mean_tokens = 8
[plugin.divided_rollout]
chunk_tokens = 4
"""

OTHER_SCHEDULER = """
[seer]
plugins = ["group_round_robin"]
engine = "sim"
kv_pool = "none"
[engine.sim]
instances = 3
[engine.sim.lengths]
mean_tokens = 8
"""


@pytest.fixture
def config(tmp_path):
    """Return the path of a config of simulated engines."""
    (tmp_path / "rollout.toml").write_text(ENGINES, "utf-8")
    return tmp_path / "rollout.toml"


@pytest.fixture
def other_config(tmp_path):
    """Return the path of a config with another scheduler and more engines, which sample the same tokens."""
    (tmp_path / "other.toml").write_text(OTHER_SCHEDULER, "utf-8")
    return tmp_path / "other.toml"


@pytest.fixture
def writing_config(no_model, tmp_path):
    """Return the path of a config whose engine writes real tokens, which a journal keeps."""
    (tmp_path / "writing.toml").write_text('[seer]\nengine = "no_model"\n', "utf-8")
    return tmp_path / "writing.toml"


@pytest.fixture(scope="session")
def tiny_reasoner():
    """Return the directory of the example's model."""
    return Path(__file__).parents[2] / "examples" / "tiny_reasoner" / "weights"
