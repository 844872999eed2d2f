"""The example of TRL's trainer, on real vLLM engines under two schedulers."""

import hashlib
import importlib.util
from pathlib import Path

import pytest
from seer_session import Session, load_config

from tests.support.installed import skip_without

EXAMPLE = Path(__file__).parents[2] / "examples" / "trl"

pytestmark = [
    pytest.mark.engine,
    pytest.mark.filterwarnings("ignore"),  # TRL imports what it finds, vLLM too, which warns of much
]
skip_without("vllm", reason="vLLM is not installed: `make setup` installs it")


class Texts:
    """Keeps the tokens of each response."""

    def __init__(self):
        self.found = {}

    def observe(self, now, event, commands):
        pass

    def completed(self, now, completion):
        self.found[completion.request_id] = completion.token_ids.tolist()


@pytest.fixture
def train(tmp_path):
    """Return a function that runs the example and returns tokens, a digest of the weights, and logs."""
    import torch

    spec = importlib.util.spec_from_file_location("train_with_trl", EXAMPLE / "train.py")
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)

    def run(session, texts, **settings):
        texts.found.clear()
        sizes = {"steps": 2, "groups": 3, "responses": 4, "max_tokens": 128}
        trainer = example.train(session, tmp_path, **sizes, **settings)
        digest = hashlib.sha256()
        for tensor in trainer.model.state_dict().values():
            digest.update(tensor.numpy().tobytes())
        logs = [log for log in trainer.state.log_history if "loss" in log]
        return dict(texts.found), digest.hexdigest(), logs

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield run
    torch.set_num_threads(threads)


def test_trl_trains_the_same_under_another_scheduler(train):
    # Engines' log-probs move by rounding with the batch, so for bits they must not enter the loss.
    exact = {"vllm_importance_sampling_correction": False}
    texts = Texts()
    with Session(EXAMPLE / "rollout.toml", [texts]) as session:
        tokens, weights, logs = train(session, texts, **exact)
        chunks = session.result.summary.chunks
        _, _, corrected = train(session, texts)
    assert len(tokens) == 24
    assert len({log["grad_norm"] for log in logs}) == 2
    # The engines serve the trainer's weights, in its precision, before a step as after it.
    assert max(log["sampling/sampling_logp_difference/mean"] for log in corrected) < 1e-5
    baseline = ["seer.plugins=['group_round_robin']", "seer.kv_pool=none", "engine.vllm.instances=1"]
    with Session(load_config(EXAMPLE / "rollout.toml", baseline), [texts]) as session:
        assert train(session, texts, **exact)[:2] == (tokens, weights)
        assert session.result.summary.chunks < chunks


def test_trl_shows_its_model_and_the_engines_the_same_images(tmp_path, monkeypatch):
    import io

    import torch
    from datasets import Dataset
    from PIL import Image
    from seer_trl import SeerRollout
    from transformers import AutoProcessor
    from trl import GRPOConfig, GRPOTrainer

    example = EXAMPLE.parent / "tiny_vision"
    monkeypatch.syspath_prepend(str(example))
    squares = importlib.import_module("squares")
    pictures = [
        {
            "prompt": [{"role": "user", "content": squares.QUESTION}],
            "image": Image.open(io.BytesIO(row["images"][0])),
            "answer": row["metadata"]["answer"],
        }
        for row in squares.prompts(0, 4, 0)
    ]

    def reward(completions, answer, **_):
        said = [each[0]["content"].rpartition("=")[2].replace(" ", "") for each in completions]
        return [float(one == str(other)) for one, other in zip(said, answer, strict=True)]

    args = GRPOConfig(
        str(tmp_path),
        per_device_train_batch_size=16,
        num_generations=4,
        max_steps=2,
        max_completion_length=24,
        learning_rate=1e-3,
        report_to=[],
        use_cpu=True,
        bf16=False,
        logging_steps=1,
    )
    texts, threads = Texts(), torch.get_num_threads()
    torch.set_num_threads(1)
    model = str(example / "weights")
    config = load_config(EXAMPLE / "rollout.toml", [f"engine.vllm.model={model}"])
    with Session(config, [texts]) as session:
        trainer = GRPOTrainer(
            model,
            reward,
            args=args,
            train_dataset=Dataset.from_list(pictures),
            rollout_func=SeerRollout(session, args),
            processing_class=AutoProcessor.from_pretrained(model),
        )
        trainer.train()
    torch.set_num_threads(threads)
    logs = [log for log in trainer.state.log_history if "loss" in log]
    assert len(texts.found) == 32
    assert len({log["grad_norm"] for log in logs}) == 2
    assert max(log["sampling/sampling_logp_difference/max"] for log in logs) < 1e-4
    assert max(log["rewards/reward/mean"] for log in logs) > 0.2
