"""Config and prompts files, distributions made on the spot, and engines that a test plays by hand."""

import asyncio
from pathlib import Path

import attrs
import msgspec
import pytest
import structlog
from seer_host.tables import SeerTable
from seer_session.runtime import Runtime

from seer_core.model import InstanceInfo, PromptGroup
from seer_core.model.arrays import Logprobs, PromptLogprobs, Tokens, TopLogprobs
from seer_core.model.events import InstanceDegraded
from seer_core.plugins.slots import Assembly, Strategies
from seer_core.ports.clock import RealClock
from seer_core.ports.drafting import StepTimes
from seer_core.ports.engine import ChunkOutput, ChunkPiece, ModelInfo
from seer_core.scheduling.scheduler import Policies

ROOT = Path(__file__).parents[1]


@pytest.fixture(autouse=True)
def _quiet_logs():
    """Logs go nowhere, unless a command configures them."""
    structlog.configure(processors=[lambda logger, method, event: _drop()])


def _drop():
    raise structlog.DropEvent


@pytest.fixture
def local_plugin(distribution):
    """Return a function that installs one of the plug-ins in ``tests/distributions``."""

    def install(name):
        return distribution(name, (ROOT / "tests/distributions" / f"{name}.py").read_text())

    return install


@attrs.define(eq=False)
class Hands:
    engines: list
    clock: object = attrs.Factory(RealClock)
    model: ModelInfo = attrs.Factory(
        lambda: ModelInfo(1000, 512, controls=("top_logprobs", "prompt_logprobs"))
    )
    tokenizer: object = None


class Hand:
    """An engine that does nothing by itself: the test reads ``jobs`` and answers them."""

    def __init__(self, id="hand-0", kv_capacity_tokens=512, max_running=8):
        self.id = id
        self.info = InstanceInfo(id, kv_capacity_tokens, 16, max_running, 512)
        self.sink = None
        self.jobs = {}
        self.aborted = []
        self.weights = []
        self.specs = []
        self.starts = self.stops = self.resets = self.slept = self.woken = 0
        self.drafter = self.kv_pool = None
        self.shares_kv = True
        self.forgotten = []
        self.sibling_tokens = []

    def set_drafter(self, drafter):
        self.drafter = drafter
        return drafter is not None and drafter.shares()

    def set_kv_pool(self, pool):
        self.kv_pool = pool
        return self.shares_kv and pool is not None

    def add_sibling_tokens(self, text):
        self.sibling_tokens.append(text)

    def forget_group(self, group_id):
        self.forgotten.append(group_id)

    async def measure_steps(self, batch, draft_tokens, context_tokens=None):
        return StepTimes((1,), (0,), ((0.001,),))

    async def start(self, sink):
        self.sink = sink
        self.starts += 1
        return self.info

    def submit(self, job):
        self.jobs[job.id] = job

    def abort(self, job_id):
        self.aborted.append(job_id)
        del self.jobs[job_id]

    async def reset_cache(self):
        self.resets += 1

    async def update_weights(self, source, version):
        self.weights.append((str(source), version))
        self.specs.append(source)

    async def sleep(self):
        self.slept += 1
        return 1000

    async def wake(self):
        self.woken += 1

    async def stop(self):
        self.stops += 1

    def finish(
        self,
        job_id=None,
        tokens=1,
        *,
        stopped=True,
        logprobs=None,
        version=None,
        drafts=(),
        pool=0,
        logprob=-0.5,
    ):
        """Answer a job, by default the oldest, with ``tokens`` tokens that count up from 5."""
        job = self.jobs.pop(job_id or next(iter(self.jobs)))
        start = len(job.token_ids) - job.prompt_tokens
        token_ids = [5 + start + number for number in range(tokens)]
        self.sink.chunk_finished(
            self.id,
            ChunkOutput(
                job_id=job.id,
                token_ids=token_ids,
                logprobs=[logprob] * (tokens if logprobs is None else logprobs),
                stopped=stopped,
                cached_tokens=0,
                prefilled_tokens=len(job.token_ids),
                computed_tokens=len(job.token_ids) + tokens - 1,
                preemptions=0,
                weight_version=job.weight_version if version is None else version,
                pool_tokens=pool,
                top_logprobs=most_probable(job, token_ids, logprob),
                prompt_logprobs=of_prompt(job),
                **dict(zip(("steps", "drafted_at", "accepted_at"), drafts, strict=False)),
            ),
        )

    def grow(self, job_id=None, tokens=1, *, start=0, logprob=-0.5):
        """Stream so many tokens of a running job, by default the oldest, as ``finish`` will have them."""
        job = self.jobs[job_id or next(iter(self.jobs))]
        first = 5 + len(job.token_ids) - job.prompt_tokens + start
        token_ids = range(first, first + tokens)
        tops = most_probable(job, token_ids, logprob)
        piece = ChunkPiece(job.id, start, Tokens(token_ids), Logprobs([logprob] * tokens), tops)
        self.sink.chunk_streamed(self.id, piece)

    def fail(self, job_id=None):
        job = self.jobs.pop(job_id or next(iter(self.jobs)))
        self.sink.chunk_failed(self.id, job.id, "out of luck")

    def complain(self, reason):
        self.sink.degraded(InstanceDegraded(self.id, "drafting", reason, "hand.log"))

    def die(self):
        self.jobs.clear()
        self.sink.lost(self.id, "the test killed it")


def most_probable(job, token_ids, logprob):
    """Each token and those after it, with less and less of a probability, if the job asks for them."""
    width = job.sampling.top_logprobs
    if not width:
        return None
    return TopLogprobs.of([[(token + rank, logprob - rank) for rank in range(width)] for token in token_ids])


def of_prompt(job):
    """Log-probs of -2, -3 and so on, and as the most probable tokens 1, 2 and so on, for a first chunk."""
    width, places = job.sampling.prompt_logprobs, job.prompt_tokens - 1
    if width is None or len(job.token_ids) > job.prompt_tokens:
        return None
    tops = TopLogprobs.of([[(1 + rank, -0.25 - rank) for rank in range(width)]] * places)
    return PromptLogprobs(Logprobs(-2.0 - place for place in range(places)), tops if width else None)


@pytest.fixture(scope="session")
def hand():
    """Return the class of engines that are played by hand."""
    return Hand


@pytest.fixture
def slow_starter():
    """Return an engine that is played by hand and comes up once its ``go_on`` is set."""

    class Slow(Hand):
        async def start(self, sink):
            await self.go_on.wait()
            return await super().start(sink)

    slow = Slow("y")
    slow.go_on = asyncio.Event()
    return slow


@pytest.fixture(scope="session")
def by_hand():
    """Return a function that makes a runtime over engines that are played by hand."""

    def make(*engines, policies=None, observers=(), drafter=None, kv_pool=None, **seer):
        assembly = Assembly(
            Hands(list(engines)), Strategies(policies or Policies(), tuple(observers), drafter), kv_pool
        )
        return Runtime(assembly, SeerTable(**seer))

    return make


@pytest.fixture(scope="session")
def simulated():
    """Return a function that makes a runtime over simulated engines, on a clock of its own."""
    from seer_sim.plugin import Settings, make_fleet  # the core's own tests do without it

    def make(policies=None, observers=(), drafter=None, kv_pool=None, seer=None, **settings):
        assembly = Assembly(
            make_fleet(msgspec.convert(settings, Settings)),
            Strategies(policies or Policies(), tuple(observers), drafter),
            kv_pool,
        )
        return Runtime(assembly, seer or SeerTable())

    return make


@pytest.fixture(scope="session")
def some_groups():
    """Return a function that makes prompt groups ``a``, ``b``, ... with prompts of different length."""

    def make(count=2, n=2, max_tokens=64):
        return [
            PromptGroup(
                id=f"{chr(97 + number % 26)}{number // 26 or ''}",
                prompt_token_ids=tuple(range(10, 14 + number % 7)),
                n=n,
                max_tokens=max_tokens,
                seed=number,
            )
            for number in range(count)
        ]

    return make
