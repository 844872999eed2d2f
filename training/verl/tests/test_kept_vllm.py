"""verl's own servers and replicas, each around a real vLLM, with Seer's scheduler over them, under Ray.

It runs in Seer's environment, which has a vLLM, with verl's packages behind its own: ``make verl-test``.  On
GPUs the engines sleep between two steps, too: ``scripts/gpu-check --part 12``.  Not here: the way of weights
from a trainer's worker into an engine.
"""

import asyncio
import os
import sys
from types import SimpleNamespace

import pytest

pytest.importorskip(
    "vllm", reason="vLLM is not in verl's environment for CPUs; `make verl-test` brings it in"
)

import ray
import torch
from kept_servers import begun, ended, expect_divided_to_equal_whole
from seer_verl.servers import VerlServer
from verl.workers.rollout.llm_server import LLMServerManager

pytestmark = pytest.mark.ray
ROLLOUT = "actor_rollout_ref.rollout"
ON_GPU = bool(os.environ.get("SEER_VERL_ON_GPU"))

CONFIG = """
[engine.remote]
require = "exact"
[plugin.divided_rollout]
chunk_tokens = {}
"""


class Trainer:
    """A worker of a trainer's, which holds a logical GPU."""


@pytest.fixture(scope="module")
def cluster():
    os.environ |= {"SEER_KEYED_SAMPLING": "1", "VLLM_NO_USAGE_STATS": "1", "TRANSFORMERS_OFFLINE": "1"}
    if not ON_GPU:
        os.environ |= {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        os.environ["CUDA_VISIBLE_DEVICES"] = "0,1"  # logical ones
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # Ray's workers do not find it
    gpus = min(2, torch.cuda.device_count()) if ON_GPU else 2  # an engine each
    ray.init(num_cpus=4, num_gpus=gpus, include_dashboard=False, configure_logging=False)
    yield gpus
    ray.shutdown()


@pytest.fixture
def config_of(configure, models, tmp_path):
    """Return a function that makes verl's config: its own lines for a small vLLM, and Seer's one."""

    def make(chunk_tokens):
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
            workers=1,
        )

    return make


def test_rollouts_over_verls_own_servers_divided_and_whole_and_by_new_weights(cluster, config_of, models):
    workers = [ray.remote(num_gpus=1, num_cpus=0)(Trainer).remote() for _ in range(cluster)]
    group = SimpleNamespace(world_size=cluster, workers=workers)
    servers = LLMServerManager.create(config=config_of(8), worker_group=group)

    def load_weights(handle):
        ray.get(handle.sleep.remote())  # without a GPU verl's servers do nothing there
        ray.get(handle.wake_up.remote())
        ray.get(handle.collective_rpc.remote("reload_weights", kwargs={"weights_path": str(models[1])}))

    expect_divided_to_equal_whole(servers, config_of, load_weights)
    # A chunk that Seer ends comes back with what it has.
    tokens, reason = asyncio.run(_abort(servers.server_handles[0]))
    assert reason == "abort"
    assert len(tokens) < 200


async def _abort(handle):
    server = VerlServer(handle, "vllm")
    await server.facts()
    found = await ended(server, await begun(server, 200))
    return found["token_ids"], found["ended"]
