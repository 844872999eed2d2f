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
