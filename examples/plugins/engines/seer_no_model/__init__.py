"""Engines without a model, for a start."""

import asyncio
from collections.abc import Sequence
from typing import Annotated

from msgspec import Meta, Struct
from seer_core.errors import EngineError
from seer_core.model import InstanceInfo
from seer_core.model.arrays import Logprobs, Tokens
from seer_core.plugins.config_types import NotNegative
from seer_core.plugins.hookspecs import hookimpl
from seer_core.ports.clock import RealClock
from seer_core.ports.drafting import Drafter, SiblingTokens, StepTimes
from seer_core.ports.engine import ChunkJob, ChunkOutput, EngineFleet, InstanceSink, ModelInfo
from seer_core.ports.kv import KVPool
from seer_core.ports.weights import WeightSpec

MODEL = ModelInfo(vocab_size=1000, max_model_tokens=4096)
END = 0
"""The token that ends a response."""


class Settings(Struct, frozen=True):
    """Keys of ``[engine.no_model]``; a token takes ``token_s`` seconds."""

    instances: Annotated[int, Meta(ge=1)] = 2
    token_s: NotNegative = 0.0001


class NoModel:
    """Engine without a model: token p of a response is made of its seed and p; 0 ends it."""

    def __init__(self, id: str, token_s: float) -> None:
        self.id = id
        self.token_s = token_s
        self.weight_version = 0
        self._asleep = False
        self._sink: InstanceSink | None = None
        self._timers: dict[str, asyncio.TimerHandle] = {}

    def set_drafter(self, drafter: Drafter | None) -> bool:
        """Refuse to speculate."""
        if drafter is not None:
            raise EngineError(f"instance {self.id!r} cannot speculate; leave out the drafter: -p no:NAME")
        return False

    def set_kv_pool(self, pool: KVPool | None) -> bool:
        """Share no KV: there is none."""
        return False

    async def start(self, sink: InstanceSink) -> InstanceInfo:
        """Be ready; a real engine starts its process here, within a time limit."""
        self._sink, self.weight_version, self._asleep = sink, 0, False
        return InstanceInfo(
            self.id,
            kv_capacity_tokens=16 * MODEL.max_model_tokens,
            block_tokens=16,
            max_running=64,
            max_model_tokens=MODEL.max_model_tokens,
        )

    def submit(self, job: ChunkJob) -> None:
        """Answer later, with tokens or with a reason."""
        too_long = len(job.token_ids) + job.max_tokens > MODEL.max_model_tokens
        answer = self._fail if self._asleep or too_long else self._finish
        delay_s = job.max_tokens * self.token_s
        self._timers[job.id] = asyncio.get_running_loop().call_later(delay_s, answer, job)

    def abort(self, job_id: str) -> None:
        """Drop a chunk, known or not."""
        timer = self._timers.pop(job_id, None)
        if timer is not None:
            timer.cancel()

    def add_sibling_tokens(self, text: SiblingTokens) -> None:
        """Do nothing: nothing drafts here."""

    def forget_group(self, group_id: str) -> None:
        """Drop what is remembered of a group: nothing."""

    async def measure_steps(
        self, batch: Sequence[int], draft_tokens: Sequence[int], context_tokens: int | None = None
    ) -> StepTimes:
        """Refuse: there are no steps."""
        raise EngineError(f"instance {self.id!r} makes no steps that could be measured")

    async def reset_cache(self) -> None:
        """Forget all KV: there is none."""
        self._expect_awake()

    async def update_weights(self, source: WeightSpec, version: int) -> None:
        """Take the version, which every chunk names from now on."""
        self._expect_awake()
        self.weight_version = version

    async def sleep(self) -> int:
        """Give back no memory, for there is none, and take no chunks."""
        if self._timers or self._sink is None:
            raise EngineError(f"instance {self.id!r} is busy or down; it cannot sleep")
        self._asleep = True
        return 0

    async def wake(self) -> None:
        """Take chunks again."""
        if self._sink is None:
            raise EngineError(f"instance {self.id!r} is down; it cannot wake")
        self._asleep = False

    async def stop(self) -> None:
        """Drop all chunks, without a word."""
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()

    def _finish(self, job: ChunkJob) -> None:
        sink = self._answered(job)
        token_ids = Tokens()
        for place in range(len(job.token_ids), len(job.token_ids) + job.max_tokens):
            token_ids.append((job.seed + place * place) % 97)
            if token_ids[-1] == END:
                break
        sink.chunk_finished(
            self.id,
            ChunkOutput(
                job_id=job.id,
                token_ids=token_ids,
                logprobs=Logprobs([-1.0] * len(token_ids)),
                stopped=token_ids[-1] == END,
                cached_tokens=0,
                prefilled_tokens=len(job.token_ids),
                computed_tokens=len(job.token_ids) + len(token_ids) - 1,
                preemptions=0,
                weight_version=self.weight_version,
            ),
        )

    def _fail(self, job: ChunkJob) -> None:
        longest = len(job.token_ids) + job.max_tokens
        reason = f"{longest} tokens are more than the model's {MODEL.max_model_tokens}"
        if self._asleep:
            reason = "the instance is asleep; wake it first"
        self._answered(job).chunk_failed(self.id, job.id, reason)

    def _expect_awake(self) -> None:
        if self._asleep:
            raise EngineError(f"instance {self.id!r} is asleep; wake it first")

    def _answered(self, job: ChunkJob) -> InstanceSink:
        del self._timers[job.id]
        assert self._sink is not None
        return self._sink


class NoModelFleet:
    """EngineFleet on the machine's clock."""

    def __init__(self, settings: Settings) -> None:
        self.engines: list[NoModel] = []
        for number in range(settings.instances):
            name = f"no_model-{number}"
            self.engines.append(NoModel(name, settings.token_s))
        self.clock = RealClock()
        self.model = MODEL
        self.tokenizer = None


@hookimpl
def seer_make_engines(settings: Settings) -> EngineFleet:
    """Fill the slot; start nothing."""
    return NoModelFleet(settings)
