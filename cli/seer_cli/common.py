"""Parts of every command: options, errors without tracebacks, logs on standard error."""

from __future__ import annotations

import asyncio
import logging
import math
import signal
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator, Mapping, MutableMapping
from contextlib import contextmanager, suppress
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar

import click
import structlog
from seer_host.config_files import Config, load_config

from seer_cli.output import InputPath
from seer_core.errors import ConfigError, EngineError, SeerError, printable

__all__ = [
    "FiniteRange",
    "Terminated",
    "config_options",
    "debugged",
    "degradation_line",
    "interruptible",
    "load",
    "main_options",
    "run_async",
    "set_option",
    "without_option",
]

PACE = "pace"
"""The part that fails when an emulated accelerator is faster than the machine: times mean nothing then."""

LINE_END = "\n"

LONGEST_MESSAGE = 8000
"""Characters of an error that are shown; those of a prompts file list ten lines."""

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")


class Terminated(KeyboardInterrupt):
    """SIGTERM or SIGHUP came: as Ctrl-C, but for the exit status.  ``number`` is the signal's."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number


class FiniteRange(click.FloatRange):
    """A range of numbers; click's own takes NaN, which is below and above nothing."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the number, or fail as click does."""
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{number} is not in the range {self._describe_range()}.", param, ctx)
        return number


def main_options(command: F) -> F:
    """Add ``--debug`` and ``--log-level``, and turn errors into one line and an exit status."""

    @click.option(
        "--debug",
        is_flag=True,
        help="Show tracebacks; log calls of hooks; end a run where a plug-in changes what it was given.",
    )
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
        with interruptible():
            try:
                return command(*arguments, **options)
            except SeerError as error:
                if debug:
                    raise
                click.echo(f"error: {printable(str(error), LONGEST_MESSAGE, keep=LINE_END)}", err=True)
                sys.exit(1 if isinstance(error, EngineError) else 2)

    return wrapped  # type: ignore[return-value]


set_option = click.option(
    "--set",
    "overrides",
    multiple=True,
    metavar="KEY=VALUE",
    help="Change one value of the config; may repeat.",
)
without_option = click.option(
    "-p", "disabled", multiple=True, metavar="no:NAME", help="Leave out a plug-in; may repeat."
)


def config_options(command: F) -> F:
    """Add the CONFIG argument with ``--set`` and ``-p``, resolved into a ``Config``."""

    @click.argument("config", type=InputPath())
    @set_option
    @without_option
    @wraps(command)
    def wrapped(
        *arguments: Any, config: Path, overrides: tuple[str, ...], disabled: tuple[str, ...], **options: Any
    ) -> Any:
        return command(*arguments, config=load(config, debugged(overrides), disabled), **options)

    return wrapped  # type: ignore[return-value]


def debugged(overrides: tuple[str, ...]) -> tuple[str, ...]:
    """Return ``--set`` options, with the setting of ``--debug`` where the running command has that flag."""
    return (*overrides, "seer.debug=true") if click.get_current_context().params.get("debug") else overrides


def load(path: Path, overrides: tuple[str, ...] = (), disabled: tuple[str, ...] = ()) -> Config:
    """Load a config as the command line changes it."""
    for text in disabled:
        if not text.startswith("no:"):
            raise ConfigError(f"-p {text}: only no:NAME is understood; enable plug-ins in [seer].plugins")
    return load_config(path, overrides, [text.removeprefix("no:") for text in disabled])


@contextmanager
def interruptible() -> Iterator[None]:
    """Turn Ctrl-C, SIGTERM and SIGHUP into one line and an exit status, as shells have it: 130, 143, 129."""
    on_main_thread = threading.current_thread() is threading.main_thread()
    before = {number: signal.signal(number, _terminate) for number in _ending()} if on_main_thread else {}
    try:
        yield
    except (KeyboardInterrupt, asyncio.CancelledError) as error:
        with suppress(OSError):  # after SIGHUP the terminal is gone
            click.echo("interrupted; what had finished is kept", err=True)
        sys.exit(128 + (error.number if isinstance(error, Terminated) else signal.SIGINT))
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _ending() -> list[signal.Signals]:
    """Return the signals that end a command in order, but for one that is ignored, as nohup has it."""
    numbers = (signal.SIGTERM, signal.SIGHUP)
    return [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]


def _terminate(number: int, frame: object) -> None:
    raise Terminated(number)


def run_async(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine; SIGTERM and SIGHUP end it like Ctrl-C, so that engines are always stopped.

    Raises:
        Terminated: SIGTERM or SIGHUP came.
        KeyboardInterrupt: Ctrl-C came.
    """
    came: list[int] = []

    async def guarded() -> T:
        task = asyncio.current_task()
        assert task is not None

        def cancel(number: int) -> None:
            came.append(number)
            task.cancel()

        for number in before:
            asyncio.get_running_loop().add_signal_handler(number, cancel, number)
        return await main

    before = {number: signal.getsignal(number) for number in _ending()}
    try:
        return asyncio.run(guarded())
    except asyncio.CancelledError:
        if came:
            raise Terminated(came[0]) from None
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)  # the loop leaves the system's default
        main.close()  # it was never started if a signal came first


def _harmless(logger: object, method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Write out what a terminal would obey: ids and reasons come from files, plug-ins and other processes."""
    return {
        key: printable(value, LONGEST_MESSAGE, keep=LINE_END) if isinstance(value, str) else value
        for key, value in event.items()
    }


def _configure_logs(level: str) -> None:
    structlog.configure(
        processors=[
            _harmless,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="%H:%M:%S"),
            structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty(), pad_event_to=0),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(getattr(logging, level.upper())),
        # Standard error as it is then: the live display puts itself in its place for a while.
        logger_factory=lambda *names: structlog.WriteLogger(sys.stderr),
        cache_logger_on_first_use=False,
    )


@contextmanager
def quiet_logs() -> Iterator[None]:
    """Log errors alone meanwhile, as of simulated instances whose starts and ends are no news."""
    before = structlog.get_config()
    errors = structlog.make_filtering_bound_logger(logging.ERROR)
    structlog.configure(**{**before, "wrapper_class": errors})
    try:
        yield
    finally:
        structlog.configure(**before)


def degradation_line(degradations: Mapping[str, int], where: str = "") -> str:
    """Return what to say of a run's troubles, which were counted by part."""
    told = ", ".join(f"{printable(what)} ({count})" for what, count in degradations.items())
    if PACE in degradations:
        return f"NOT VALID{where}: TROUBLE with {told}: its times are not those it emulates; see above"
    return f"TROUBLE{where} with {told}: instances went on without; see instance_degraded above"
