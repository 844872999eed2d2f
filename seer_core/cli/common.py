"""What every command shares: options, errors without tracebacks, logs on standard error."""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
from collections.abc import Callable, Coroutine
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar

import click
import structlog
from rich.console import Console

from seer_core.config import Config, load_config
from seer_core.errors import ConfigError, EngineError, SeerError

__all__ = ["config_options", "load", "main_options", "run_async", "table_console"]

PLAIN_WIDTH = 130

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")

INTERRUPTED = 130
"""Exit status after Ctrl-C, as shells have it: 128 + SIGINT."""


class _Stderr:
    """Standard error as it is now; the live display puts itself in its place for a while."""

    def write(self, text: str) -> int:
        return sys.stderr.write(text)

    def flush(self) -> None:
        sys.stderr.flush()


def main_options(command: F) -> F:
    """Add ``--debug`` and ``--log-level``, and turn errors into one line and an exit status."""

    @click.option("--debug", is_flag=True, help="Show tracebacks.")
    @click.option(
        "--log-level",
        type=click.Choice(["debug", "info", "warning", "error"]),
        default="info",
        show_default=True,
        help="Least level of the events logged on standard error.",
    )
    @wraps(command)
    def wrapped(*arguments: Any, debug: bool, log_level: str, **options: Any) -> Any:
        _configure_logs(log_level)
        try:
            return command(*arguments, **options)
        except SeerError as error:
            if debug:
                raise
            click.echo(f"error: {error}", err=True)
            sys.exit(1 if isinstance(error, EngineError) else 2)
        except (KeyboardInterrupt, asyncio.CancelledError):
            click.echo("interrupted; what had finished is kept", err=True)
            sys.exit(INTERRUPTED)

    return wrapped  # type: ignore[return-value]


def config_options(command: F) -> F:
    """Add the CONFIG argument with ``--set`` and ``-p``, resolved into a ``Config``."""

    @click.argument("config", type=click.Path(path_type=Path))
    @click.option(
        "--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Change one value; may repeat."
    )
    @click.option("-p", "disabled", multiple=True, metavar="no:NAME", help="Leave out a plug-in; may repeat.")
    @wraps(command)
    def wrapped(
        *arguments: Any, config: Path, overrides: tuple[str, ...], disabled: tuple[str, ...], **options: Any
    ) -> Any:
        return command(*arguments, config=load(config, overrides, disabled), **options)

    return wrapped  # type: ignore[return-value]


def load(path: Path, overrides: tuple[str, ...] = (), disabled: tuple[str, ...] = ()) -> Config:
    """Load a config as the command line changes it."""
    for text in disabled:
        if not text.startswith("no:"):
            raise ConfigError(f"-p {text}: only no:NAME is understood; enable plug-ins in [seer].plugins")
    return load_config(path, overrides, [text.removeprefix("no:") for text in disabled])


def run_async(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine; SIGTERM ends it like Ctrl-C, so that engines are always stopped."""

    async def guarded() -> T:
        task = asyncio.current_task()
        assert task is not None
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
        return await main

    return asyncio.run(guarded())


def table_console() -> Console:
    """Return a console for tables on standard output, wide where no terminal sets a width."""
    return Console(
        highlight=False, markup=False, emoji=False, width=None if sys.stdout.isatty() else PLAIN_WIDTH
    )


def _configure_logs(level: str) -> None:
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="%H:%M:%S"),
            structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty(), pad_event_to=0),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(getattr(logging, level.upper())),
        logger_factory=structlog.WriteLoggerFactory(_Stderr()),  # type: ignore[arg-type]
        cache_logger_on_first_use=False,
    )
