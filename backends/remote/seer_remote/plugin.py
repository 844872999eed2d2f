"""The plug-in ``remote``: settings, and instances made from them.  Nothing is asked of a server yet."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

from msgspec import Meta, Struct
from seer_worker.client.fleet import ProcessSettings
from seer_worker.client.tokenizer_reader import TokenizerReader

from seer_core.errors import ConfigError, EngineError
from seer_core.model import Exactness
from seer_core.plugins.config_types import NotNegative, Seconds
from seer_core.plugins.hookspecs import Check, Startup, hookimpl
from seer_remote.connection import Connection
from seer_remote.dialect import Dialect, ServerFacts
from seer_remote.fleet import RemoteFleet, addresses, in_a_thread, read_addresses, read_token
from seer_remote.handles import Handles, load_handles
from seer_remote.router import list_servers
from seer_remote.sglang import Sglang
from seer_remote.vllm import Vllm

__all__ = ["Settings", "seer_doctor", "seer_make_engines"]

Count = Annotated[int, Meta(ge=0)]

DIALECTS: dict[str, Callable[[Connection], Dialect]] = {"vllm": Vllm, "sglang": Sglang}


class Settings(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """``[engine.remote]``: servers that run already; each is an instance.

    Model, limits and KV are asked of the servers.
    """

    urls: tuple[str, ...] = ()
    """The addresses of the servers, as in ``http://127.0.0.1:8000``."""
    urls_file: str | None = None
    """A file with an address on each line, relative to the config file, in place of ``urls``. It is read
    again while a run goes on: servers join and leave with their lines.
    """
    router: str | None = None
    """The address of a router that lists its servers, as SGLang's and vLLM's do, in place of ``urls``. It is
    asked again while a run goes on. Chunks go to the servers themselves.
    """
    handles: str | None = None
    """A function ``MODULE:FUNCTION`` that returns servers as objects by name, such as actors of Ray, in place
    of ``urls``.
    """
    dialect: Literal["vllm", "sglang"] = "vllm"
    """The kind of the servers."""
    require: Exactness = "exact"
    """How far a response must depend on its seed alone: ``exact``, however it is divided and wherever it
    runs; ``reproducible``, with the same chunks; ``distributed``, not at all. A server that does less is
    refused.
    """
    shared_kv: bool | None = None
    """Whether a server finds the KV that another has written, as with a connector of Seer's. Without it, this
    is tried at the start, which needs servers that report cached tokens. A storage of several SGLang servers
    (HiCache) has not been tried.
    """
    processed_logprobs: bool = False
    """Whether servers may report log-probs after temperature and cuts in place of the model's own; without
    it, a sampling under which they differ is refused.
    """
    divided_attachments: tuple[str, ...] = ()
    """Further names in prompts' ``attachments`` under which responses are divided, such as
    ``sampling_params.extra_args`` where a logits processor of yours looks at no place in the response.
    """
    model: str | None = None
    """A directory with the files of the model and its tokenizer, relative to the config file. Without it:
    where the servers have them, if that is here too; otherwise prompts must be token ids.
    """
    token_env: str = ""
    """The environment variable with the token that the servers want."""
    token_file: str | None = None
    """A file with that token, relative to the config file; or with a line for each server, its address and
    its token.
    """
    ca_file: str | None = None
    """Certificates to trust in place of the system's, for addresses with ``https``; relative to the config
    file.
    """
    max_running: Count = 0
    """The most requests that a server decodes at once; 0 asks it, and means 256 if it does not say."""
    kv_tokens: Count = 0
    """The tokens whose KV a server holds; 0 asks it."""
    poll_s: Seconds = 1.0
    """How often each server is asked how busy it is."""
    connect_timeout_s: Seconds = 10.0
    """How long a connection may take to be made."""
    start_timeout_s: NotNegative = 60.0
    """How long the first server is waited for."""
    silence_timeout_s: Seconds = 300.0
    """A server that writes no token for so long while it has chunks counts as lost."""


@hookimpl
def seer_make_engines(settings: Settings, startup: Startup) -> RemoteFleet:
    """Return an instance for each server."""
    _check(settings)
    connect = partial(_connect, settings, startup)
    kind: str = settings.dialect
    make = DIALECTS[settings.dialect]
    watch: Callable[[], list[str]] | None = None
    if settings.handles is not None:
        handles = load_handles(settings.handles)
        kind, urls = "handles", list(handles)

        def make(connection: Connection) -> Dialect:
            return Handles(connection, handles[connection.url])

    elif settings.urls:
        urls = addresses(settings.urls, "engine.remote.urls")
    else:
        watch = partial(_watched, settings, startup)
        urls = in_a_thread(watch)
    for url in urls:
        connect(url)  # names a token that is missing before anything is asked
    return RemoteFleet(
        urls,
        kind,
        make,
        connect,
        watch,
        require=settings.require,
        processed_logprobs=settings.processed_logprobs,
        shared_kv=settings.shared_kv,
        divided_attachments=settings.divided_attachments,
        sampling=startup.sampling,
        model_dir=None if settings.model is None else startup.path(settings.model),
        kv_tokens=settings.kv_tokens,
        max_running=settings.max_running,
        poll_s=settings.poll_s,
        silence_timeout_s=settings.silence_timeout_s,
        start_timeout_s=settings.start_timeout_s,
        reader=_reader,
    )


@hookimpl
def seer_doctor(settings: Settings | None, startup: Startup | None) -> list[Check]:
    """Ask each server what it is."""
    if settings is None or startup is None:
        return []
    try:
        fleet = seer_make_engines(settings, startup)
    except EngineError as error:
        return [Check("router", False, str(error), "start it, or mend [engine.remote]")]
    answers = asyncio.run(fleet.ask())
    return [_finding(url, answer) for url, answer in answers.items()]


def _finding(url: str, answer: ServerFacts | Exception) -> Check:
    if isinstance(answer, Exception):
        return Check(f"server {url}", False, str(answer), "start it, or mend [engine.remote]")
    finding = f"{answer.engine} serves {answer.model}, {answer.kv_tokens:,} tokens of KV"
    return Check(f"server {url}", True, "; ".join([finding, *answer.lacks]), "")


def _check(settings: Settings) -> None:
    named = [bool(settings.urls), *(each is not None for each in _sources(settings))]
    if sum(named) != 1:
        raise ConfigError(
            "[engine.remote] names no server, or names them twice; give one of urls, urls_file, router and"
            " handles"
        )
    if settings.token_env and settings.token_file is not None:
        raise ConfigError("[engine.remote] has token_env and token_file; keep one")


def _sources(settings: Settings) -> tuple[str | None, ...]:
    return settings.urls_file, settings.router, settings.handles


def _watched(settings: Settings, startup: Startup) -> list[str]:
    """Return the addresses of now."""
    if settings.urls_file is not None:
        return read_addresses(startup.path(settings.urls_file))
    [router] = addresses([settings.router or ""], "engine.remote.router")
    return addresses(list_servers(partial(_connect, settings, startup, router)), router)


def _connect(settings: Settings, startup: Startup, url: str) -> Connection:
    file = None if settings.token_file is None else startup.path(settings.token_file)
    authorities = ""
    if settings.ca_file is not None:
        authorities = str(startup.path(settings.ca_file))
        if not os.access(authorities, os.R_OK):
            raise ConfigError(f"engine.remote.ca_file: {authorities} cannot be read")
    token = read_token(settings.token_env, file, url)
    return Connection(url, token, authorities, settings.connect_timeout_s)


def _reader(model_dir: Path) -> TokenizerReader:
    """Return what reads a tokenizer in a process of its own."""
    launch = ProcessSettings(fork_server=False).launch(
        "remote", "", {}, dict(os.environ), None, tokenizer_dir=str(model_dir.absolute())
    )
    return TokenizerReader(launch, model_dir)
