"""verl's own servers and replicas, each around a real vLLM, with Seer's scheduler over them, under Ray.

It runs in Seer's environment, which has a vLLM, with verl's packages behind its own: ``make verl-test``.  On
GPUs the engines sleep between two steps, too: ``scripts/gpu-check --part 12``.  Not here: the way of weights
from a trainer's worker into an engine.
"""

import asyncio
import os
import sys

import pytest

pytest.importorskip(
    "vllm", reason="vLLM is not in verl's environment for CPUs; `make verl-test` brings it in"
)

import ray
import torch
from kept_servers import begun, cluster_of, ended, expect_divided_to_equal_whole, rows_of, served
from peft import LoraConfig, get_peft_model
from PIL import Image
from seer_verl.servers import VerlServer
from transformers import AutoModelForCausalLM
from verl.workers.rollout.vllm_rollout.utils import VLLM_LORA_INT_ID, VLLM_LORA_NAME
from vllm.lora.request import LoRARequest

from conftest import ROOT

pytestmark = pytest.mark.ray
ROLLOUT = "actor_rollout_ref.rollout"
ON_GPU = bool(os.environ.get("SEER_VERL_ON_GPU"))

SEEING = ROOT / "examples/tiny_vision/weights"
SEEN = [1, *[4] * 9, 9]
"""The places of a picture among tokens of text."""
PROMPT = list(range(3, 15))

CONFIG = """
[engine.remote]
require = "exact"
[plugin.divided_rollout]
chunk_tokens = {}
"""


@pytest.fixture(scope="module")
def cluster():
    os.environ |= {"SEER_KEYED_SAMPLING": "1", "VLLM_NO_USAGE_STATS": "1", "TRANSFORMERS_OFFLINE": "1"}
    if not ON_GPU:
        os.environ |= {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        os.environ["CUDA_VISIBLE_DEVICES"] = "0,1"  # logical ones
    with cluster_of(sys.modules[__name__], on_gpu=ON_GPU) as gpus:
        yield gpus


@pytest.fixture
def config_of(configure, models, tmp_path):
    """Return a function that makes verl's config: its own lines for a small vLLM, and Seer's one."""

    def make(chunk_tokens, *more):
        path = tmp_path / f"seer-{chunk_tokens}.toml"
        path.write_text(CONFIG.format(chunk_tokens), "utf-8")
        return configure(
            None,
            f"{ROLLOUT}.name=vllm",
            f"{ROLLOUT}.engine_kwargs.seer.config={path}",
            f"{ROLLOUT}.engine_kwargs.vllm.kv_cache_memory_bytes=33554432",
            f"{ROLLOUT}.engine_kwargs.vllm.distributed_executor_backend=uni",
            f"{ROLLOUT}.engine_kwargs.vllm.block_size=32",
            f"{ROLLOUT}.logprobs_mode=raw_logprobs",  # SEER_KEYED_SAMPLING has no others
            f"{ROLLOUT}.dtype=float32",
            f"{ROLLOUT}.load_format=auto",
            f"{ROLLOUT}.enforce_eager=True",
            f"{ROLLOUT}.free_cache_engine={ON_GPU}",
            f"{ROLLOUT}.enable_sleep_mode={ON_GPU}",
            f"{ROLLOUT}.max_model_len=256",
            f"{ROLLOUT}.max_num_seqs=16",
            f"{ROLLOUT}.max_num_batched_tokens=256",
            f"{ROLLOUT}.response_length=40",
            f"actor_rollout_ref.model.path={models[0]}",
            *more,
            workers=1,
        )

    return make


def test_rollouts_over_verls_own_servers_divided_and_whole_and_by_new_weights(cluster, config_of, models):
    def load_weights(handle):
        ray.get(handle.sleep.remote())  # without a GPU verl's servers do nothing there
        ray.get(handle.wake_up.remote())
        ray.get(handle.collective_rpc.remote("reload_weights", kwargs={"weights_path": str(models[1])}))

    with served(config_of(8), cluster) as servers:
        expect_divided_to_equal_whole(servers, config_of, load_weights)
        # A chunk that Seer ends comes back with what it has.
        tokens, reason = asyncio.run(_abort(servers.server_handles[0]))
    assert reason == "abort"
    assert len(tokens) < 200


def test_an_image_reaches_each_chunk(cluster, config_of):
    model = (f"actor_rollout_ref.model.path={SEEING}", f"{ROLLOUT}.ignore_eos=True")
    divided, whole = (config_of(each, *model) for each in (8, 512))
    white, black = ({"image_data": [Image.new("RGB", (84, 84), each)]} for each in ("white", "black"))
    with served(divided, cluster) as servers:
        (found, other), chunks = rows_of(divided, servers, white, black, prompt_ids=SEEN)
        (expected,), whole_chunks = rows_of(whole, servers, white, prompt_ids=SEEN)
    assert (chunks, whole_chunks) == (3 * 5, 3)
    expect_equal(found, expected)
    assert tokens(found) != tokens(other)


def test_an_adapter_beside_the_model_answers_for_each_chunk(cluster, config_of, models, tmp_path):
    model = ("actor_rollout_ref.model.lora_rank=8", f"{ROLLOUT}.ignore_eos=True")
    divided, whole = (config_of(each, *model) for each in (8, 512))
    adapter = LoRARequest(VLLM_LORA_NAME, VLLM_LORA_INT_ID, str(tmp_path / "adapter"))
    write_adapter(models[0], adapter.lora_path)
    with served(divided, cluster) as servers:
        (before,), _ = rows_of(divided, servers, {}, prompt_ids=PROMPT)
        for handle in servers.server_handles:
            ray.get(handle.__ray_call__.remote(add_adapter, adapter))
            ray.get(handle.clear_kv_cache.remote())
            ray.get(handle.set_global_steps.remote(1))
        (found,), chunks = rows_of(divided, servers, {}, prompt_ids=PROMPT)
        (expected,), whole_chunks = rows_of(whole, servers, {}, prompt_ids=PROMPT)
    assert (chunks, whole_chunks) == (3 * 5, 3)
    expect_equal(found, expected)
    assert tokens(found) != tokens(before)


def expect_equal(rows, others):
    assert tokens(rows) == tokens(others)
    scores = ([each.log_probs for each in found] for found in (rows, others))
    torch.testing.assert_close(*scores, rtol=1e-3, atol=1e-4)


def tokens(rows):
    return [each.token_ids for each in rows]


def add_adapter(server, adapter):
    """Run in a server, in a thread beside its engine's loop: add an adapter."""
    loop = server.engine.output_handler.get_loop()
    asyncio.run_coroutine_threadsafe(server.engine.add_lora(adapter), loop).result()


def write_adapter(model, folder):
    """Write an adapter of a model, of random tensors, as PEFT does."""
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    config = LoraConfig(r=8, lora_alpha=64, target_modules=["q_proj", "v_proj", "down_proj"])
    adapted = get_peft_model(model, config)
    for name, weight in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.1)
    adapted.save_pretrained(folder)


async def _abort(handle):
    server = VerlServer(handle, "vllm")
    await server.facts()
    found = await ended(server, await begun(server, 200))
    return found["token_ids"], found["ended"]
