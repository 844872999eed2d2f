"""TRL's client and trainer, and OpenAI's client, at the address of Seer in front of two vLLM servers."""

from __future__ import annotations

import shutil
from functools import partial

import httpx
import openai
import pytest
from seer_server import make_app
from seer_session.runtime import Runtime

from seer_core.model import request_seed
from seer_core.plugins.config import make_config

pytestmark = [
    pytest.mark.engine,
    pytest.mark.filterwarnings("ignore"),  # TRL imports what it finds, vLLM too, which warns of much
]
pytest.importorskip("vllm", reason="vLLM is not installed: `make setup` installs it")

TOKEN = "a-secret-of-these-tests"
PATIENCE_S = 300
PROMPTS = [[3 + (7 * i + j) % 90 for j in range(12)] for i in range(3)]


@pytest.fixture(scope="module")
def front(pair, serving, tmp_path_factory):
    """The address of Seer, with the token in it as TRL sends it."""
    config = make_config(
        {
            "seer": {"engine": "remote", "plugins": ["divided_rollout", "context_sched"]},
            "plugin": {"divided_rollout": {"chunk_tokens": 16}},
            "engine": {"remote": {"urls": [each.url for each in pair]}},
        },
        base_dir=tmp_path_factory.mktemp("front"),
        origin="a test",
    )
    with serving.Served(make_app(partial(Runtime.from_config, config), token=TOKEN)) as served:
        yield served.url.replace("http://", f"http://trl:{TOKEN}@")


@pytest.fixture
def client(front):
    from trl.generation.vllm_client import VLLMClient

    return VLLMClient(base_url=front)


def alone(server, prompt, seed, most):
    """Return the tokens that one server writes by itself."""
    body = {"token_ids": prompt, "sampling_params": {"seed": seed, "max_tokens": most, "temperature": 1.0}}
    answer = httpx.post(f"{server.url}/inference/v1/generate", json=body, timeout=PATIENCE_S)
    return answer.json()["choices"][0]["token_ids"]


def test_trl_s_client_gets_the_tokens_of_a_server_alone(client, pair, models):
    found = client.generate(PROMPTS, n=2, max_tokens=40, generation_kwargs={"seed": 5})
    assert found["prompt_ids"] == PROMPTS
    wanted = [alone(pair[0], prompt, request_seed(5, index), 40) for prompt in PROMPTS for index in range(2)]
    assert found["completion_ids"] == wanted
    assert [len(each) for each in found["logprobs"]] == [len(each) for each in wanted]
    assert [[place[0] for place in each] for each in found["logprob_token_ids"]] == wanted
    assert client.get_world_size() == 2
    assert client.get_server_info()["model_config"]["logprobs_mode"] == "raw_logprobs"
    assert client.model == str(models[0])
    client.reset_prefix_cache()


def test_openai_s_client_names_the_servers_model(front, client, models):
    other = openai.OpenAI(base_url=f"http://{front.partition('@')[2]}/v1", api_key=TOKEN, timeout=PATIENCE_S)
    with other:
        answer = other.completions.create(
            model=str(models[0]),
            prompt=PROMPTS[0],
            n=2,
            max_tokens=40,
            seed=5,
            extra_body={"return_token_ids": True},
        )
    wanted = client.generate(PROMPTS[:1], n=2, max_tokens=40, generation_kwargs={"seed": 5})
    assert [each.token_ids for each in answer.choices] == wanted["completion_ids"]


def test_trl_trains_in_server_mode_on_weights_that_reach_both_servers(front, models, tmp_path, monkeypatch):
    """All but the way of the weights is TRL's own: NCCL needs GPUs, so the servers read a directory."""
    import torch
    from datasets import Dataset
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer
    from trl.generation.vllm_client import VLLMClient

    sent = []

    def update(client, metadata, named):
        folder = tmp_path / f"weights-{len(sent)}"
        folder.mkdir()
        save_file({name: tensor.contiguous() for name, tensor in named}, folder / "model.safetensors")
        shutil.copy(models[0] / "config.json", folder)
        sent.append(folder)
        body = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
        client._post(f"{client.base_url}/collective_rpc", json=body)

    monkeypatch.setattr(VLLMClient, "init_communicator", lambda client, device: None)
    monkeypatch.setattr(VLLMClient, "update_named_params", update)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    args = GRPOConfig(
        output_dir=str(tmp_path / "out"),
        max_steps=2,
        per_device_train_batch_size=6,
        num_generations=3,
        max_completion_length=24,
        learning_rate=1e-2,
        use_vllm=True,
        vllm_mode="server",
        vllm_server_base_url=front,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
    )
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(models[0], dtype=torch.float32),
        processing_class=AutoTokenizer.from_pretrained(models[0]),
        train_dataset=Dataset.from_list([{"prompt": f"w{3 + i} w{9 + i} w{30 + i}"} for i in range(4)]),
        reward_funcs=lambda completions, **_: [float(len(set(text.split()))) for text in completions],
        args=args,
    )
    trainer.train()
    torch.set_num_threads(threads)
    logs = [log for log in trainer.state.log_history if "loss" in log]
    assert len(logs) == 2
    assert len(sent) == 2
    assert all(log["grad_norm"] > 0 for log in logs)
    # The servers have the trainer's weights, before a step as after it.
    assert max(log["sampling/sampling_logp_difference/mean"] for log in logs) < 1e-4
