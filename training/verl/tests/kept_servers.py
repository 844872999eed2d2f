"""Checks of verl's own servers under Seer's scheduler, whichever engine they are around."""

import asyncio
import sys
import time
from contextlib import contextmanager
from types import SimpleNamespace

import ray
import torch
from batches import batch, responses
from seer_remote.handles import HandleRequest
from seer_verl.kept_client import KeptClient
from seer_verl.manager import AgentLoopManager
from seer_verl.rows import ROW, BatchRow
from verl.workers.rollout.llm_server import LLMServerManager


class Trainer:
    """A worker of a trainer's, which holds a logical GPU."""


@contextmanager
def cluster_of(test, *, on_gpu):
    """Start a Ray for a module of tests, and end it; yield its number of GPUs, two logical ones on a CPU."""
    for module in (sys.modules[__name__], test):  # Ray's workers do not find them
        ray.cloudpickle.register_pickle_by_value(module)
    gpus = min(2, torch.cuda.device_count()) if on_gpu else 2
    ray.init(num_cpus=4, num_gpus=gpus, include_dashboard=False, configure_logging=False)
    yield gpus
    ray.shutdown()


@contextmanager
def served(config, count):
    """Start so many of verl's servers, and end them with their engines."""
    workers = [ray.remote(num_gpus=1, num_cpus=0)(Trainer).remote() for _ in range(count)]
    group = SimpleNamespace(world_size=count, workers=workers)
    servers = LLMServerManager.create(config=config, worker_group=group)
    try:
        yield servers
    finally:
        for handle in servers.server_handles:
            ray.get(handle.__ray_call__.remote(end_engine))
        for actor in [*servers.server_handles, *workers]:
            ray.kill(actor)
        while any("_server_" in name for name in ray.util.list_named_actors()):
            time.sleep(0.05)  # the next have the same names


def end_engine(server):
    """Run in a server: end vLLM's processes, as SGLang's end themselves once the server is killed."""
    if hasattr(server, "engine"):
        server.engine.shutdown()


def rows_of(config, servers, *passes, **asked):
    """Return three rows of one prompt for each of ``passes``, asked for as agent loops do, and the figures.

    ``passes`` are further arguments of each request.
    """
    client = KeptClient(config, servers.get_client())

    async def row(batch, index, more):
        ROW.set(BatchRow("0-0", index, 0, batch=batch))
        return await client.generate("a", sampling_params={"logprobs": True}, **asked, **more)

    async def rows(more):
        async with client.reserved([{"group_id": "0-0", "n": 3}], 0) as batch:
            tasks = [asyncio.create_task(row(batch, index, more)) for index in range(3)]
            return await asyncio.gather(*tasks)

    found = [asyncio.run(rows(more)) for more in passes]
    assert not any(each.extra_fields["seer_fallback"] for output in found for each in output)
    figures = ray.get(client.scheduler.metrics.remote())
    ray.kill(client.scheduler)
    assert figures["seer/exactness"] == 2
    return found, figures["seer/chunks"]


def expect_divided_to_equal_whole(servers, config_of, load_weights):
    """Compare rollouts in chunks and without, before and after ``load_weights`` of each server's handle."""
    divided, whole = (
        AgentLoopManager.create(config=config_of(each), llm_client=servers.get_client()) for each in (8, 512)
    )
    found = [manager.generate_sequences(batch(groups=3, step=1)) for manager in (divided, whole)]
    assert tokens_of(found[0]) == tokens_of(found[1])
    scores = [each.batch["rollout_log_probs"] for each in found]
    torch.testing.assert_close(*scores, rtol=1e-3, atol=1e-4)
    figures = ray.get(divided.llm_client.scheduler.metrics.remote())
    assert figures["seer/exactness"] == 2
    assert figures["seer/chunks"] > figures["seer/requests"] == 9
    # New weights, as a trainer's worker leaves them: the servers say their step, and Seer looks at them.
    for handle in servers.server_handles:
        load_weights(handle)
        ray.get(handle.clear_kv_cache.remote())
        ray.get(handle.set_global_steps.remote(1))
    later = [manager.generate_sequences(batch(groups=3, step=1)) for manager in (divided, whole)]
    assert tokens_of(later[0]) == tokens_of(later[1]) != tokens_of(found[0])
    assert set(later[0].non_tensor_batch["min_global_steps"]) == {1}
    assert not any(later[0].non_tensor_batch["seer_fallback"])


async def begun(server, most):
    """Begin a request that is ``mine``; return its task once the server runs it, or it has ended."""
    running = asyncio.ensure_future(server.generate(request([5, 6, 7], most)))
    while not ((await server.load())["running"] or running.done()):
        await asyncio.sleep(0)
    return running


async def ended(server, running):
    """End the request that is ``mine``, and return what it has."""
    while not running.done():
        await server.abort(["mine"])
        await asyncio.sleep(0.01)
    return await running


def request(tokens, most):
    return HandleRequest("mine", list(tokens), most, 1, {"ignore_eos": True}, "", 3, {})


def tokens_of(output):
    return [each for each, _ in responses(output)]
