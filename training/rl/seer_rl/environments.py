"""The environment of a training, which answers the turns of its responses: of ``[train]``, or a plug-in's."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import attrs
import structlog
from seer_host.contract_checks import flaw_of
from seer_session import Config, Session
from seer_session.environment import Environment

from seer_core.error_origin import describe_error, is_ctrl_c, is_interruption
from seer_core.errors import ConfigError, quote
from seer_core.ports.contracts import implemented
from seer_rl.config import TrainTable
from seer_rl.references import resolve

__all__ = ["TrainingEnvironment"]

log = structlog.get_logger("seer")


@attrs.frozen(eq=False)
class TrainingEnvironment:
    """The environment that rollouts get, if any.

    ``own`` is that of ``[train].environment``.  A plug-in's is in the session's configuration already;
    ``plugin`` has its settings by its name, for what is learnt depends on them.
    """

    own: Environment | None = None
    plugin: dict[str, Any] = attrs.field(factory=dict)

    @classmethod
    def of(cls, table: TrainTable, config: Config, session: Session) -> TrainingEnvironment:
        """Make the environment that ``[train]`` names, or find that of a plug-in.

        Raises:
            ConfigError: it cannot be made, there are two, or nothing would give rewards.
        """
        slot = session.runtime.environment
        if table.environment and slot is not None:
            raise ConfigError(
                f"[train].environment names {quote(table.environment)}, and [seer].plugins {slot.owner!r}:"
                " one of them can answer turns; leave the other out"
            )
        if slot is not None:
            return cls(plugin={slot.owner: dict(config.plugin.get(slot.owner, {}))})
        if table.environment:
            return cls(_make(table.environment, config))
        if not table.reward:
            raise ConfigError(
                "[train].reward names no function, and there is no environment that gives rewards; write"
                ' reward = "FILE.py:FUNCTION"'
            )
        return cls()

    @contextmanager
    def opened(self, session: Session) -> Iterator[None]:
        """Start the environment of ``[train]`` in the event loop of a session that runs, and stop it.

        Raises:
            ConfigError: its ``start`` raised.
        """
        start, stop = (
            None if self.own is None else implemented(self.own, name) for name in ("start", "stop")
        )
        if start is not None and (error := session.submit(_called(start)).result()) is not None:
            raise ConfigError(
                f"[train].environment: its start raised {describe_error(error, self.own)}; mend it"
            ) from error
        try:
            yield
        finally:
            if stop is not None and (error := session.submit(_called(stop)).result()) is not None:
                log.error("stop_failed", slot="environment", error=describe_error(error, self.own))


async def _called(method: Callable[[], Any]) -> BaseException | None:
    """Call a method of the environment, and return what it raised."""
    try:
        outcome = method()
        if inspect.isawaitable(outcome):
            await outcome
    except BaseException as error:
        if is_interruption(error):
            raise
        return error
    return None


def _make(reference: str, config: Config) -> Environment:
    make = resolve("[train].environment", reference, config.base_dir)
    try:
        environment: Environment = make()
    except BaseException as error:
        if is_ctrl_c(error):
            raise
        place = str(getattr(make, "__module__", ""))
        raise ConfigError(
            f"[train].environment: {quote(reference)} raised {describe_error(error, place)}; it is called"
            " without arguments"
        ) from error
    if flaw := flaw_of(environment, Environment):
        raise ConfigError(
            f"[train].environment: {quote(reference)} made a {type(environment).__name__}, which is no"
            f" environment: {flaw}; see seer_session.environment.Environment"
        )
    return environment
