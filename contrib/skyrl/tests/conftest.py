"""SkyRL, or its stand-in, and its options."""

import importlib.util
import sys
import typing
from pathlib import Path

import pytest
import typing_extensions

HERE = Path(__file__).parent

sys.path.insert(0, str(HERE))  # SkyRL imports environments by name: skyrl_task

if importlib.util.find_spec("skyrl") is None:
    import skyrl_standin

    skyrl_standin.install()
elif sys.version_info < (3, 12):
    typing.TypedDict = typing_extensions.TypedDict  # pydantic takes no other there, and SkyRL uses typing's

import skyrl_gym  # noqa: E402

skyrl_gym.register(id="even", entry_point="skyrl_task:Even")
skyrl_gym.register(id="rounds", entry_point="skyrl_task:Rounds")


@pytest.fixture
def cfg(config, tmp_path, tiny_reasoner):
    """Return SkyRL's options, as its command would make them."""
    from seer_skyrl import SeerConfig

    return SeerConfig.from_cli_overrides(
        {
            "seer_config": str(config),
            "generator.batched": True,
            "generator.n_samples_per_prompt": 3,
            "generator.sampling_params.max_generate_length": 16,
            "generator.eval_sampling_params.max_generate_length": 16,
            "trainer.placement.colocate_all": False,
            "trainer.policy.model.path": str(tiny_reasoner),
            "trainer.export_path": str(tmp_path / "exports"),
        }
    )


@pytest.fixture(scope="session")
def tokenizer(tiny_reasoner):
    """Return the example's tokenizer, whose words are digits and a few more."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tiny_reasoner)
