"""verl's own servers and replicas around a real SGLang for CPUs, with Seer's scheduler over them, under Ray.

It runs in SGLang's environment, with verl's packages behind its own: ``make verl-test``.  On GPUs the engines
give back the memory of their KV between two steps, too: ``scripts/gpu-check --part 12``.  Not here: the way
of weights from a trainer's worker into an engine.
"""

import asyncio
import json
import os
import sys
import urllib.request

import pytest

pytest.importorskip(
    "sglang", reason="SGLang is not in verl's environment for CPUs; `make verl-test` brings it in"
)

import numpy as np
import ray
import torch
from kept_servers import begun, cluster_of, ended, expect_divided_to_equal_whole, request, rows_of, served
from seer_verl.servers import VerlServer

pytestmark = pytest.mark.ray
ROLLOUT = "actor_rollout_ref.rollout"
ON_GPU = bool(os.environ.get("SEER_VERL_ON_GPU"))
KV_TOKENS = 4096

CONFIG = """
[engine.remote]
require = "exact"
[plugin.divided_rollout]
chunk_tokens = {}
"""

ENGINE = {"enable_deterministic_inference": True, "max_total_tokens": KV_TOKENS}
ON_CPU = {
    "attention_backend": "torch_native",
    "device": "cpu",
    "disable_overlap_schedule": True,
    "enable_memory_saver": False,
    "sampling_backend": "pytorch",
}


@pytest.fixture(scope="module")
def cluster():
    os.environ["TRANSFORMERS_OFFLINE"] = "1"
    if not ON_GPU:
        os.environ |= {
            "CUDA_VISIBLE_DEVICES": "0,1",  # logical ones
            "OMP_NUM_THREADS": "1",
            "SGLANG_USE_CPU_ENGINE": "1",
            "TORCHDYNAMO_DISABLE": "1",
        }
    with cluster_of(sys.modules[__name__], on_gpu=ON_GPU) as gpus:
        yield gpus


@pytest.fixture(scope="module")
def config_of(configure, models, tmp_path_factory):
    """Return a function that makes verl's config: its own lines for a small SGLang, and Seer's one."""

    engine = ENGINE | ({} if ON_GPU else ON_CPU)

    def make(chunk_tokens, *more):
        path = tmp_path_factory.mktemp("config") / "seer.toml"
        path.write_text(CONFIG.format(chunk_tokens), "utf-8")
        return configure(
            None,
            f"{ROLLOUT}.name=sglang",
            f"{ROLLOUT}.engine_kwargs.seer.config={path}",
            *(f"{ROLLOUT}.engine_kwargs.sglang.{name}={value}" for name, value in engine.items()),
            f"{ROLLOUT}.dtype={'bfloat16' if ON_GPU else 'float32'}",
            f"{ROLLOUT}.load_format=auto",
            f"{ROLLOUT}.enforce_eager=True",
            f"{ROLLOUT}.free_cache_engine={ON_GPU}",
            f"{ROLLOUT}.max_model_len=512",
            f"{ROLLOUT}.max_num_seqs=16",
            f"{ROLLOUT}.response_length=40",
            f"actor_rollout_ref.model.path={models[0]}",
            *more,
            workers=1,
        )

    return make


@pytest.fixture(scope="class")
def servers(cluster, config_of):
    """Return verl's manager of two servers, or of one on a single GPU."""
    with served(config_of(8), cluster) as found:
        yield found


class TestServers:
    def test_chunks_on_one_server_and_the_other_have_the_tokens_of_a_whole_response(self, servers):
        async def write():
            both = [VerlServer(handle, "sglang") for handle in servers.server_handles]
            facts = [await each.facts() for each in both]
            whole = await both[0].generate(request([5, 6, 7], 40))
            text, scores = [5, 6, 7], []
            for number in range(5):
                chunk = await both[number % len(both)].generate(request(text, 8))
                assert (chunk["ended"], len(chunk["token_ids"])) == ("length", 8)
                text += chunk["token_ids"]
                scores += chunk["logprobs"]
            return facts, whole, text[3:], scores

        facts, whole, tokens, scores = asyncio.run(write())
        for each in facts:
            assert (each["kv_tokens"], each["block_tokens"], each["max_running"]) == (KV_TOKENS, 1, 16)
            assert (each["max_model_tokens"], each["vocab_size"]) == (511, 96)
            assert "min_p" not in each["controls"]  # with it SGLang's deterministic inference would end
        assert (whole["ended"], whole["token_ids"]) == ("length", tokens)
        assert len(set(tokens)) > 10
        torch.testing.assert_close(whole["logprobs"], scores, rtol=1e-3, atol=1e-4)

    def test_rollouts_are_the_same_divided_and_whole_before_and_after_new_weights(
        self, servers, config_of, models
    ):
        expect_divided_to_equal_whole(servers, config_of, lambda handle: load_weights(handle, models[1]))

    def test_a_chunk_that_is_ended_comes_back_with_its_tokens_also_where_the_server_was_paused(self, servers):
        """SGLang sends the end of a request once, also while it is paused and its scheduler has none."""
        handle = servers.server_handles[0]

        async def write(paused):
            server = VerlServer(handle, "sglang")
            if paused:
                await handle.abort_all_requests.remote()
            running = await begun(server, 480)
            assert (await server.load())["paused"] == paused
            if paused:
                await server.abort(["mine"])
                await handle.resume_generation.remote()
            return await ended(server, running)

        for paused in (False, True):
            found = asyncio.run(write(paused))
            assert found["ended"] == "abort"
            assert len(found["token_ids"]) == len(found["logprobs"]) < 480


def test_the_experts_of_chunks_are_joined_to_those_of_whole_responses(cluster, config_of, mixture):
    more = [f"{ROLLOUT}.{each}" for each in ("ignore_eos=True", "skip_tokenizer_init=False")]
    more += [f"actor_rollout_ref.model.path={mixture}", f"{ROLLOUT}.enable_rollout_routing_replay=True"]
    divided, whole = (config_of(each, *more) for each in (8, 512))
    prompt = list(range(3, 15))
    with served(divided, cluster) as servers:
        (rows,), chunks = rows_of(divided, servers, {}, prompt_ids=prompt)
        (expected,), whole_chunks = rows_of(whole, servers, {}, prompt_ids=prompt)
    assert (chunks, whole_chunks) == (3 * 5, 3)
    for row, other in zip(rows, expected, strict=True):
        assert row.token_ids == other.token_ids
        assert len(row.routed_experts) == len(prompt) + len(row.token_ids) - 1
        experts = [np.sort(each.routed_experts, axis=2) for each in (row, other)]
        assert (experts[0] == experts[1]).all()
        assert len(np.unique(experts[0])) > 2  # not what an empty memory has


def load_weights(handle, model):
    ray.get(handle.release_kv_cache.remote())  # without a GPU verl's servers do nothing there
    ray.get(handle.resume_kv_cache.remote())
    host, port = ray.get(handle.get_server_address.remote())
    asked = urllib.request.Request(
        f"http://{host}:{port}/update_weights_from_disk",
        json.dumps({"model_path": str(model)}).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(asked, timeout=120) as answer:
        assert json.load(answer)["success"]
