"""The fleet: which servers there are, what all of them serve, and those that join and leave."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from secrets import token_hex
from typing import Any, TypeVar
from urllib.parse import urlsplit

import structlog
from seer_worker.client.digest import digest_of
from seer_worker.client.tokenizer_reader import TokenizerReader
from seer_worker.tokenizer import ModelTokenizer, has_tokenizer

from seer_core.errors import ConfigError, EngineError, OtherWeightsError, SeerError, quote
from seer_core.model import Exactness, Sampling
from seer_core.ports.clock import RealClock
from seer_core.ports.engine import Clock, InstanceClient, ModelInfo, Tokenizer
from seer_remote.connection import Connection, Malformed, RefusedCall, Unreachable
from seer_remote.dialect import TEXT, Dialect, ServerFacts
from seer_remote.exactness import Likeness
from seer_remote.instance import RemoteInstance

__all__ = ["RemoteFleet", "addresses", "in_a_thread", "read_addresses", "read_token"]

log = structlog.get_logger("seer")

T = TypeVar("T")

LOOK_S = 1.0
"""How often a wait for the first server looks, and how often the file of addresses is read."""
FIRST_WAIT_S, LONGEST_WAIT_S = 1.0, 60.0
"""How long a server that joins without the weights of the others is not looked at, first and at most."""


def addresses(urls: Iterable[str], where: str) -> list[str]:
    """Return addresses without what is the same in other words.

    Raises:
        ConfigError: one is none, or stands there twice.
    """
    found: list[str] = []
    for url in urls:
        plain = url.strip().rstrip("/")
        try:
            parts = urlsplit(plain)
            good = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        except ValueError:
            good = False
        if not good:
            raise ConfigError(f"{where}: {quote(url)} is no address; write http://HOST:PORT")
        if parts.username or parts.query or parts.fragment:
            raise ConfigError(
                f"{where}: {quote(url)} has more than host, port and path; a token stands in token_env or"
                " token_file"
            )
        if plain in found:
            raise ConfigError(f"{where}: {quote(url)} is named twice; each server is one instance")
        found.append(plain)
    return found


class RemoteFleet:
    """Instances of servers; ``model`` and ``tokenizer`` are asked of the first that answers.

    ``urls`` are those of the start.  Where they change, ``watch`` returns those of now.
    """

    def __init__(
        self,
        urls: Sequence[str],
        kind: str,
        make: Callable[[Connection], Dialect],
        connect: Callable[[str], Connection],
        watch: Callable[[], list[str]] | None,
        *,
        require: Exactness,
        processed_logprobs: bool,
        shared_kv: bool | None,
        divided_attachments: Sequence[str],
        sampling: Sampling,
        model_dir: Path | None,
        kv_tokens: int,
        max_running: int,
        poll_s: float,
        silence_timeout_s: float,
        start_timeout_s: float,
        reader: Callable[[Path], TokenizerReader],
    ) -> None:
        self.require: Exactness = require
        self.processed_logprobs = processed_logprobs
        self.shared_kv = shared_kv
        self.turns = 0
        self.token = token_hex(4)
        self.sampling = sampling
        self.kv_tokens = kv_tokens
        self.max_running = max_running
        self.poll_s = poll_s
        self.silence_timeout_s = silence_timeout_s
        self.version = 0
        self.differ = False
        self.clock: Clock = RealClock()
        self._kind, self._make, self._connect, self._watch = kind, make, connect, watch
        self._model_dir = model_dir
        self._divided_attachments = divided_attachments
        self._start_timeout_s = start_timeout_s
        self._reader = reader
        self._marks: dict[int, list[Likeness]] = {}
        """Of each version of the weights: one server of each kind, of which there should be one."""
        self._asking = threading.Lock()
        self._names: dict[str, str] = {}
        self._latest: dict[str, RemoteInstance] = {}
        """Of each address, also of one that joined later: its instance, by its name."""
        self._first: tuple[str, ServerFacts] | None = None
        self._model: ModelInfo | None = None
        self._tokenizer: Tokenizer | None = None
        self.engines = [self._instance(url) for url in urls]

    @property
    def model(self) -> ModelInfo:
        """The limits of the servers' model.

        Raises:
            EngineError: no server answers within ``start_timeout_s``, or none is of use.
        """
        self._ask()
        assert self._model is not None
        return self._model

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The model's tokenizer, if its files are here; raises as ``model``."""
        self._ask()
        return self._tokenizer

    async def ask(self) -> dict[str, ServerFacts | Exception]:
        """Return what each server says of itself, or why it does not."""
        return await _ask_all([engine.address for engine in self.engines], self._connect, self._make)

    async def another(self, url: str) -> Dialect | None:
        """Return another server that writes, its connection open; None if there is none."""
        for engine in self.engines:
            if engine.address == url:
                continue
            connection = self._connect(engine.address)
            connection.open()
            dialect = self._make(connection)
            try:
                await dialect.facts()
                if not (await dialect.load()).paused:
                    return dialect
            except BaseException as error:
                await connection.close()
                if not isinstance(error, Unreachable | RefusedCall | Malformed):
                    raise
            else:
                await connection.close()
        return None

    def in_use(self) -> Iterable[RemoteInstance]:
        """Iterate over the servers that chunks are sent to."""
        return (instance for instance in self._latest.values() if instance.takes_chunks)

    async def ready(self) -> None:
        """Wait until the model is known; raises as ``model``."""
        if self._model is None:
            await asyncio.to_thread(self._ask)

    def expect(self, url: str, facts: ServerFacts) -> None:
        """Raise EngineError if a server does not serve what the first one does."""
        assert self._first is not None
        other_url, other = self._first
        for name, mine, theirs in (
            ("engine", facts.engine, other.engine),
            ("model", Path(facts.directory).name, Path(other.directory).name),
            ("longest context", facts.max_model_tokens, other.max_model_tokens),
            ("vocabulary", facts.vocab_size, other.vocab_size),
            ("controls", _controls(facts), _controls(other)),
        ):
            if mine != theirs:
                raise EngineError(
                    f"the server at {url} has the {name} {mine}, and the one at {other_url} {theirs}; a"
                    " response may run on either, so start them alike, or leave one out of urls"
                )
        if facts.tokens_of_text and other.tokens_of_text and facts.tokens_of_text != other.tokens_of_text:
            raise EngineError(
                f"the servers at {url} and {other_url} have different tokenizers; give them the same, or"
                " leave one out of urls"
            )

    def mark(self, version: int, marks: Likeness) -> tuple[str, str]:
        """Return a fingerprint, which servers that may have the same weights have in common.

        And why it is not that of the first server with this version; empty if it is.
        """
        kinds = self._marks.setdefault(version, [])
        flaws = [marks.flaw(each) for each in kinds]
        number = flaws.index("") if "" in flaws else len(kinds)
        if number == len(kinds):
            kinds.append(marks)
        for old in [each for each in self._marks if each < version]:
            del self._marks[old]
        # Another process's are not compared with these: its recipe, before the colon, has another token.
        return f"served-{self.token}:{version}.{number}", flaws[0] if number else ""

    async def follow(
        self,
        join: Callable[[InstanceClient], Awaitable[object]],
        leave: Callable[[str], Awaitable[object]],
    ) -> None:
        """Let instances join and leave as the file of addresses says; ends only by its cancellation."""
        if self._watch is None:
            return
        here = {engine.address: engine for engine in self.engines}
        complaint = ""
        loop = asyncio.get_running_loop()
        waits: dict[str, tuple[float, float, int]] = {}
        """Of servers that lack the weights of the others: until when, for how long, which version."""
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                wanted = await asyncio.to_thread(self._watch)
                if not wanted:  # a file that is being written, or a router that has just started
                    raise EngineError("no server is listed any more; those of before stay in use")
                complaint = ""
            except SeerError as error:
                if str(error) != complaint:
                    complaint = str(error)
                    log.error("addresses_unread", error=complaint)
                continue
            for url in [url for url in here if url not in wanted]:
                with suppress(EngineError):
                    await leave(here[url].id)
                del here[url]
            for url in [url for url in wanted if url not in here]:
                until_s, wait_s, version = waits.pop(url, (0.0, FIRST_WAIT_S, 0))
                if version == self.version and loop.time() < until_s:
                    waits[url] = until_s, wait_s, version
                    continue
                engine = self._instance(url)
                try:
                    await join(engine)
                except EngineError as error:  # such as one that is not up yet; it is tried again
                    log.warning("server_not_joined", url=url, error=str(error))
                    if isinstance(error, OtherWeightsError):
                        longer_s = min(2 * wait_s, LONGEST_WAIT_S)
                        waits[url] = loop.time() + wait_s, longer_s, self.version
                else:
                    here[url] = engine

    def _instance(self, url: str) -> RemoteInstance:
        name = self._names.setdefault(url, f"remote-{len(self._names)}")
        instance = self._latest[name] = RemoteInstance(name, self._kind, self._connect(url), self, self._make)
        return instance

    # The model.

    def _ask(self) -> None:
        with self._asking:
            if self._model is None:
                self._ask_first()

    def _ask_first(self) -> None:
        urls = [engine.address for engine in self.engines]
        if self._watch is not None:
            urls = urls or in_a_thread(self._watch)
            if not urls:
                raise EngineError("[engine.remote] lists no server yet")
        url, facts = _in_a_loop(self._first_facts(urls))
        self._first = url, facts
        place = self._find_files(facts)
        digest, tokenizer = "", None
        if place is not None:
            digest = digest_of(place)
            if has_tokenizer(place):
                tokenizer = ModelTokenizer(place, reader=self._reader(place))
                own = tuple(tokenizer.encode(TEXT))
                if facts.tokens_of_text and own != facts.tokens_of_text:
                    raise EngineError(
                        f"the tokenizer in {place} is not that of the server at {url}; name the directory"
                        " that it serves in model of [engine.remote]"
                    )
        dialect = self._make(self._connect(url))
        self._tokenizer = tokenizer
        self._model = ModelInfo(
            facts.vocab_size,
            facts.max_model_tokens,
            dialect.max_temperature,
            digest=digest,
            controls=facts.controls,
            whole_controls=facts.whole_controls,
            divided_attachments=(*facts.divided_attachments, *self._divided_attachments),
        )

    def _find_files(self, facts: ServerFacts) -> Path | None:
        """Return where the model's files are on this machine."""
        if self._model_dir is not None:
            if not (self._model_dir / "config.json").is_file():
                raise ConfigError(f"engine.remote.model: {self._model_dir} has no config.json; name a model")
            return self._model_dir
        place = Path(facts.directory)
        if place.is_absolute() and (place / "config.json").is_file():
            return place
        log.info(
            "model_not_here", model=facts.directory, effect="prompts must be token ids", remedy="set model"
        )
        return None

    async def _first_facts(self, urls: Sequence[str]) -> tuple[str, ServerFacts]:
        """Return what the first server says that answers, in the order of the addresses."""
        until_s = time.monotonic() + self._start_timeout_s
        told = False
        while True:
            answers = await _ask_all(urls, self._connect, self._make)
            for url, answer in answers.items():
                if isinstance(answer, ServerFacts):
                    return url, answer
            for url, answer in answers.items():
                if isinstance(answer, Exception) and not isinstance(answer, Unreachable):
                    raise EngineError(f"the server at {url} is of no use: {answer}") from answer
            if time.monotonic() >= until_s:
                url, answer = next(iter(answers.items()))
                raise EngineError(
                    f"no server answers: {url}: {answer}; start it, mend urls of [engine.remote], or raise"
                    " start_timeout_s there if it is still starting"
                )
            if not told:
                log.info("waiting_for_servers", urls=list(urls), at_most_s=self._start_timeout_s)
                told = True
            await asyncio.sleep(LOOK_S)


def _controls(facts: ServerFacts) -> str:
    """Return the controls that hold over chunks, and those that do not."""
    divided = ", ".join(name for name in facts.controls if name not in facts.whole_controls)
    return f"{divided}; within one request {', '.join(facts.whole_controls)}"


async def _ask_all(
    urls: Iterable[str], connect: Callable[[str], Connection], make: Callable[[Connection], Dialect]
) -> dict[str, ServerFacts | Exception]:
    """Return what each server says of itself, or why it does not."""

    async def ask(url: str) -> ServerFacts | Exception:
        connection = connect(url)
        connection.open()
        dialect = make(connection)
        try:
            facts = await dialect.facts()
            return facts if await dialect.healthy() else Unreachable("it is not healthy")
        except (Unreachable, RefusedCall, Malformed) as error:
            return error
        finally:
            await connection.close()

    urls = list(urls)
    return dict(zip(urls, await asyncio.gather(*map(ask, urls)), strict=True))


def in_a_thread(work: Callable[[], T]) -> T:
    """Return what ``work`` does, which may run a loop of its own, also where one runs already."""

    async def done() -> T:
        return await asyncio.to_thread(work)

    return _in_a_loop(done())


def _in_a_loop(work: Coroutine[Any, Any, T]) -> T:
    """Run ``work`` to its end in a thread of its own: a loop may run in this one.  Ctrl-C ends it."""
    answer: Future[T] = Future()
    begun: Future[tuple[asyncio.AbstractEventLoop, asyncio.Task[T]]] = Future()

    async def run() -> T:
        task = asyncio.ensure_future(work)
        begun.set_result((asyncio.get_running_loop(), task))
        return await task

    def live() -> None:
        try:
            answer.set_result(asyncio.run(run()))
        except BaseException as error:
            answer.set_exception(error)

    thread = threading.Thread(target=live, name="seer-remote", daemon=True)
    thread.start()
    loop, task = begun.result()
    try:
        return answer.result()
    except BaseException:
        with suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(task.cancel)
        raise
    finally:
        thread.join()


def read_addresses(path: Path) -> list[str]:
    """Return the addresses in a file, one a line; lines that begin with # are notes.

    Raises:
        ConfigError: it cannot be read, or a line is no address.
    """
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"engine.remote.urls_file: {path} cannot be read: {error}") from error
    lines = (line.strip() for line in text.splitlines())
    return addresses((line for line in lines if line and not line.startswith("#")), str(path))


def read_token(variable: str, file: Path | None, url: str) -> str:
    """Return the token for a server: the variable's, or that of the file's line for it or for all.

    Raises:
        ConfigError: what is named is not there, or has no token.
    """
    if variable:
        token = os.environ.get(variable, "").strip()
        if not token:
            raise ConfigError(f"engine.remote.token_env: the variable {variable} is not set")
        return token
    if file is None:
        return ""
    try:
        lines = [line.split() for line in file.read_text("utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"engine.remote.token_file: {file} cannot be read: {error}") from error
    for line in lines:
        if len(line) == 2 and line[0].rstrip("/") == url:
            return line[1]
    for line in lines:
        if len(line) == 1:
            return line[0]
    raise ConfigError(
        f"engine.remote.token_file: {file} has no token for {url}; write a line with the address and its"
        " token, or one with a token for all"
    )
