"""A stock SGLang server as Seer's engines, with deterministic inference on a CPU."""

from __future__ import annotations

import asyncio
import json
from functools import partial
from types import SimpleNamespace
from uuid import uuid4

import httpx
import pytest
from click.testing import CliRunner
from seer_cli import main
from seer_host.config_files import make_config
from seer_remote.connection import Connection
from seer_remote.sglang import Sglang
from seer_server import make_app
from seer_session.runtime import Runtime
from seer_testing import EngineContract
from seer_testing.families import write_family

from backends.tests.families import TOKENIZER
from seer_core.model import Sampling
from seer_core.ports.engine import ChunkJob

pytestmark = [pytest.mark.engine, pytest.mark.long]


class TestSglangServer(EngineContract):
    """It keeps the contract of engines, as two instances under two names."""

    shared = True
    patience_s = 300.0

    @pytest.fixture(autouse=True)
    def _server(self, serve_sglang, fleet_of, models):
        url = serve_sglang(models[0]).url
        ways = [SimpleNamespace(url=url), SimpleNamespace(url=url.replace("127.0.0.1", "localhost"))]
        self.make = lambda: fleet_of(*ways, dialect="sglang", poll_s=0.5)
        self.weights = str(models[1])


def test_in_front_of_it_requests_get_the_tokens_of_the_server_alone(serve_sglang, serving, models, tmp_path):
    server = serve_sglang(models[0])
    config = make_config(
        {
            "seer": {"engine": "remote", "plugins": ["divided_rollout", "context_sched"]},
            "plugin": {"divided_rollout": {"chunk_tokens": 16}},
            "engine": {"remote": {"urls": [server.url], "dialect": "sglang"}},
        },
        base_dir=tmp_path,
        origin="a test",
    )
    prompts = [[3 + (7 * i + j) % 90 for j in range(12)] for i in range(2)]
    how = {"max_new_tokens": 40, "temperature": 1.0, "top_k": 100_000, "n": 2, "sampling_seed": 5}
    native = {"input_ids": prompts, "sampling_params": how}
    openai = {"prompt": prompts, "max_tokens": 40, "top_k": 100_000, "n": 2, "seed": 5}
    serving.PATIENCE_S = 300
    found = []
    with serving.Served(make_app(partial(Runtime.from_config, config))) as served:
        for url in (served.url, server.url):
            answers = httpx.post(f"{url}/generate", json=native, timeout=300).json()
            [model] = httpx.get(f"{url}/v1/models", timeout=300).json()["data"]  # the last that was loaded
            body = openai | {"model": model["id"]}
            choices = httpx.post(f"{url}/v1/completions", json=body, timeout=300).json()["choices"]
            found.append(([each["output_ids"] for each in answers], [each["text"] for each in choices]))
    assert found[0] == found[1]
    assert found[0][0][0] == found[0][0][1] != found[0][0][2]


def test_what_a_request_draws_does_not_depend_on_those_beside_it(serve_sglang, models):
    """One without heat has all requests of its steps drawn in another order."""
    url = serve_sglang(models[0]).url

    async def write(beside):
        connection = Connection(url)
        connection.open()
        try:
            dialect = Sglang(connection)
            facts = await dialect.facts()
            assert "min_p" not in facts.controls
            ways = [Sampling(ignore_eos=True), *[Sampling(0.0, ignore_eos=True)] * beside]
            jobs = [ChunkJob("", uuid4().hex, "g", [5, 6, 7], 3, 40, each, 5, 0) for each in ways]
            chunks = [dialect.write(job.request_id, job, [5, 6, 7], 40, 5, uuid4().hex) for job in jobs]
            return (await asyncio.gather(*chunks))[0].token_ids
        finally:
            await connection.close()

    alone, beside = asyncio.run(write(0)), asyncio.run(write(3))
    assert alone == beside


TRAINED = """
[seer]
engine = "remote"
[engine.remote]
urls = {urls}
dialect = "sglang"
[plugin.divided_rollout]
chunk_tokens = 16
[rollout]
n = 3
max_tokens = 40
[train]
model = "{model}"
prompts = "prompts.jsonl"
reward = "reward.py:reward"
iterations = 2
groups = 4
[train.optimizer]
learning_rate = 1e-3
"""
REWARD = "def reward(response):\n    return float(sum(response.token_ids) % 5)\n"
WHOLE, DIVIDED = ["group_round_robin"], ["divided_rollout", "context_sched"]


def test_training_over_it_gives_the_same_weights_however_responses_run_and_with_its_experts(
    serve_sglang, tmp_path
):
    model = write_family(tmp_path / "mixture", "Qwen3-MoE", 1, TOKENIZER)
    server = serve_sglang(model, "--enable-return-routed-experts")
    asked = {"ignore_eos": True, "attachments": {"return_routed_experts": True}}
    prompts = [
        {"group_id": f"g{i}", "prompt_token_ids": [3 + (7 * i + j) % 90 for j in range(12)], **asked}
        for i in range(4)
    ]
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, prompts)))
    (tmp_path / "reward.py").write_text(REWARD)
    path = tmp_path / "train.toml"
    urls = [server.url, server.url.replace("127.0.0.1", "localhost")]
    path.write_text(TRAINED.format(urls=json.dumps(urls), model=model))
    weights, chunks = [], []
    for plugins, replay in ((WHOLE, "true"), (DIVIDED, "true"), (DIVIDED, "false")):
        server.call("/update_weights_from_disk", {"model_path": str(model), "weight_version": "first"})
        out = tmp_path / f"run-{len(weights)}"
        settings = [f"seer.plugins={json.dumps(plugins)}", f"train.replay_routing={replay}"]
        options = [part for each in settings for part in ("--set", each)]
        done = CliRunner().invoke(main, ["train", str(path), "--out", str(out), *options])
        assert done.exit_code == 0, done.output
        rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        assert max(row["dlogp_max"] for row in rows) < 1e-3
        weights.append([row["weights_sha256"] for row in rows])
        chunks.append(sum(row["chunks"] for row in rows))
    assert weights[0] == weights[1] == weights[2]  # the trainer would choose the same experts itself
    assert weights[0][0] != weights[0][1]
    assert chunks[0] == 24 < chunks[1]
