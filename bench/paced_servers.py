"""Servers of vLLM's scheduler on an emulated accelerator, behind the HTTP dialect, on a virtual clock.

The requests and answers are those of ``seer_remote``, as JSON, but for the sockets: a request takes an arm's
``latency_s`` on its way, and no time passes on the clock while the driver works.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import attrs
import msgspec
from msgspec import structs
from seer_lab import simulate as laboratory
from seer_lab.policies import POLICIES
from seer_lab.simulate import SimulatedIteration
from seer_lab.workloads import Workload
from seer_paced.stepper import LocalStepper
from seer_paced.virtual_engine import VirtualEngine
from seer_remote.connection import Connection
from seer_remote.dialect import ServerChunk, ServerFacts
from seer_remote.figures import ServerFigures
from seer_remote.instance import RemoteInstance
from seer_remote.vllm import GENERATE, Vllm
from seer_sim.clock import VirtualClock
from seer_worker.served import ENDS_EARLY

from seer_core.model import Exactness, InstanceInfo, Sampling
from seer_core.model.events import InstanceDegraded, InstanceReported
from seer_core.ports.drafting import SiblingTokens
from seer_core.ports.engine import ChunkJob, ChunkOutput, ChunkPiece, EngineFleet, InstanceSink
from seer_core.ports.kv import KVPool

if TYPE_CHECKING:  # an import of the engine for a page of results would take seconds
    from seer_vllm.instance import VllmAdapter

__all__ = ["LATENCY_S", "RemoteArm", "behind_http", "simulated"]

LATENCY_S = 5e-3
"""Of a request on its way: what HTTP and a server's front end take."""


class PacedServer(Connection):
    """A server without sockets: what is sent to it is queued in an emulated engine."""

    def __init__(self, engine: VirtualEngine, clock: VirtualClock, latency_s: float) -> None:
        super().__init__(f"http://{engine.id}")
        self.engine, self.clock, self.latency_s = engine, clock, latency_s
        self.jobs: dict[str, ChunkJob] = {}
        """The chunks on their way: the engine's script goes by more than a request has."""
        self.answers: dict[str, asyncio.Future[ChunkOutput | str]] = {}
        self.holds: dict[str, Callable[[], None]] = {}
        """Keep the clock from going on while a chunk or its answer is on its way, by the job's id."""

    def end(self, job_id: str) -> None:
        """End a chunk with the tokens that it has, as a server does that aborts a request."""
        worker = cast("LocalStepper", self.engine._stepper)._worker
        if job_id not in worker._jobs:
            return
        ended = cast("VllmAdapter", worker.adapter).stop_chunk(job_id)
        self.engine._receive(worker._finish(attrs.evolve(ended, stopped=False)))

    async def post(self, path: str, body: Any = None, limit_s: float | None = 60.0) -> bytes:
        """Write a chunk."""
        assert path == GENERATE, path
        request = msgspec.json.decode(msgspec.json.encode(body))
        name = request["request_id"]
        job = self.jobs.pop(name)
        future = self.answers[job.id] = asyncio.get_running_loop().create_future()
        sent = structs.replace(
            job,
            token_ids=request["token_ids"],
            max_tokens=request["sampling_params"]["max_tokens"],
            may_end_early=ENDS_EARLY in (request["sampling_params"].get("extra_args") or {}),
        )
        self.clock.call_at(self.clock.now() + self.latency_s, lambda: self.engine.submit(sent))
        self.holds.pop(job.id)()
        output = await future
        if isinstance(output, str):
            raise AssertionError(output)
        full = len(output.token_ids) == sent.max_tokens
        places = zip(output.token_ids, output.logprobs, strict=True)
        choice = {
            "token_ids": list(output.token_ids),
            "finish_reason": "stop" if output.stopped else "length" if full else "abort",
            "logprobs": {"content": [{"token_id": token, "logprob": at} for token, at in places]},
        }
        cached = output.cached_tokens + output.pool_tokens
        return msgspec.json.encode(
            {
                "request_id": f"generate-tokens-{name}",
                "choices": [choice],
                "usage": {"prompt_tokens_details": {"cached_tokens": cached}},
            }
        )


class ServerSink:
    """Takes what the engine behind a server reports."""

    def __init__(self, server: PacedServer, instance: PacedRemote) -> None:
        self._server, self._instance = server, instance

    def chunk_finished(self, instance_id: str, output: ChunkOutput) -> None:
        """Send the answer; the clock waits for it."""
        self._server.holds[output.job_id] = self._server.clock.hold()
        self._server.answers.pop(output.job_id).set_result(output)

    def chunk_failed(self, instance_id: str, job_id: str, reason: str) -> None:
        """Send the error."""
        self._server.holds[job_id] = self._server.clock.hold()
        self._server.answers.pop(job_id).set_result(reason)

    def chunk_streamed(self, instance_id: str, piece: ChunkPiece) -> None:
        """Do nothing: servers do not stream."""

    def reported(self, report: InstanceReported) -> None:
        """Pass it on, as a server's figures are asked for."""
        if self._instance.driver is not None:
            self._instance.driver.reported(report)

    def degraded(self, degradation: InstanceDegraded) -> None:
        """Do nothing."""

    def lost(self, instance_id: str, reason: str) -> None:
        """Fail: nothing is killed here."""
        raise AssertionError(reason)

    def leaving(self, instance_id: str, reason: str) -> None:
        """Do nothing."""


class DriverSink:
    """Lets the clock go on once the driver has an answer."""

    def __init__(self, sink: InstanceSink, server: PacedServer) -> None:
        self._sink, self._server = sink, server

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sink, name)

    def chunk_finished(self, instance_id: str, output: ChunkOutput) -> None:
        """Pass it on."""
        self._sink.chunk_finished(instance_id, output)
        self._server.holds.pop(output.job_id)()

    def chunk_failed(self, instance_id: str, job_id: str, reason: str) -> None:
        """Pass it on."""
        self._sink.chunk_failed(instance_id, job_id, reason)
        self._server.holds.pop(job_id)()


class PacedSiblings:
    """The settings that servers of a fleet have in common, without the fleet's questions."""

    require: Exactness = "exact"
    processed_logprobs = False
    shared_kv: bool | None = None
    token = "paced"
    turns = version = kv_tokens = max_running = 0
    sampling = Sampling()
    poll_s = silence_timeout_s = 1e9


class PacedRemote(RemoteInstance):
    """A server as an instance, without tests at its start."""

    def __init__(self, server: PacedServer, arm: RemoteArm, vocab_size: int) -> None:
        plain = Connection(server.url)
        super().__init__(
            server.engine.id, "vllm", plain, cast("Any", PacedSiblings()), lambda _: Vllm(server)
        )
        self.server, self._shares, self._vocab_size = server, arm.shares, vocab_size
        self.seer.ends_early = arm.ends_early
        self.driver: DriverSink | None = None

    def set_kv_pool(self, pool: KVPool | None) -> bool:
        """Let the servers share KV as their owner has configured it."""
        return self.server.engine.set_kv_pool(pool if self._shares else None)

    async def start(self, sink: InstanceSink) -> InstanceInfo:
        """Start the engine, and describe it as servers are."""
        own = await self.server.engine.start(cast("InstanceSink", ServerSink(self.server, self)))
        self._facts = ServerFacts(
            "paced",
            "paced",
            "paced",
            own.max_model_tokens,
            self._vocab_size,
            own.kv_capacity_tokens,
            own.block_tokens,
            own.max_running,
            own.shares_prompts,
        )
        self._figures = ServerFigures(own.prefill_s_per_token, own.step_s, self.server.latency_s + own.step_s)
        self._fetch_s = own.fetch_s_per_token if self._shares else None
        self.driver = DriverSink(sink, self.server)
        self._sink = cast("InstanceSink", self.driver)
        return self._describe(self._facts, "exact")

    async def stop(self) -> None:
        """End the engine."""
        self._sink = self.driver = None
        await self.server.engine.stop()

    def end_chunk(self, job_id: str) -> None:
        """Have the server end a chunk with what it has, as it is asked over HTTP."""
        server = self.server
        server.clock.call_at(server.clock.now() + server.latency_s, lambda: server.end(job_id))

    def submit(self, job: ChunkJob) -> None:
        """Send a chunk; the clock waits until the server has it."""
        self.server.holds[job.id] = self.server.clock.hold()
        super().submit(job)

    @property
    def first_steps_s(self) -> dict[str, float]:
        """As ``VirtualEngine`` has it."""
        return self.server.engine.first_steps_s

    @property
    def turn_steps_s(self) -> dict[tuple[str, int], float]:
        """As ``VirtualEngine`` has it."""
        return self.server.engine.turn_steps_s

    def add_sibling_tokens(self, text: SiblingTokens) -> None:
        """Do nothing: servers have no drafts of Seer's here."""

    def forget_group(self, group_id: str) -> None:
        """Let the pool forget it too."""
        self.server.engine.forget_group(group_id)

    async def _level_of(self, sampling: Sampling) -> Exactness:
        return "exact"

    async def _send(
        self, name: str, job: ChunkJob, tokens: Sequence[int], most: int, seed: int | None
    ) -> ServerChunk:
        self.server.jobs[name] = job
        return await super()._send(name, job, tokens, most, seed)


class RemoteArm(NamedTuple):
    """A way to run the instances."""

    policy: str
    served: bool = True
    """Whether they are servers; otherwise Seer's own workers."""
    shares: bool = False
    """Whether they share KV."""
    ends_early: bool = False
    """Whether Seer's package in the servers ends chunks where KV runs short."""
    whole: bool = False
    """Whether whole chunks are reserved on servers."""
    latency_s: float = LATENCY_S


def behind_http(fleet: EngineFleet, arm: RemoteArm) -> EngineFleet:
    """Return a fleet of emulated instances as one of servers."""
    clock = cast("VirtualClock", fleet.clock)
    engines = [
        PacedRemote(
            PacedServer(cast("VirtualEngine", each), clock, arm.latency_s), arm, fleet.model.vocab_size
        )
        for each in fleet.engines
    ]
    return cast("EngineFleet", attrs.evolve(cast("Any", fleet), engines=engines))


def simulated(
    load: Workload, arm: RemoteArm, seed: int, overrides: Sequence[str] = (), observers: Sequence[Any] = ()
) -> SimulatedIteration:
    """Roll out one iteration of a workload on instances that are run in such a way."""
    make = laboratory._fleet

    def fleet(*given: Any) -> EngineFleet:
        own = make(*given)
        return behind_http(own, arm) if arm.served else own

    shared = () if arm.shares else ("seer.kv_pool=none",)
    whole = ("plugin.divided_rollout.reserved_share=1",) if arm.whole else ()
    laboratory._fleet = fleet
    try:
        return laboratory.simulate(
            load, POLICIES[arm.policy], seed, (*overrides, *shared, *whole), observers, "paced"
        )
    finally:
        laboratory._fleet = make
