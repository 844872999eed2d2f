"""``seer serve``."""

from __future__ import annotations

import errno
import socket
import sys
from contextlib import suppress
from functools import partial
from pathlib import Path

import click
import uvicorn
from seer_cli.common import config_options, main_options
from seer_cli.output import InputPath

from seer_core.errors import ConfigError
from seer_core.plugins.config import Config
from seer_core.runtime.runtime import Runtime
from seer_server.app import make_app
from seer_server.http import is_loopback
from seer_server.process import OrderlyServer, allow_files

__all__ = ["serve_command"]


@click.command("serve")
@main_options
@config_options
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option(
    "--port", type=click.IntRange(0, 65535), default=8000, show_default=True, help="0: any free one."
)
@click.option("--model", default="seer", show_default=True, help="Name under which the model is served.")
@click.option("--token-file", type=InputPath(), help="File with the token that clients must bring.")
@click.option(
    "--most-requests",
    type=click.IntRange(1),
    default=4096,
    show_default=True,
    help="Responses that may be unfinished at a time; more are refused, with the time to try again.",
)
@click.option(
    "--drain-s",
    type=click.IntRange(0),
    default=30,
    show_default=True,
    help="Seconds that responses have to end in, once the server was asked to end.",
)
def serve_command(
    config: Config,
    host: str,
    port: int,
    model: str,
    token_file: Path | None,
    most_requests: int,
    drain_s: int,
) -> None:
    """Serve OpenAI's completions API from the engines of CONFIG, scheduled by its plug-ins.

    Clients of vLLM's or SGLang's server point at it instead. It listens on this machine alone, unless --host
    names another address; then it requires a token. Without a token it refuses requests whose Host or Origin
    is not localhost, so that no web page from elsewhere can send it any.

    \b
    Example:
      seer serve examples/tiny_reasoner/demo.toml --port 8000
      curl localhost:8000/v1/completions -H 'Content-Type: application/json' \\
          -d '{"prompt": "how far", "n": 4, "max_tokens": 64, "stream": true}'
    """
    token = None if token_file is None else _read_token(token_file)
    if token is None and not is_loopback(host):
        raise ConfigError(
            f"--host {host} lets other machines in; name a --token-file that holds what they must bring"
        )
    _check_free(host, port)
    app = make_app(partial(Runtime.from_config, config), model, token, most_requests)
    settings = uvicorn.Config(
        app, host=host, port=port, access_log=False, lifespan="on", timeout_graceful_shutdown=drain_s
    )
    server = OrderlyServer(settings, allow_files())
    with suppress(KeyboardInterrupt):
        server.run()
    if not server.started:
        sys.exit(3)  # as uvicorn's own command


def _check_free(host: str, port: int) -> None:
    """Look whether the port is free, for uvicorn looks after the engines have started."""
    with suppress(socket.gaierror):
        for family, kind, protocol, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
            try:
                with socket.socket(family, kind, protocol) as probe:
                    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                    probe.bind(address)
            except OSError as error:  # others, such as a family that the kernel has not, are no obstacle
                if error.errno == errno.EADDRINUSE:
                    raise ConfigError(
                        f"port {port} of {host} is taken; give another one: --port {port + 1}"
                    ) from error


def _read_token(path: Path) -> str:
    try:
        token = path.read_text("utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}; name a file that holds a token") from error
    if not token.isascii() or len(token) < 16:
        raise ConfigError(
            f"the token in {path} is no 16 ASCII characters or more; make one: openssl rand -hex 32"
        )
    return token
