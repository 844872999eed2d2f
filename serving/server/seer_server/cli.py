"""``seer serve``."""

from __future__ import annotations

import errno
import socket
import sys
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path

import click
import uvicorn
from seer_cli.common import config_options, main_options
from seer_cli.dashboard_run import watched
from seer_cli.output import InputPath
from seer_cli.report.options import DASHBOARD_OPTION
from seer_host.config_files import Config
from seer_host.off_switch import is_off
from seer_host.viewer_port import allow_files
from seer_journal import DiskJournal
from seer_session.runtime import Runtime

from seer_core.errors import ConfigError
from seer_core.ports.policy import Observer
from seer_server.app import make_app
from seer_server.broker import Trust
from seer_server.http import is_loopback
from seer_server.parsing import ParserNames
from seer_server.process import OrderlyServer
from seer_server.shadow_recorder import ShadowRecorder
from seer_server.tokens import own_token, read_token
from seer_server.trajectories import IDLE_S

__all__ = ["serve_command"]

WINDOW_S = 600.0
"""The page has the latest seconds: so many at least, and twice as many at most."""


@click.command("serve")
@main_options
@config_options
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option(
    "--port", type=click.IntRange(0, 65535), default=8000, show_default=True, help="0: any free one."
)
@click.option(
    "--model",
    default="",
    help="Name under which the model is served.  [default: that of [engine.remote], otherwise seer]",
)
@click.option(
    "--token-file",
    type=InputPath(),
    help="File with the token that clients must bring.  [default: one that is made for the port]",
)
@click.option(
    "--open-completions",
    is_flag=True,
    help="Answer completions and chats of this machine's programs without the token.",
)
@click.option(
    "--weights-root",
    "weight_roots",
    multiple=True,
    type=click.Path(path_type=Path, exists=True, file_okay=False, resolve_path=True),
    metavar="DIR",
    help="Load weights from directories below this one, if a trainer names them; may repeat.",
)
@click.option(
    "--journal",
    "journal_dir",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="DIR",
    help="Keep what is written here: groups that come again, after a death of the server or of their client,"
    " go on where they were.",
)
@click.option(
    "--most-requests",
    type=click.IntRange(1),
    default=4096,
    show_default=True,
    help="Responses that may be unfinished at a time; more are refused, with the time to try again.",
)
@click.option(
    "--trajectory-idle-s",
    type=click.FloatRange(0, min_open=True),
    default=IDLE_S,
    show_default=True,
    help="Seconds without a turn after which an agent's trajectory is forgotten, and its KV dropped.",
)
@click.option(
    "--drain-s",
    type=click.IntRange(0),
    default=30,
    show_default=True,
    help="Seconds that responses have to end in, once the server was asked to end.",
)
@click.option(
    "--tool-call-parser",
    metavar="NAME",
    help="Parser of calls of tools, by the name that vLLM's server, or SGLang's, has for it: hermes, ...",
)
@click.option(
    "--reasoning-parser",
    metavar="NAME",
    help="Parser of reasoning, by the name that vLLM's server, or SGLang's, has for it: qwen3, ...",
)
@click.option(
    "--most-fallbacks",
    type=click.IntRange(0),
    default=1024,
    show_default=True,
    help="Responses of a run that servers may write without the scheduler, where it fails.",
)
@click.option(
    "--stall-s",
    type=click.FloatRange(0),
    default=0.0,
    show_default=True,
    help="The scheduler has failed if it sends no chunk for so long while responses wait; 0 is never.",
)
@click.option(
    "--canary",
    type=click.IntRange(0),
    default=0,
    show_default=True,
    help="Responses for each version of the weights that one server writes again whole, to compare.",
)
@click.option(
    "--canary-stop",
    type=click.IntRange(0),
    default=0,
    show_default=True,
    help="Do without the scheduler after so many that differ; 0 is never.",
)
@click.option(
    "--watch",
    "watch_file",
    type=click.Path(path_type=Path, dir_okay=False, writable=True),
    metavar="FILE",
    help="With SEER=off: note the lengths and times of requests, for `seer shadow`.",
)
@DASHBOARD_OPTION
def serve_command(
    config: Config,
    host: str,
    port: int,
    model: str,
    token_file: Path | None,
    open_completions: bool,
    weight_roots: tuple[Path, ...],
    journal_dir: Path | None,
    most_requests: int,
    trajectory_idle_s: float,
    drain_s: int,
    tool_call_parser: str | None,
    reasoning_parser: str | None,
    most_fallbacks: int,
    stall_s: float,
    canary: int,
    canary_stop: int,
    watch_file: Path | None,
    dashboard_port: int | None,
) -> None:
    """Serve OpenAI's completions API from the engines of CONFIG, scheduled by its plug-ins.

    Clients of vLLM's or SGLang's server point at it instead. It listens on this machine alone, unless --host
    names another address.

    Every request needs a token, as OpenAI's API key: Authorization: Bearer TOKEN. Without --token-file the
    server makes one, and says which file holds it; seer-client finds it there by itself.

    \b
    Example:
      seer serve examples/tiny_reasoner/demo.toml --port 8000 --open-completions
      curl 127.0.0.1:8000/v1/completions -H 'Content-Type: application/json' \\
          -d '{"prompt": "how far", "n": 4, "max_tokens": 64, "stream": true}'
    """
    if token_file is None and not is_loopback(host):
        raise ConfigError(
            f"--host {host} lets other machines in; name a --token-file that holds what they must bring"
        )
    if watch_file is not None and not is_off():
        raise ConfigError("--watch notes what Seer does not schedule; set SEER=off too")
    journal = None if journal_dir is None else DiskJournal.of_session(journal_dir)
    sockets = _bind(host, port)
    any_port = port == 0
    file = None
    watching = ExitStack()
    try:
        observers, controls = watching.enter_context(watched(dashboard_port, model or "seer", WINDOW_S))
        port = sockets[0].getsockname()[1]
        if token_file is not None:
            token = read_token(token_file)
        else:
            token, file = own_token(port, new=True)
            click.echo(f"clients bring the token in {file}, a new one for each start", err=True)
        app = make_app(
            partial(_make_runtime, config),
            model,
            token,
            most_requests,
            trust=Trust(most_fallbacks, stall_s, canary, canary_stop, partial(_renew, config)),
            off=is_off(),
            recorder=None if watch_file is None else ShadowRecorder(watch_file),
            open_completions=open_completions,
            weight_roots=weight_roots,
            journal=journal,
            observers=observers,
            controls=controls,
            parsers=ParserNames(tool_call_parser, reasoning_parser),
            trajectory_idle_s=trajectory_idle_s,
        )
        settings = uvicorn.Config(app, access_log=False, lifespan="on", ws="none")
        place = f"[{host}]" if ":" in host else host
        server = OrderlyServer(
            settings,
            allow_files(),
            drain_s,
            lambda: click.echo(f"Seer running on http://{place}:{port} (Ctrl-C ends it)", err=True),
        )
        with suppress(KeyboardInterrupt):
            server.run(sockets)
    finally:
        watching.close()
        for each in sockets:
            each.close()
        if journal is not None:
            journal.close()
        if any_port and file is not None:
            file.unlink(missing_ok=True)  # no other server will have this port
    if not server.started:
        sys.exit(3)  # as uvicorn's own command


async def _renew(config: Config, runtime: Runtime, observers: Sequence[Observer]) -> None:
    await runtime.renew_strategies(config, observers)


def _make_runtime(config: Config, observers: Sequence[Observer]) -> Runtime:
    runtime = Runtime.from_config(config, observers)
    runtime.refuse_environment("seer serve")
    return runtime


def _bind(host: str, port: int) -> list[socket.socket]:
    """Take the port before the engines start; with port 0 a free one, of the first address alone.

    Raises:
        ConfigError: it cannot be had.
    """
    with ExitStack() as undo:
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
            sockets = []
            for family, kind, protocol, _, address in found if port else found[:1]:
                sockets.append(undo.enter_context(socket.socket(family, kind, protocol)))
                sockets[-1].setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:
                    sockets[-1].setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                sockets[-1].bind(address)
        except OSError as error:
            fault = f"cannot listen at port {port} of {host}: {error.strerror}; give another --host or --port"
            if error.errno == errno.EADDRINUSE:
                fault = f"port {port} of {host} is taken; give another one: --port {port + 1}"
            raise ConfigError(fault) from error
        undo.pop_all()
    return sockets
