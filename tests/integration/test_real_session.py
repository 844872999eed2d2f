"""A session on real vLLM engines: what a trainer without an event loop does."""

import json
import threading
from pathlib import Path

import pytest
from seer_session import Session, load_config

from tests.support.installed import skip_without

EXAMPLE = Path(__file__).parents[2] / "examples" / "tiny_reasoner"

pytestmark = pytest.mark.engine
skip_without("vllm", reason="vLLM is not installed: `make setup` installs it")


def test_a_trainer_keeps_real_engines_between_steps_from_two_threads():
    records = [json.loads(line) for line in (EXAMPLE / "prompts.jsonl").read_text("utf-8").splitlines()[:2]]
    records = [{**record, "n": 2, "max_tokens": 48} for record in records]

    def step(session, results):
        results.append(
            {each.request_id: list(each.token_ids) for each in session.stream(records, iteration=0)}
        )

    results = []
    # One instance without drafts and pool: enough of an engine for a session.
    overrides = ["engine.vllm.instances=1", "engine.vllm.start_timeout_s=600", "seer.kv_pool=none"]
    config = load_config(EXAMPLE / "demo.toml", overrides, without=["grouped_spec"])
    with Session(config) as session:
        step(session, results)
        assert session.update_weights(EXAMPLE / "weights") == 1
        thread = threading.Thread(target=step, args=[session, results])
        thread.start()
        thread.join(300)
        assert session.result.summary.weight_version == 1
    here, there = results
    assert len(here) == 4
    assert here == there  # the same weights, seeds and iteration
