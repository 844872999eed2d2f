"""TRL's client and trainer, and OpenAI's client, at the address of Seer in front of two vLLM servers."""

from __future__ import annotations

import shutil

import openai
import pytest

pytestmark = [
    pytest.mark.engine,
    pytest.mark.filterwarnings("ignore"),  # TRL imports what it finds, vLLM too, which warns of much
]

PATIENCE_S = 300
PROMPTS = [[3 + (7 * i + j) % 90 for j in range(12)] for i in range(3)]


@pytest.fixture
def clients(address, pair):
    """TRL's client at the address of Seer, and at that of one server alone."""
    from trl.generation.vllm_client import VLLMClient

    return VLLMClient(base_url=address), VLLMClient(base_url=pair[0].url)


def flat(logprobs):
    """Return the log-probs of all responses and places as one list."""
    return [each for response in logprobs for place in response for each in place]


def test_trl_s_client_gets_the_answers_of_a_server_alone(clients, models):
    client, alone = clients
    assert client.model == alone.model == str(models[0])
    assert client.get_world_size() == 2
    assert client.get_server_info()["model_config"] == alone.get_server_info()["model_config"]
    for more in ({"n": 2}, {"top_p": 0.8, "top_k": 20}, {"structured_outputs_regex": "(w5|w6|w7)+"}):
        asked = more | {"max_tokens": 40, "generation_kwargs": {"seed": 5}}
        found, wanted = (each.generate(PROMPTS, **asked) for each in clients)
        assert flat(found.pop("logprobs")) == pytest.approx(flat(wanted.pop("logprobs")), abs=1e-4)
        assert found == wanted
    client.reset_prefix_cache()


def test_openai_s_client_gets_the_answers_of_a_server_alone(address, pair, models):
    token, _, place = address.removeprefix("http://trl:").partition("@")
    found = []
    for url, key in ((f"http://{place}", token), (pair[1].url, "none")):
        with openai.OpenAI(base_url=f"{url}/v1", api_key=key, timeout=PATIENCE_S) as client:
            answer = client.completions.create(
                model=str(models[0]),
                prompt=PROMPTS,
                n=2,
                max_tokens=40,
                seed=5,
                extra_body={"return_token_ids": True},
            )
            found.append([(each.index, each.token_ids, each.text) for each in answer.choices])
    assert found[0] == found[1]


def test_trl_trains_in_server_mode_on_weights_that_reach_both_servers(address, models, tmp_path, monkeypatch):
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
        vllm_server_base_url=address,
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
