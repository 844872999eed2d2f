"""Where does one driver saturate: CPU, bytes and memory, over the number of instances?

A real runtime rolls out over instances that end every chunk at once, so the driver is all that works.  The
instances connect over TCP with proofs, as those on other machines do; one other process has all of them.
Lengths are log-normal and alike within a group.  The sent bytes are those of the chunks with their whole
context, and of what drafts need: with drafts, each finished chunk's text goes to the other instances that
have siblings of it.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import multiprocessing
import random
import secrets
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from time import process_time

import numpy as np
import psutil
import structlog
from seer_host.config_files import load_config
from seer_host.frames import Frames, encode
from seer_session.assembly import fill_slots
from seer_session.runtime import Runtime
from seer_worker.client.process_client import Launch, ProcessClient
from seer_worker.client.worker_port import WorkerPort
from seer_worker.handshake import ID_BYTES, KEY_BYTES, NONCE_BYTES, PROOF_BYTES, proof, proves, tune
from seer_worker.wire import (
    Called,
    Channel,
    Finished,
    FromWorker,
    MeasureSteps,
    Ready,
    Start,
    Submit,
    ToWorker,
)

from bench.harness import EXAMPLE, ROOT, Row, cell, markdown, spread_of, turned
from seer_core.errors import EngineError
from seer_core.model import InstanceInfo, PromptGroup
from seer_core.model.arrays import Logprobs, Tokens
from seer_core.plugins.slots import Assembly
from seer_core.ports.clock import RealClock
from seer_core.ports.drafting import StepTimes
from seer_core.ports.engine import ChunkJob, ChunkOutput, ModelInfo, PlainFleet

DEPENDS_ON = ("seer_core", "backends/worker", "plugins")
ROUNDS = 3

PLUGINS = {
    "scheduling": ("divided_rollout", "context_sched"),
    "with drafts": ("divided_rollout", "context_sched", "grouped_spec"),
}
PROMPT_TOKENS, GROUP_SIZE, CHUNK_TOKENS = 512, 8, 2048
LOG_MEAN, LOG_SIGMA_GROUP, LOG_SIGMA_REQUEST, MAX_TOKENS = 8.5, 0.8, 0.4, 40_960
LIMIT_S = 3600.0
CONNECTING = 32
"""How many instances connect at a time; all of them together would take the one process too long."""
TOKENS_PER_S = 2000.0
"""What an instance writes per second in the answer: 64 requests, at 31 tokens per second each."""

KV_TOKENS, BLOCK_TOKENS, MAX_RUNNING, MAX_MODEL_TOKENS, VOCAB_SIZE = 600_000, 16, 8, 131_072, 150_000
STEP_S = 0.02

TEXT = Tokens(np.random.default_rng(0).integers(0, VOCAB_SIZE, 1 << 16).tolist())
LOGPROBS = Logprobs([-0.5] * (1 << 12))


class CountingWriter:
    """A stream's writer that counts the bytes sent."""

    sent_bytes = 0

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        self.close = writer.close

    def write(self, data: bytes) -> None:
        """Send data, and count its bytes."""
        CountingWriter.sent_bytes += len(data)
        self._writer.write(data)


class InstantWorker(Channel):
    """One of the instances of the other process."""

    scratch = log = ""

    async def end(self, grace_s: float = 0.0) -> str:
        """Close the connection, on which it ends."""
        self.close()
        return "ended"

    def last_words(self) -> str:
        """Return nothing: it has no log."""
        return ""

    def discard_log(self) -> None:
        """Do nothing."""


class InstantLauncher:
    """Has the other process, and a port for its connections."""

    def __init__(self) -> None:
        self.workers: list[InstantWorker] = []
        self._port = WorkerPort("127.0.0.1")
        self._connecting = asyncio.Semaphore(CONNECTING)
        command = [sys.executable, "-m", "bench.driver_scale", self._port.host, str(self._port.port)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, cwd=ROOT)

    async def find_place(self, name: str, waiting: Callable[[str], None]) -> None:
        """Return at once."""

    async def launch(
        self, name: str, interpreter: str, environment: Mapping[str, str], log: Path, keep_log: bool
    ) -> InstantWorker:
        """Let the process begin one more connection."""
        if self.process.poll() is not None:
            raise EngineError("the process of the instant workers has ended")
        await self._port.open()
        expected = self._port.expect()
        assert self.process.stdin is not None
        async with self._connecting:
            self.process.stdin.write(expected.secret)
            self.process.stdin.flush()
            reader, writer = await expected.streams
        self.workers.append(InstantWorker(reader, CountingWriter(writer)))  # type: ignore[arg-type]
        return self.workers[-1]

    def close(self) -> None:
        """End the process."""
        self._port.close()
        self.process.terminate()
        self.process.wait()


def make_groups(requests: int, seed: int = 0) -> Iterator[PromptGroup]:
    """Yield groups whose lengths are drawn."""
    drawn = random.Random(seed)
    for number in range(requests // GROUP_SIZE):
        center = drawn.gauss(LOG_MEAN, LOG_SIGMA_GROUP)
        lengths = (round(drawn.lognormvariate(center, LOG_SIGMA_REQUEST)) for _ in range(GROUP_SIZE))
        yield PromptGroup(
            id=f"group-{number}",
            prompt_token_ids=tuple(drawn.choices(range(VOCAB_SIZE), k=PROMPT_TOKENS)),
            n=GROUP_SIZE,
            max_tokens=MAX_TOKENS,
            known_lengths=tuple(max(1, min(MAX_TOKENS, each)) for each in lengths),
        )


def rolled_out(instances: int, requests: int, plugins: str) -> Row:
    """Roll out in this process; return what that took of its CPU, memory and wires."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    return asyncio.run(_rolled_out(instances, requests, plugins))


async def _rolled_out(instances: int, requests: int, plugins: str) -> Row:
    launcher = InstantLauncher()
    launch = Launch(
        instance="",
        settings={},
        environment={},
        launcher=launcher,
        log_dir=Path(),
        start_timeout_s=LIMIT_S,
        stop_timeout_s=1.0,
        control_timeout_s=LIMIT_S,
        silence_timeout_s=LIMIT_S,
    )
    engines = [ProcessClient(f"instant-{number}", launch) for number in range(instances)]
    config = load_config(EXAMPLE / "demo.toml", [f"plugin.divided_rollout.chunk_tokens={CHUNK_TOKENS}"])
    strategies = fill_slots(config.with_plugins(PLUGINS[plugins]))
    fleet = PlainFleet(engines, RealClock(), ModelInfo(VOCAB_SIZE, MAX_MODEL_TOKENS), None)
    groups = list(make_groups(requests))
    own = psutil.Process()
    async with Runtime(Assembly(fleet, strategies), config.seer) as runtime:
        gc.collect()
        before, sent = own.memory_info().rss, CountingWriter.sent_bytes
        received = sum(each.received_bytes for each in launcher.workers)
        began_s = process_time()
        rollout = runtime.rollout(groups, keep=False)
        queued = own.memory_info().rss - before
        async for _ in rollout:
            pass
        cpu_s = process_time() - began_s
        summary = (await rollout.wait()).summary
        received = sum(each.received_bytes for each in launcher.workers) - received
        sent = CountingWriter.sent_bytes - sent
    launcher.close()
    return {
        "tokens": summary.tokens,
        "chunks": summary.chunks,
        "cpu_us_per_chunk": cpu_s / summary.chunks * 1e6,
        "cpu_us_per_token": cpu_s / summary.tokens * 1e6,
        "sent_bytes_per_chunk": sent / summary.chunks,
        "received_bytes_per_chunk": received / summary.chunks,
        "queued_bytes_per_request": queued / requests,
    }


def options(parser: argparse.ArgumentParser) -> None:
    """Add the case's own options."""
    parser.add_argument("--instances", type=int, nargs="+", default=[10, 100, 1000])
    parser.add_argument("--requests", type=int, default=16_000, help="(default 16000)")


def run(options: argparse.Namespace) -> list[Row]:
    """Roll out in every round under each number of instances and set of plug-ins, each in a new process."""
    arms = [(instances, plugins) for instances in options.instances for plugins in PLUGINS]
    found: dict[tuple[int, str], list[Row]] = {arm: [] for arm in arms}
    for number, (instances, plugins) in turned(arms, options.rounds):
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
            row = process.submit(rolled_out, instances, options.requests, plugins).result()
        found[instances, plugins].append(row)
        print(
            f"round {number + 1}, {instances} instances, {plugins}:"
            f" {row['cpu_us_per_chunk']:.0f} us per chunk",
            file=sys.stderr,
            flush=True,
        )
    return [
        {
            "instances": instances,
            "plugins": plugins,
            "requests": options.requests,
            **{name: spread_of(row[name] for row in rows) for name in rows[0]},
        }
        for (instances, plugins), rows in found.items()
    ]


def table(rows: Sequence[Row]) -> str:
    """Return one line for each number of instances and set of plug-ins."""
    columns = ["instances", "plug-ins", "tokens per chunk", "CPU per chunk, us", "CPU per token, us"]
    columns += ["sent per chunk, KB", "received per chunk, KB", "tokens per second of CPU"]
    lines = [
        [
            f"{row['instances']:,}",
            row["plugins"],
            f"{row['tokens']['median'] / row['chunks']['median']:,.0f}",
            cell(row["cpu_us_per_chunk"], ",.0f"),
            cell(row["cpu_us_per_token"], ".2f"),
            f"{row['sent_bytes_per_chunk']['median'] / 1e3:,.1f}",
            f"{row['received_bytes_per_chunk']['median'] / 1e3:,.1f}",
            f"{1e6 / row['cpu_us_per_token']['median']:,.0f}",
        ]
        for row in rows
    ]
    return markdown(columns, lines, left=2)


def answer(rows: Sequence[Row]) -> str:
    """Return how many instances one driver's core serves, with the most instances and drafts."""
    row = max(rows, key=lambda row: (row["instances"], row["plugins"] == "with drafts"))
    per_s = 1e6 / row["cpu_us_per_token"]["median"]
    return (
        f"With drafts and {row['instances']:,} instances, one core carries {per_s / 1e6:.1f} million tokens"
        f" per second: {per_s / TOKENS_PER_S:,.0f} instances that write {TOKENS_PER_S:,.0f} each. A chunk"
        f" takes {row['cpu_us_per_chunk']['median'] / 1e3:.1f} ms."
    )


def _finish(job: ChunkJob) -> Finished:
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


def _reply(message: ToWorker) -> FromWorker | None:
    """Return what an instance that takes no time answers."""
    match message:
        case Start():
            info = InstanceInfo(message.instance_id, KV_TOKENS, BLOCK_TOKENS, MAX_RUNNING, MAX_MODEL_TOKENS)
            return Ready(info)
        case Submit(job):
            return _finish(job)
        case MeasureSteps(batch, draft_tokens):
            seconds = tuple((STEP_S,) * len(draft_tokens) for _ in batch)
            return Called(step_times=StepTimes(batch, draft_tokens, seconds))
        case _:
            return None


async def _worker(host: str, port: int, secret: bytes) -> None:
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
            reply = _reply(message)
            if reply is not None:
                writer.write(encode(reply))
        await writer.drain()


async def _workers(host: str, port: int) -> None:
    """Begin a worker for each secret, until standard input ends."""
    secrets_in = asyncio.StreamReader()
    protocol = asyncio.StreamReaderProtocol(secrets_in)
    await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, sys.stdin)
    async with asyncio.TaskGroup() as workers:
        while len(secret := await secrets_in.read(ID_BYTES + KEY_BYTES)) == ID_BYTES + KEY_BYTES:
            workers.create_task(_worker(host, port, secret))


if __name__ == "__main__":
    asyncio.run(_workers(sys.argv[1], int(sys.argv[2])))
