"""Servers in Seer's environment, on simulated engines, and verl's config for them."""

import json
import os
import re
import shutil
import subprocess
import sys
import threading
from pathlib import Path

os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"  # Ray asks for it, on machines without a GPU
if not os.environ.get("SEER_VERL_ON_GPU"):  # of gpu-check
    os.environ["CUDA_VISIBLE_DEVICES"] = ""

import pytest
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
SEER = ROOT / ".venv/bin/seer"
MODEL = ROOT / "examples/tiny_reasoner/weights"

START_S = 240

sys.path.insert(0, str(HERE))
pytest.register_assert_rewrite("kept_servers")

CONFIG = """
[seer]
plugins = ["divided_rollout", "context_sched"]
engine = "sim"
kv_pool = "none"

[rollout]
max_tokens = 99

[engine.sim]
instances = 2

[engine.sim.lengths]
mean_tokens = 8

[plugin.divided_rollout]
chunk_tokens = 4
"""


class Server:
    """``seer serve`` of a config, and the library's responses to the same prompts."""

    def __init__(self, folder, config=CONFIG):
        self.folder = folder
        self.config = folder / "seer.toml"
        self.config.write_text(config, "utf-8")
        command = [SEER, "serve", self.config, "--port", "0"]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=_own())
        limit = threading.Timer(START_S, self.process.kill)
        limit.start()
        printed, found = [], None
        while found is None and (line := self.process.stderr.readline()):
            printed.append(line)
            found = re.search(r"running on (http://\S+)", line)
        limit.cancel()
        assert found, f"the server has not come up:\n{''.join(printed[-40:])}"
        self.url = found[1]

    def library(self, records, iteration):
        """Return the tokens and log-probs of each group's responses, by ``seer run`` without a server."""
        prompts, out = self.folder / "prompts.jsonl", self.folder / "out"
        prompts.write_text("".join(json.dumps(each) + "\n" for each in records), "utf-8")
        command = [SEER, "run", self.config, "--prompts", prompts, "--out", out, "--overwrite"]
        subprocess.run(
            [*command, "--iteration", str(iteration)],
            check=True,
            capture_output=True,
            timeout=START_S,
            env=_own(),
        )
        lines = (out / "completions.jsonl").read_text("utf-8").splitlines()
        return {
            (each["group_id"], each["index"]): (each["token_ids"], each["logprobs"])
            for each in map(json.loads, lines)
        }

    def close(self):
        self.process.kill()
        self.process.wait(60)
        self.process.stderr.close()


def _own():
    """Return the environment of Seer's processes, without the path by which tests see verl beside vLLM."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


@pytest.fixture(scope="module", autouse=True)
def environment_as_before():
    """Take back what a file sets for its cluster, such as logical GPUs, for the servers of the next."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture(scope="session")
def server(tmp_path_factory):
    found = Server(tmp_path_factory.mktemp("server"))
    yield found
    found.close()


@pytest.fixture
def fresh_server(tmp_path):
    found = Server(tmp_path)
    yield found
    found.close()


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    """Return the tiny reasoner under a model type whose chats verl does not treat in a special way."""
    folder = tmp_path_factory.mktemp("model")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(MODEL / name, folder)
    described = json.loads((MODEL / "config.json").read_text())
    described |= {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    (folder / "config.json").write_text(json.dumps(described))
    return folder


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    """Return the directories of two tiny models that differ in their weights alone."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    found = []
    for seed in range(2):
        torch.manual_seed(seed)
        folder = tmp_path_factory.mktemp("model") / "tiny"
        config = LlamaConfig(
            vocab_size=96,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            max_position_embeddings=512,
            bos_token_id=1,
            eos_token_id=2,
            pad_token_id=0,
            initializer_range=0.2,
        )
        LlamaForCausalLM(config).save_pretrained(folder)
        for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
            shutil.copy(MODEL / name, folder)
        found.append(folder)
    return found


@pytest.fixture(scope="session")
def mixture(tmp_path_factory):
    """Return the directory of a tiny mixture of experts."""
    folder = tmp_path_factory.mktemp("mixture")
    command = [ROOT / ".venv/bin/python", "-m", "seer_testing.families", "--tokenizer", MODEL, folder]
    subprocess.run([*command, "Qwen3-MoE"], check=True, capture_output=True, env=_own())
    return folder / "Qwen3-MoE"


@pytest.fixture(scope="session")
def configure(model):
    """Return a function that makes verl's config for a server, ``docs/guides/verl.md`` with more lines."""
    rollout = "actor_rollout_ref.rollout"
    lines = [
        f"{rollout}.name=seer",
        f"+{rollout}.agent.agent_loop_manager_class=seer_verl.manager.AgentLoopManager",
        f"{rollout}.tensor_model_parallel_size=1",
        f"{rollout}.n=3",
        f"{rollout}.prompt_length=16",
        f"{rollout}.response_length=12",
        f"actor_rollout_ref.model.path={model}",
        "trainer.n_gpus_per_node=1",
    ]
    with initialize_config_module("verl.trainer.config", version_base=None):
        composed = compose("ppo_trainer", lines)
    OmegaConf.set_struct(composed, False)

    def make(server, *overrides, v1=False, workers=3):
        others = [f"{rollout}.agent.num_workers={workers}", f"trainer.use_v1={v1}"]
        if server is not None:
            others.append(f"{rollout}.engine_kwargs.seer.url={server.url}")
        return OmegaConf.merge(composed, OmegaConf.from_dotlist([*others, *overrides]))

    return make
