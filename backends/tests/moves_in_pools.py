"""Responses that move between two instances of any engine, which share a pool."""

from __future__ import annotations

import asyncio

import numpy as np
from msgspec import structs

from seer_core.model import Sampling

GOING_ON = Sampling(1.0, ignore_eos=True)

__all__ = ["expect_blocks_in_the_pool_while_their_chunk_runs", "moved_at_random"]


def moved_at_random(pair, prompts, sampling, tokens):
    """Return the responses to all prompts, in chunks of any length, each on any of the instances."""
    random = np.random.default_rng(3)

    async def respond(prompt, seed):
        response = []
        while len(response) < tokens:
            here = pair[random.integers(2)]
            wanted = min(int(random.integers(10, 90)), tokens - len(response))
            [output] = await here.chunks([here.job([*prompt, *response], wanted, seed, sampling)])
            response += output.token_ids
            if output.stopped:
                break
        return response

    async def respond_all():
        return await asyncio.gather(*(respond(prompt, seed) for seed, prompt in enumerate(prompts)))

    return pair[0].run(respond_all())


def expect_blocks_in_the_pool_while_their_chunk_runs(pair, pool, prompt, respond, block, least_bytes):
    """Write on the one instance until the pool has ``least_bytes``, and 40 tokens more on the other.

    ``respond(tokens)`` is the response to ``prompt`` by seed 0 at temperature 1 with ``ignore_eos``; the pool
    is empty.
    """
    a, b = pair
    job = structs.replace(a.job(prompt, 900, 0, GOING_ON), last=False, streams=True)
    a.engine.submit(job)
    a.run(a.until(lambda: pool.stats().used_bytes >= least_bytes))
    a.engine.end_chunk(job.id)
    a.run(a.until(lambda: job.id in a.answers))
    output = a.outputs[job.id]
    assert len(output.token_ids) < job.max_tokens
    text = [*prompt, *output.token_ids]
    [then] = b.run(b.chunks([b.job(text, 40, 0, GOING_ON)]))
    assert output.token_ids + then.token_ids == respond(len(output.token_ids) + 40)
    assert then.pool_tokens == (len(text) - 1) // block * block
