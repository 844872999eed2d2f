"""Workers that compute nothing, for ``driver_scale``: ``python -m bench.instant_workers HOST PORT``.

One process has them all.  Each connects to the runtime as a worker on another machine does, with a secret
read from standard input, and ends every chunk at once, with as many tokens as it may have.  So what is
measured at the other end is the driver.
"""

from __future__ import annotations

import asyncio
import secrets
import sys

import numpy as np
from seer_host.frames import Frames, encode
from seer_worker.handshake import ID_BYTES, KEY_BYTES, NONCE_BYTES, PROOF_BYTES, proof, proves, tune
from seer_worker.wire import Called, Finished, FromWorker, MeasureSteps, Ready, Start, Submit, ToWorker

from seer_core.model import InstanceInfo
from seer_core.model.arrays import Logprobs, Tokens
from seer_core.ports.drafting import StepTimes
from seer_core.ports.engine import ChunkJob, ChunkOutput

__all__ = ["MAX_MODEL_TOKENS", "VOCAB_SIZE", "main"]

KV_TOKENS, BLOCK_TOKENS, MAX_RUNNING, MAX_MODEL_TOKENS, VOCAB_SIZE = 600_000, 16, 8, 131_072, 150_000
STEP_S = 0.02

TEXT = Tokens(np.random.default_rng(0).integers(0, VOCAB_SIZE, 1 << 16).tolist())
LOGPROBS = Logprobs([-0.5] * (1 << 12))


def finish(job: ChunkJob) -> Finished:
    """Return a chunk's end: its text is a part of ``TEXT``, the same for siblings, so that drafts match."""
    assert job.known_tokens is not None
    generated = len(job.token_ids) - job.prompt_tokens
    count = min(job.max_tokens, job.known_tokens - generated)
    first = generated % (len(TEXT) - count)
    output = ChunkOutput(
        job_id=job.id,
        token_ids=TEXT[first : first + count],
        logprobs=LOGPROBS[:count],
        stopped=generated + count == job.known_tokens,
        cached_tokens=0,
        prefilled_tokens=0,
        computed_tokens=count,
        preemptions=0,
        weight_version=job.weight_version,
        steps=count,
    )
    return Finished(output)


def answer(message: ToWorker) -> FromWorker | None:
    """Return what an instance that takes no time answers."""
    match message:
        case Start():
            info = InstanceInfo(message.instance_id, KV_TOKENS, BLOCK_TOKENS, MAX_RUNNING, MAX_MODEL_TOKENS)
            return Ready(info)
        case Submit(job):
            return finish(job)
        case MeasureSteps(batch, draft_tokens):
            seconds = tuple((STEP_S,) * len(draft_tokens) for _ in batch)
            return Called(step_times=StepTimes(batch, draft_tokens, seconds))
        case _:
            return None


async def serve(host: str, port: int, secret: bytes) -> None:
    """Be one worker until the runtime closes the connection."""
    reader, writer = await asyncio.open_connection(host, port)
    tune(writer.get_extra_info("socket"))
    identity, key = secret[:ID_BYTES], secret[ID_BYTES:]
    ours, theirs = secrets.token_bytes(NONCE_BYTES), await reader.readexactly(NONCE_BYTES)
    writer.write(identity + ours + proof(key, worker=True, theirs=theirs, ours=ours))
    if not proves(await reader.readexactly(PROOF_BYTES), key, worker=False, theirs=ours, ours=theirs):
        raise ConnectionError("the runtime does not prove this worker's key")
    frames: Frames[ToWorker] = Frames(ToWorker)
    while data := await reader.read(1 << 20):
        for message in frames.feed(data):
            reply = answer(message)
            if reply is not None:
                writer.write(encode(reply))
        await writer.drain()


async def main(host: str, port: int) -> None:
    """Begin a worker for each secret, until standard input ends."""
    secrets_in = asyncio.StreamReader()
    protocol = asyncio.StreamReaderProtocol(secrets_in)
    await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, sys.stdin)
    async with asyncio.TaskGroup() as workers:
        while len(secret := await secrets_in.read(ID_BYTES + KEY_BYTES)) == ID_BYTES + KEY_BYTES:
            workers.create_task(serve(host, port, secret))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2])))
