"""Checks of verl's own servers under Seer's scheduler, whichever engine they are around."""

import asyncio

import ray
import torch
from batches import batch, responses
from seer_remote.handles import HandleRequest
from seer_verl.manager import AgentLoopManager


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
