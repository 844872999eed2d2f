"""The example engine keeps the contract of engines on the tiny reasoner."""

import shutil
from pathlib import Path

import msgspec
import pytest
from seer_core.plugins.hookspecs import Startup
from seer_testing import EngineContract

WEIGHTS = Path(__file__).parents[3] / "tiny_reasoner" / "weights"

pytestmark = pytest.mark.engine


def fleet(**settings):
    from seer_transformers.plugin import Settings, seer_make_engines

    defaults = {"model": str(WEIGHTS), "instances": 2, "max_model_tokens": 512, "max_running": 8}
    return seer_make_engines(msgspec.convert(defaults | settings, Settings), Startup(0, Path.cwd()))


@pytest.fixture(scope="module")
def other_weights(tmp_path_factory):
    """The tiny reasoner with a sharper head."""
    from safetensors.torch import load_file, save_file

    directory = tmp_path_factory.mktemp("other") / "weights"
    shutil.copytree(WEIGHTS, directory)
    tensors = load_file(directory / "model.safetensors")
    tensors["model.norm.weight"] *= 1.5
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


class TestTransformersEngine(EngineContract):
    shared = True
    patience_s = 300.0

    @pytest.fixture(autouse=True)
    def _weights(self, other_weights):
        self.make = fleet
        self.weights = str(other_weights)
