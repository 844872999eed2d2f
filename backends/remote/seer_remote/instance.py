"""One server as an instance: chunks are its requests, its life is its owner's."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from secrets import token_hex
from typing import Protocol

import attrs
import structlog
from msgspec import structs
from seer_host.json_files import UNREADABLE, describe_flaw

from seer_core.errors import EngineError, NoPlaceError, OtherWeightsError
from seer_core.model import Exactness, InstanceInfo, Sampling
from seer_core.model.arrays import Logprobs, Tokens
from seer_core.model.events import InstanceReported
from seer_core.ports.drafting import Drafter, SiblingTokens, StepTimes
from seer_core.ports.engine import ChunkJob, ChunkOutput, InstanceSink
from seer_core.ports.kv import KVPool
from seer_core.ports.weights import OWNER, WeightSpec
from seer_remote.connection import (
    JSON,
    UNAUTHORIZED,
    Connection,
    HeldConnection,
    Malformed,
    RefusedCall,
    Unreachable,
)
from seer_remote.dialect import Dialect, ServerChunk, ServerFacts, Unsupported, checked
from seer_remote.exactness import (
    LEVELS,
    PROMPT_TOKENS,
    LevelFinding,
    Likeness,
    agrees,
    examine,
    look,
    reports_raw,
    seed_of,
    shape_of,
)
from seer_remote.figures import ServerFigures, fetch, measure
from seer_remote.seer_servers import SeerServer

__all__ = ["RemoteInstance", "SiblingServers"]

log = structlog.get_logger("seer")

TRIES = 3
"""How often a chunk is sent to a server that breaks off and lives."""
AGAIN_S = 0.25
"""The wait before a call is repeated; a request to end a chunk may come before the chunk."""
LONGEST_PAUSE_S = 60.0
SHORT_LIFE_S = 30.0
"""A server that is lost so soon after its start is given more time before the next."""
COMPARE_S = 30.0
"""How long a server that starts waits for another to go on with its responses: that one may have no place."""
UNKNOWN_RUNNING = 256
"""vLLM's default for the sequences of a step, where a server does not say."""
OVERLOADED = (408, 425, 429, 502, 503, 504)
"""HTTP's answers of a server, or of what stands before it, that may have another soon."""

GUESSED_FETCH = 0.1
"""What loading shared KV costs beside a prefill, where it was not measured."""
MEASURED = Sampling(ignore_eos=True)

REMEDY = "have it draw each token by its seed and its place alone"
TESTS = "seer-tests"
"""The group of responses by which a server is tested."""

REMEDIES = {
    "vllm": "`pip install seer-vllm` beside vLLM and start it with SEER_KEYED_SAMPLING=1 in its environment,"
    " or with vLLM's second model runner and without drafts",
    "sglang": "start it with --enable-deterministic-inference",
}


RAW = "have it report those of the model"
RAW_REMEDIES = {
    "vllm": "start it with --logprobs-mode raw_logprobs",
    "sglang": "start it with SGLANG_RETURN_ORIGINAL_LOGPROB=1 in its environment",
}


class SiblingServers(Protocol):
    """The fleet, as its instances see it."""

    require: Exactness
    shared_kv: bool | None
    """Whether servers share KV; None has it measured."""
    turns: int
    """How often the KV that servers share was to be forgotten."""
    token: str
    """Stands for the fleet."""
    processed_logprobs: bool
    """Whether log-probs may be those after temperature and cuts."""
    sampling: Sampling
    """The sampling of the run's prompts, as far as they do not say otherwise."""
    kv_tokens: int
    max_running: int
    poll_s: float
    silence_timeout_s: float
    version: int
    """The version of the weights that the others have."""
    differ: bool
    """Whether two servers were found that draw different tokens."""

    def in_use(self) -> Iterable[RemoteInstance]:
        """Iterate over the servers that chunks are sent to."""
        ...

    def mark(self, version: int, marks: Likeness) -> tuple[str, str]:
        """Return a fingerprint, which servers that may have the same weights have in common.

        And why it is not that of the first server with this version; empty if it is.
        """
        ...

    async def another(self, url: str) -> Dialect | None:
        """Return another server that writes, its connection open; None if there is none."""
        ...

    async def ready(self) -> None:
        """Wait until the first server has said what all are to serve."""
        ...

    def expect(self, url: str, facts: ServerFacts) -> None:
        """Raise EngineError if a server does not serve what the others do."""
        ...


class RemoteInstance:
    """One server; ``address`` says that its life is its owner's."""

    most_pause_s = LONGEST_PAUSE_S

    def __init__(
        self,
        id: str,
        kind: str,
        connection: Connection,
        siblings: SiblingServers,
        make: Callable[[Connection], Dialect],
    ) -> None:
        self.id = id
        self.address = connection.url
        self.dialect = make(connection)
        self.seer = SeerServer(id, kind, connection, self._leave)
        self._kind = kind
        self._connection = connection
        self._calls = attrs.evolve(connection, session=None)
        """For calls of the owner's, also while the instance is down."""
        self._calling = 0
        """How many of them are under way."""
        self._stopped = False
        self._why_left = ""
        """Why it left by its owner, in words, until it has started again."""
        self._siblings = siblings
        self._sink: InstanceSink | None = None
        self._facts: ServerFacts | None = None
        self._jobs: dict[str, asyncio.Task[None]] = {}
        self._names: dict[str, str] = {}
        """The ids under which the server has running chunks, by ours."""
        self._ending: set[str] = set()
        """Running chunks that are to end now."""
        self._whole: set[str] = set()
        """Running chunks that are not to end early."""
        self._ender: asyncio.Task[None] | None = None
        self._dropped: set[asyncio.Task[None]] = set()
        """Chunks that are not wanted any more, while their connections close."""
        self._watching: asyncio.Task[None] | None = None
        self._run = token_hex(4)
        self._requests = 0
        self._turns = 0
        """How often its cache was to be forgotten."""
        self._version = 0
        self._label = ""
        self._asleep = False
        self._doubted: asyncio.Task[None] | None = None
        """Finds out whether the server is that of before; answers wait for it."""
        self._unsure = False
        """Whether it may have been started anew since it had chunks."""
        self._held: HeldConnection | None = None
        """Ends with the server's process."""
        self._fingerprint = ""
        """Of its weights, when they were last looked at."""
        self._found: dict[str, LevelFinding] = {}
        """What was found of its level, by the sampling's shape."""
        self._is_compared = False
        """Whether another server has gone on with its responses since it started."""
        self._tests: dict[str, asyncio.Task[None]] = {}
        self._figures = ServerFigures()
        self._fetch_s: float | None = None
        """The time to find one token's KV that another server has written; None where none is shared."""
        self._noise = 0.0
        self._raw = True
        """Whether its log-probs are those of the model's own distribution."""
        self._started_s = 0.0
        self._short_lives = 0

    # Lives.

    def set_drafter(self, drafter: Drafter | None) -> bool:
        """Have the server draft from the next ``start`` on, which refuses one that cannot."""
        self.seer.drafter = drafter
        return self.seer.shares_text

    def set_kv_pool(self, pool: KVPool | None) -> bool:
        """Have the server share KV from the next ``start`` on, which refuses one that cannot."""
        return self.seer.use(pool)

    async def start(self, sink: InstanceSink) -> InstanceInfo:
        """Ask the server what it is, and test what its tokens depend on.

        Raises:
            NoPlaceError: it does not answer.
            OtherWeightsError: it does not serve the weights that others do.
            EngineError: it does not serve what the others do, or less exactly than is required.
        """
        await self._down()
        self._stopped = False
        self._turns += 1  # marks of the weights are looked at with nothing cached, if it shares no KV
        await self._siblings.ready()
        self._connection.open()
        try:
            await self._hold()
            facts = self._facts = await self._whole_facts()
            self._siblings.expect(self.address, facts)
            self._found.clear()
            self._tests.clear()
            self._is_compared = False
            await self.seer.attach(sink)
            self._raw = await reports_raw(self._try, facts.vocab_size)
            level = await self._level_of(self._siblings.sampling)
            await self._measure(facts)
            self._version, self._fingerprint, self._unsure = 0, "", self._is_over
            if not self._siblings.version:  # or else the runtime looks, by ``update_weights``
                _, flaw = await self._look(0)
                if flaw:
                    raise OtherWeightsError(
                        f"instance {self.id!r} does not serve the weights that others do: {flaw}; load them"
                        " there, or start it anew"
                    )
                level = await self._compare()
        except Unreachable as error:
            self._short_lives += 1
            await self._down()
            raise NoPlaceError(
                f"instance {self.id!r}: no server answers at {self.address}: {error}"
            ) from error
        except (Malformed, RefusedCall) as error:
            await self._down()
            raise EngineError(
                f"instance {self.id!r}: the server at {self.address} is of no use: {error}"
            ) from error
        except BaseException:
            await self._down()
            raise
        self._sink, self._asleep, self._why_left = sink, False, ""
        self._started_s = asyncio.get_running_loop().time()
        self._watching = asyncio.create_task(self._watch())
        info = self.seer.describe(self._describe(facts, level))
        log.info(
            "server_found",
            instance=self.id,
            url=self.address,
            engine=facts.engine,
            model=facts.model,
            exactness=level,
            max_running=info.max_running,
            label=self._label,
            raw_logprobs=self._raw,
            prefill_s_per_token=round(self._figures.prefill_s_per_token, 7),
            step_s=round(self._figures.step_s, 5),
            shares_kv=self._fetch_s is not None,
        )
        for lack in facts.lacks:
            log.warning("server_lacks", instance=self.id, url=self.address, remedy=lack)
        return info

    async def find_place(self, waiting: Callable[[str], None]) -> None:
        """Wait until the server answers, and is neither paused nor asleep."""
        if self._short_lives:
            await asyncio.sleep(min(self.most_pause_s, 2.0 ** (self._short_lives - 1)))
        said = ""
        self._connection.open()
        try:
            while True:
                missing = await self._missing()
                if not missing:
                    return
                if missing != said:
                    waiting(missing)
                    said = missing
                await asyncio.sleep(self._siblings.poll_s)
        finally:
            await self._connection.close()

    async def _missing(self) -> str:
        """Return why the server cannot be used now; empty if it can."""
        if not await self.dialect.healthy():
            return f"no server answers at {self.address}"
        try:
            paused = (await self.dialect.load()).paused
        except (Unreachable, RefusedCall, Malformed) as error:
            return f"the server at {self.address} is not ready: {error}"
        return self._paused if paused else ""

    @property
    def _paused(self) -> str:
        return f"the server at {self.address} is paused by its owner"

    async def stop(self) -> None:
        """Leave the server alone; it goes on."""
        await self.seer.detach()
        self._stopped = True
        if not self._calling:
            await self.close_calls()
        await self._down()

    # Calls of the owner's.

    @property
    def kind(self) -> str:
        """The kind of the server: ``vllm`` or ``sglang``."""
        return self._kind

    @property
    def served_model(self) -> str:
        """The name by which the server serves the model; empty until it has been asked."""
        return "" if self._facts is None else self._facts.model

    @property
    def weights_label(self) -> str:
        """The name that the server gives its weights, as last looked at; empty where it gives none."""
        return self._label

    async def close_calls(self) -> None:
        """End the connections of calls."""
        await self._calls.close()

    @asynccontextmanager
    async def _during_call(self) -> AsyncIterator[None]:
        """Keep the connections of calls: a server that leaves or returns meanwhile cuts none."""
        self._calls.open()
        self._calling += 1
        try:
            yield
        finally:
            self._calling -= 1
            if self._stopped and not self._calling:
                await self.close_calls()

    @asynccontextmanager
    async def opened(
        self, method: str, path: str, body: bytes | None, kind: str = JSON
    ) -> AsyncIterator[tuple[int, str, AsyncIterator[bytes]]]:
        """As ``call``, but yield the body of the answer in pieces, as they come."""
        try:
            async with self._during_call(), self._calls.opened(method, path, body, kind) as answer:
                yield answer
        except Unreachable as error:
            raise EngineError(f"the server at {self.address}: {error}") from error

    async def call(
        self, method: str, path: str, body: bytes | None, kind: str = JSON, limit_s: float | None = None
    ) -> tuple[int, str, bytes]:
        """Pass a call on to the server unread, whether or not the instance is up.

        Returns status, kind and body of its answer, an error's too; without a limit it may take for ever.

        Raises:
            EngineError: it does not answer.
        """
        try:
            async with self._during_call():
                return await self._calls.relay(method, path, body, kind, limit_s)
        except (Unreachable, Malformed) as error:
            raise EngineError(f"the server at {self.address}: {error}") from error

    async def _down(self) -> None:
        self._sink = None
        own = self._watching, self._ender, self._doubted
        others = (each for each in own if each is not None)
        tasks = [*self._jobs.values(), *self._dropped, *self._tests.values(), *others, *self.seer.leave()]
        self._watching = self._ender = self._doubted = None
        self._release()
        for table in (self._jobs, self._names, self._ending, self._whole):
            table.clear()
        tasks = [each for each in tasks if each is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        try:
            await asyncio.gather(*tasks, return_exceptions=True)
        finally:  # also where the wait is cancelled: no other will close it
            await self._connection.close()

    async def _whole_facts(self) -> ServerFacts:
        facts = await self.dialect.facts()
        if not await self.dialect.healthy():
            raise Unreachable("it is not healthy")
        if (await self.dialect.load()).paused:  # or else its test would wait for the end of the pause
            raise NoPlaceError(f"instance {self.id!r}: {self._paused}")
        return facts

    def _describe(self, facts: ServerFacts, level: Exactness) -> InstanceInfo:
        block = facts.block_tokens
        kv = (self._siblings.kv_tokens or facts.kv_tokens) // block * block
        if not kv:
            raise EngineError(
                f"instance {self.id!r}: the server at {self.address} does not say how much KV it has; set"
                " kv_tokens of [engine.remote], or start vLLM without --disable-log-stats"
            )
        if level == "reproducible" and self._siblings.require == "distributed":
            level = "distributed"  # its owner takes other tokens: responses may end a chunk at any of them
        return InstanceInfo(
            self.id,
            kv_capacity_tokens=kv,
            block_tokens=block,
            max_running=self._siblings.max_running or facts.max_running or UNKNOWN_RUNNING,
            max_model_tokens=facts.max_model_tokens,
            shares_prompts=facts.shares_prompts,
            metrics_address=self.address.partition("//")[2],
            exactness=level,
            raw_logprobs=self._raw,
            prefill_s_per_token=self._figures.prefill_s_per_token,
            step_s=self._figures.step_s,
            chunk_gap_s=self._figures.token_s,
            fetch_s_per_token=self._fetch_s,
            kv_kind="shared" if self._fetch_s is not None else "",
            ends_early=self.seer.ends_early,
            overcommits=True,
        )

    # Figures.

    async def _measure(self, facts: ServerFacts) -> None:
        """Time the server, and find out whether it finds KV that another one has written."""
        kv_tokens = self._siblings.kv_tokens or facts.kv_tokens
        ask = partial(self._ask, self.dialect)
        figures = self._figures = await measure(ask, facts, kv_tokens)
        self._fetch_s = None
        if self._siblings.shared_kv is False or self.seer.attached:
            return  # in the latter case Seer's own half says what sharing costs
        other = await self._siblings.another(self.address)
        if other is not None:
            try:
                theirs = partial(self._ask, other)
                self._fetch_s = await fetch(theirs, ask, facts, kv_tokens, figures.token_s)
            except (Unreachable, RefusedCall, Malformed) as error:  # of either
                log.warning("shared_kv_unknown", instance=self.id, error=str(error))
            finally:
                await other.connection.close()
        if self._fetch_s is None and self._siblings.shared_kv:
            self._fetch_s = GUESSED_FETCH * figures.prefill_s_per_token

    async def _ask(self, dialect: Dialect, tokens: list[int], most: int) -> ServerChunk:
        """Have a server write for a measurement, under a salt that all have in common."""
        name, salt = self._name(), f"seer-{self._siblings.token}"
        job = ChunkJob("", name, TESTS, tokens, len(tokens), most, MEASURED, 0, 0)
        return await dialect.write(name, job, tokens, most, 0, salt)

    # Exactness.

    async def _level_of(self, sampling: Sampling) -> Exactness:
        """Return the level for a sampling, tested once for each that the server may treat in another way.

        Raises:
            EngineError: it is less than is required.
        """
        assert self._facts is not None
        shape = shape_of(sampling, self._facts.whole_controls)
        self._expect_raw(sampling)
        if shape not in self._found:
            test = self._tests.get(shape)
            if test is None:
                test = self._tests[shape] = asyncio.create_task(self._test(shape, sampling))
            await asyncio.shield(test)
        level, required = self._found[shape].level, self._siblings.require
        if LEVELS.index(level) < LEVELS.index(required):
            how = f" with {shape}" if shape else ""
            raise EngineError(
                f"instance {self.id!r}: the server at {self.address} samples{how} no better than {level!r},"
                f" and [engine.remote].require is {required!r}; {REMEDIES.get(self._kind, REMEDY)}, or"
                f" set require = {level!r}"
            )
        return level

    def _expect_raw(self, sampling: Sampling) -> None:
        """Raise EngineError where log-probs of another distribution were reported as the model's."""
        greedy = not (sampling.temperature or sampling.changes_logits)
        if not (self._raw or sampling.raw or greedy or self._siblings.processed_logprobs):
            raise EngineError(
                f"instance {self.id!r}: the server at {self.address} reports log-probs after"
                f" {sampling.described}, not the model's; {RAW_REMEDIES.get(self._kind, RAW)}, or set"
                " processed_logprobs = true in [engine.remote]"
            )

    async def _test(self, shape: str, sampling: Sampling) -> None:
        try:
            assert self._facts is not None
            facts = self._facts
            finding = await examine(self._try, facts.vocab_size, sampling, facts.whole_controls)
        finally:
            self.seer.forget(TESTS)
            self._tests.pop(shape, None)
        self._noise = max(self._noise, finding.noise)
        if self._siblings.differ and finding.level == "exact":
            finding = structs.replace(finding, level="reproducible")
        self._found[shape] = finding
        log.info("server_tested", instance=self.id, sampling=shape or "plain", exactness=finding.level)

    async def _compare(self) -> Exactness:
        """Have another server go on with the responses of the test of the run's sampling.

        Each may go on with its own, and the two may draw different tokens all the same.

        Raises:
            EngineError: they do, and ``exact`` is required.
        """
        shape, other = self._run_shape, self._peer()
        finding = self._found[shape]
        if other is None:
            return finding.level
        agreed = await other.goes_on(finding)
        self._is_compared = agreed is not None
        other._is_compared |= agreed is not None
        log.info("servers_compared", instance=self.id, other=other.id, agreed=agreed)
        if agreed is False:
            if self._siblings.require == "exact":
                raise EngineError(
                    f"instance {self.id!r}: the server at {self.address} draws other tokens from a seed than"
                    f" the one at {other.address} does, though each goes on with its own responses; start"
                    " them alike, on devices of one kind, or set require = 'reproducible' in"
                    " [engine.remote]"
                )
            self._siblings.differ = True
            self._found[shape] = structs.replace(finding, level="reproducible")
        return self._found[shape].level

    @property
    def _run_shape(self) -> str:
        """The part of the run's own sampling that decides which way the server samples."""
        assert self._facts is not None
        return shape_of(self._siblings.sampling, self._facts.whole_controls)

    def _peer(self) -> RemoteInstance | None:
        """Return another server in use, which has the same weights, if both are to draw the same tokens."""
        finding = self._found.get(self._run_shape)  # None after a test that broke off
        if finding is not None and finding.level != "exact":
            return None
        others = (each for each in self._siblings.in_use() if each is not self)
        return next((each for each in others if each._fingerprint == self._fingerprint), None)

    @property
    def takes_chunks(self) -> bool:
        """Whether it is up and awake."""
        return self._sink is not None and not self._asleep

    async def goes_on(self, finding: LevelFinding) -> bool | None:
        """Return whether it goes on with another server's responses as that does; None: it does not say."""
        try:
            async with asyncio.timeout(COMPARE_S):
                return await agrees(self._try, finding)
        except (Unreachable, RefusedCall, Malformed, TimeoutError) as error:
            reason = str(error) or f"no answer within {COMPARE_S:g} s"
            log.warning("servers_not_compared", instance=self.id, url=self.address, error=reason)
            return None
        finally:
            self.seer.forget(TESTS)

    async def _try(
        self, sampling: Sampling, tokens: Sequence[int], most: int, seed: int | None
    ) -> ServerChunk:
        """Have the server write for a test."""
        assert self._facts is not None
        name = self._name()  # also the response's, which a server that drafts for Seer keeps for its siblings
        job = ChunkJob("", name, TESTS, list(tokens), PROMPT_TOKENS, most, sampling, seed or 0, 0)
        written = await self._send(name, job, tokens, most, seed)
        if len(written.token_ids) < most:
            raise Malformed(f"it ended a test after {len(written.token_ids)} of {most} tokens")
        return written

    async def _look(self, version: int) -> tuple[str, str]:
        """Note the marks of the server's weights; return as ``SiblingServers.mark``."""
        assert self._facts is not None
        try:
            marks = await look(self._try, self._facts.vocab_size, self.address, self._noise)
        finally:
            self.seer.forget(TESTS)
        self._label = marks.label
        fingerprint, flaw = self._siblings.mark(version, marks)
        self._fingerprint, self._unsure = fingerprint, self._is_over
        if flaw:
            log.warning("weights_differ", instance=self.id, version=version, flaw=flaw)
        await self.seer.share_as(fingerprint)
        return fingerprint, flaw

    async def _hold(self) -> None:
        """Hold a connection to the server's process, if none lasts; an end of it puts the server in doubt.

        Raises:
            Unreachable: the server takes no connection.
        """
        if self._held is not None and not self._is_over:
            return
        self._release()
        held = self._held = await self._connection.hold()
        if held is not None:
            held.ended.add_done_callback(partial(self._ended, held))

    def _release(self) -> None:
        held, self._held = self._held, None
        if held is not None:
            held.close()

    @property
    def _is_over(self) -> bool:
        """Whether the process to which a connection was held has ended, or has ended that connection."""
        return self._held is not None and self._held.ended.done()

    def _ended(self, held: HeldConnection, _: object) -> None:
        if held is self._held:
            self._unsure = True
            self._doubt("it has ended a connection, as a process does that ends")

    def _doubt(self, reason: str) -> None:
        """Look at its weights again: a server that breaks off may have been started anew, with others."""
        if self._sink is not None and self._doubted is None:
            self._doubted = asyncio.create_task(self._look_again(reason))

    async def _look_again(self, reason: str) -> None:
        """Lose the server unless it is that of before, and lasts while it is looked at."""
        before = self._fingerprint
        try:
            await self._hold()
            for tried in range(1, TRIES + 1):
                try:
                    fingerprint, flaw = await self._look(self._version)
                except (Unreachable, RefusedCall) as error:
                    if self._is_over or tried == TRIES or not await self.dialect.healthy():
                        self._lost(reason)
                        return
                    reason = str(error)
                    await asyncio.sleep(AGAIN_S)
                else:
                    if fingerprint != before:
                        self._lost(f"its weights have changed: {flaw or fingerprint}")
                    elif self._is_over:  # and so it may have been another that answered
                        self._lost("the next connection to it has ended too")
                    return
        except (Unreachable, Malformed, EngineError) as error:
            self._lost(str(error))
        finally:
            self._doubted = None

    async def _certain(self) -> None:
        """Wait until it is sure that the server is that of before.

        Raises:
            Unreachable: it is not, and the instance is lost.
        """
        if (doubted := self._doubted) is not None:
            await asyncio.wait([doubted])
            if self._sink is None:
                raise Unreachable("it is not that of before")

    # Chunks.

    def submit(self, job: ChunkJob) -> None:
        """Send a chunk."""
        if self._sink is not None and self._facts is not None:
            if self._unsure:
                self._doubt("it does not answer any more")
            if job.whole:
                self._whole.add(job.id)
            if job.may_end_early and (job.whole or not self.seer.ends_early):
                job = structs.replace(job, may_end_early=False)
            self._jobs[job.id] = asyncio.create_task(self._answer(job))

    def abort(self, job_id: str) -> None:
        """Close a chunk's connection, whereupon the server drops it."""
        task = self._jobs.pop(job_id, None)
        self._names.pop(job_id, None)
        self._ending.discard(job_id)
        self._whole.discard(job_id)
        if task is not None:
            self._drop(task)

    def _drop(self, task: asyncio.Task[None]) -> None:
        self._dropped.add(task)
        task.add_done_callback(self._dropped.discard)
        task.cancel()

    def end_chunk(self, job_id: str) -> None:
        """Have the server end it; its answer has what was written.

        A response that is not divided goes on: the server could not take it up again.
        """
        if job_id not in self._jobs or job_id in self._whole:
            return
        self._ending.add(job_id)
        if self._ender is None or self._ender.done():
            self._ender = asyncio.create_task(self._end())

    async def _end(self) -> None:
        """Ask until each chunk has ended: the server may not have had it at the first time."""
        while self._ending:
            await asyncio.sleep(0)  # those of one pause together
            names = [self._names[job_id] for job_id in self._ending if job_id in self._names]
            if names:
                try:
                    await self.dialect.end(names)
                except (RefusedCall, Unreachable) as error:
                    log.warning("chunks_not_ended", instance=self.id, error=str(error))
            await asyncio.sleep(AGAIN_S)

    async def _answer(self, job: ChunkJob) -> None:
        """Run a chunk, and answer it once."""
        output: ChunkOutput | None = None
        reason = ""
        try:
            output = await self._written(job)
        except Unreachable as error:
            self._lost(str(error))
            return
        except (RefusedCall, Malformed, EngineError) as error:
            reason = str(error)
        finally:
            if self._jobs.get(job.id) is asyncio.current_task():
                del self._jobs[job.id]
            self._names.pop(job.id, None)
            self._ending.discard(job.id)
            self._whole.discard(job.id)
        sink = self._sink
        if sink is None:
            return
        if output is None:
            sink.chunk_failed(self.id, job.id, reason)
        else:
            sink.chunk_finished(self.id, output)

    async def _written(self, job: ChunkJob) -> ChunkOutput:
        """Have a chunk written, in more than one request where its owner ends one without a token."""
        await asyncio.sleep(0)  # the sink is not called from within submit
        facts = self._facts
        assert facts is not None
        if self._asleep:
            raise EngineError("the instance is asleep; wake it first")
        wanted = len(job.token_ids) + job.max_tokens
        if wanted > facts.max_model_tokens:
            raise EngineError(f"{wanted} tokens are more than the {facts.max_model_tokens} that it takes")
        level = await self._level_of(job.sampling)
        seed = seed_of(level, job.seed, len(job.token_ids))
        while True:
            most = 1 if job.id in self._ending else job.max_tokens
            name = self._names[job.id] = self._name()
            written = await self._persist(name, job, most, seed)
            await self._certain()
            if written.token_ids and not (written.ended == "abort" and job.id in self._whole):
                return self._output(job, written)
            if written.ended == "stop":
                raise Malformed("it ended a response without a token")
            await asyncio.sleep(AGAIN_S)

    async def _persist(self, name: str, job: ChunkJob, most: int, seed: int | None) -> ServerChunk:
        """Send a request, again where the connection breaks and the server lives, or has too much to do."""
        for tried in range(1, TRIES + 1):
            try:
                return await self._send(name, job, job.token_ids, most, seed)
            except Unreachable as error:
                self._doubt(str(error))
                if tried == TRIES or not await self.dialect.healthy():
                    raise
            except RefusedCall as error:
                if error.status == UNAUTHORIZED:  # of the server, and no fault of this chunk
                    raise Unreachable(str(error)) from error
                if error.status >= 500:
                    self._doubt(str(error))
                    if not await self.dialect.healthy():
                        raise Unreachable(str(error)) from error
                if tried == TRIES or error.status not in OVERLOADED:
                    raise
            await asyncio.sleep(AGAIN_S * 4 ** (tried - 1))
            name = self._names[job.id] = self._name()
        raise AssertionError("the last try raises")

    async def _send(
        self, name: str, job: ChunkJob, tokens: Sequence[int], most: int, seed: int | None
    ) -> ServerChunk:
        assert self._facts is not None
        self.dialect.names_jobs = self.seer.attached
        try:
            written = await self.dialect.write(name, job, tokens, most, seed, self._salt)
        except UNREADABLE as error:  # such as a token's id of thousands of digits
            raise Malformed(f"its answer to a chunk is none: {describe_flaw(error)}") from error
        return checked(written, job, most, self._facts.vocab_size)

    def _output(self, job: ChunkJob, written: ServerChunk) -> ChunkOutput:
        if any(each != self._label for each in written.versions) and self._sink is not None:
            found = " and ".join(sorted(map(repr, set(written.versions))))
            raise Unreachable(
                f"its weights have changed from {self._label!r} to {found} in the midst of a rollout"
            )
        context, tokens = len(job.token_ids), len(written.token_ids)
        cached, cost = min(written.cached_tokens, context - 1), written.cost
        pooled = min(cost.pool_tokens, cached)
        return ChunkOutput(
            job_id=job.id,
            token_ids=Tokens(written.token_ids),
            logprobs=Logprobs(written.logprobs),
            stopped=written.ended == "stop",
            cached_tokens=cached - pooled,
            pool_tokens=pooled,
            steps=cost.steps,
            drafted_at=cost.drafted_at,
            accepted_at=cost.accepted_at,
            prefilled_tokens=context - cached,
            computed_tokens=context - cached + tokens - 1,
            preemptions=0,
            weight_version=self._version,
            top_logprobs=written.top_logprobs,
            prompt_logprobs=written.prompt_logprobs,
            attachments=written.attachments,
        )

    def _name(self) -> str:
        """Return an id for a request that no other program's have."""
        self._requests += 1
        return f"seer-{self._run}-{self._requests}."  # SGLang ends all whose ids begin with the given one

    @property
    def _salt(self) -> str:
        """A salt that keeps KV of other weights, and of before a reset, from being used."""
        if self._fetch_s is not None:
            return f"seer-{self._siblings.token}-{self._version}-{self._siblings.turns}"
        return f"seer-{self._run}-{self._version}-{self._turns}"

    def _forget(self) -> None:
        """Use no KV that was written until now."""
        self._turns += 1
        self._siblings.turns += 1

    async def write(self, job: ChunkJob) -> ChunkOutput:
        """Have a chunk written that the scheduler has not sent, beside those that it has.

        Raises:
            EngineError: the instance is down, or its server cannot write it.
        """
        if self._sink is None:
            raise EngineError(f"instance {self.id!r} is down")
        self._whole.add(job.id)  # nothing goes on with a part of it
        try:
            return await self._written(job)
        except (Unreachable, RefusedCall, Malformed) as error:
            raise EngineError(f"instance {self.id!r}, the server at {self.address}: {error}") from error
        finally:
            self._names.pop(job.id, None)
            self._whole.discard(job.id)

    # Weights and caches.

    def add_sibling_tokens(self, text: SiblingTokens) -> None:
        """Send it on, if the server drafts for this run."""
        self.seer.push(text)

    def forget_group(self, group_id: str) -> None:
        """Have the server drop what it keeps of the group for this run."""
        self.seer.forget(group_id)

    async def measure_steps(
        self, batch: Sequence[int], draft_tokens: Sequence[int], context_tokens: int | None = None
    ) -> StepTimes:
        """Refuse: the steps of a server cannot be measured from outside."""
        raise EngineError(f"instance {self.id!r} is a server at {self.address}, whose steps are not measured")

    async def reset_cache(self) -> None:
        """Let later chunks use no KV of earlier ones."""
        self._expect_idle("reset its cache")
        self._forget()

    async def update_weights(self, source: WeightSpec, version: int) -> str | None:
        """Have the server load a directory, or look whether its owner has loaded new weights.

        Raises:
            EngineError: it cannot; it was lost.
        """
        if source.path == OWNER and self._sink is None:  # it is looked at when it is back
            self._siblings.version = version
            return None
        self._expect_idle("load weights")
        try:
            if (await self.dialect.load()).paused:
                if source.path != OWNER:
                    raise EngineError(f"instance {self.id!r}: {self._paused}; resume it before")
                self._siblings.version = version
                if self._sink is not None:
                    self._leave_paused(self._sink)
                return None
            if source.path != OWNER:
                if source.directory is None:
                    raise EngineError(
                        f"instance {self.id!r} is a server, which loads weights from directories alone"
                    )
                if source.adapter_config is not None:
                    raise EngineError(
                        f"instance {self.id!r} is a server, which would not load {source} as an"
                        " adapter; merge it with its model, and update by that"
                    )
                await self.dialect.load_weights(source.directory, version)
            self._forget()  # the look uses no KV of the old ones
            fingerprint, _ = await self._look(version)
            if not self._is_compared and self._peer() is not None:
                self._found.clear()  # other weights wrote those responses
                await self._level_of(self._siblings.sampling)
                await self._compare()
        except (Unsupported, RefusedCall, Malformed) as error:
            raise EngineError(f"instance {self.id!r}, the server at {self.address}: {error}") from error
        except Unreachable as error:
            self._lost(str(error))
            raise EngineError(f"instance {self.id!r} was lost: {error}") from error
        self._version = self._siblings.version = version
        return fingerprint

    async def sleep(self) -> int:
        """Take no more chunks; the server's memory is its owner's."""
        if self._sink is None:
            raise EngineError(f"instance {self.id!r} is down")
        if self._jobs:
            raise EngineError(f"instance {self.id!r} runs {len(self._jobs)} chunks")
        if not self._asleep:
            self._forget()
        self._asleep = True
        return 0

    async def wake(self) -> None:
        """Take chunks again."""
        if self._sink is None:
            raise EngineError(f"instance {self.id!r} is down")
        self._asleep = False

    def _leave_paused(self, sink: InstanceSink) -> None:
        self._why_left = self._paused
        sink.leaving(self.id, self._why_left)

    def _expect_idle(self, what: str) -> None:
        state = "is asleep" if self._asleep else ""
        if self._sink is None:
            state = f"is down, for {self._why_left}" if self._why_left else "is down"
        if self._jobs:
            state = f"runs {len(self._jobs)} chunks"
        if state:
            raise EngineError(f"instance {self.id!r} cannot {what}: it {state}")

    # What the server does by itself.

    async def _watch(self) -> None:
        """Report the load; note when the server is gone, silent or paused."""
        misses, loop = 0, asyncio.get_running_loop()
        written: float | None = None
        changed_s = loop.time()
        while True:
            await asyncio.sleep(self._siblings.poll_s)
            try:
                load = await self.dialect.load()
                await self.seer.flush()
            except (Unreachable, RefusedCall, Malformed) as error:
                misses += 1
                self._unsure = True
                if misses > 1 and not await self.dialect.healthy():
                    self._lost(f"it does not answer any more: {error}")
                    return
                continue
            misses = 0
            sink = self._sink
            if sink is None:
                return
            self._unsure |= (load.written or 0.0) < (written or 0.0)
            if self._unsure and self._jobs:
                self._doubt("it does not answer any more")
            sink.reported(
                InstanceReported(
                    self.id,
                    load.running,
                    load.waiting,
                    load.kv_usage,
                    drafting_s=self.seer.drafting_s,
                    drafting=self.seer.drafting,
                )
            )
            if load.paused and not self._asleep:
                self._leave_paused(sink)
                return
            if not self._jobs or load.written is None or load.written != written:
                written, changed_s = load.written, loop.time()
            elif loop.time() - changed_s > self._siblings.silence_timeout_s:
                self._lost(f"it has written nothing for {self._siblings.silence_timeout_s:g} s")
                return

    def _leave(self, reason: str) -> None:
        """Begin anew: placers were given figures of a server that shares KV."""
        if self._sink is not None:
            self._sink.leaving(self.id, f"the server at {self.address}: {reason}")

    def _lost(self, reason: str) -> None:
        sink, self._sink = self._sink, None
        if sink is None:
            return
        lived_s = asyncio.get_running_loop().time() - self._started_s
        self._short_lives = self._short_lives + 1 if lived_s < SHORT_LIFE_S else 0
        for table in (self._names, self._ending, self._whole):
            table.clear()
        jobs = [each for each in self._jobs.values() if each is not asyncio.current_task()]
        self._jobs.clear()
        for task in jobs:
            self._drop(task)
        sink.lost(self.id, f"the server at {self.address}: {reason}")
