"""The contract of environments: what answers the turns of a response, such as a tool or a game.

The model writes a turn up to a stop, its end token or a stop string.  The environment answers with tokens,
after which the model goes on, or ends the response.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import msgspec

from seer_core.ports.contracts import optional

__all__ = ["AnsweredTurn", "Environment", "EnvironmentAnswer", "ModelTurn", "Trajectory"]


class Trajectory(msgspec.Struct, frozen=True):
    """A response whose turns an environment answers."""

    request_id: str
    """The request, as ``GROUP/INDEX``: the same in all calls for the trajectory, and no other's meanwhile."""
    group_id: str
    """The group that it is of."""
    index: int
    """The response's number within its group, from 0."""
    seed: int
    """The seed with which its tokens are drawn, for chance that is to be the same in a run that goes on."""
    prompt_token_ids: tuple[int, ...]
    """The tokens of the prompt."""
    metadata: Mapping[str, Any]
    """The prompt's own data; do not change it, for the whole group has it."""
    labels: Mapping[str, str]
    """The prompt's labels."""


class ModelTurn(msgspec.Struct, frozen=True):
    """A turn as the model has written it, up to a stop."""

    number: int
    """Its number within the response, from 0."""
    token_ids: list[int]
    """Its tokens, the one at which it stopped included."""
    text: str | None
    """Its text, as far as the sampling keeps it: without the stop string, unless
    ``include_stop_str_in_output``. None without a tokenizer.
    """
    stop_reason: str | int | None
    """The stop string or the stop token of the prompt's at which it stopped; None for the model's own end."""
    left_tokens: int
    """How many more tokens the response may have."""


class EnvironmentAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to a turn: one of ``token_ids``, ``text`` and ``messages``, or none of them if ``done``.

    They are encoded once and appended; beyond the response's limit they are cut off, and the response ends.
    """

    token_ids: Sequence[int] | None = None
    """Tokens that are appended as they are."""
    text: str | None = None
    """Text that is encoded for itself, without special tokens."""
    messages: Sequence[Mapping[str, Any]] | None = None
    """Messages of a chat, as the model's template writes them after a message of the assistant's, with the
    generation prompt at their end.
    """
    chat_template_kwargs: Mapping[str, Any] = {}
    """Variables for the template, beside the messages: those of the prompt, where it had any."""
    images: Sequence[Any] = ()
    """The images at the places of the answer, in order, as ``images`` of a prompt names them: paths, data
    URLs or bytes. The parts of messages may name images themselves.
    """
    reward: float | None = None
    """The reward of the turn; a response's is their sum."""
    done: bool = False
    """Whether the response ends with this answer, with finish reason ``stop``."""
    delay_s: float = 0.0
    """Seconds on the run's clock after which the answer counts: the time of a tool that is simulated."""


class AnsweredTurn(msgspec.Struct, frozen=True):
    """An earlier turn of a response, and the answer to it."""

    turn: ModelTurn
    """The turn."""
    answer_token_ids: list[int]
    """The tokens of the answer."""


class Environment(Protocol):
    """Answers the turns of responses, of many at once; each response's calls come one after the other.

    Its methods may be plain ones, too: those run in threads of their own.  One that raises, or takes longer
    than ``[seer.turns].timeout_s``, ends the response with finish reason ``error``; the rollout goes on.
    A coroutine that is too late, or whose response was aborted meanwhile, is cancelled; the answer of a plain
    method is dropped then.
    """

    @optional
    async def start(self) -> None:
        """Open what it needs, before the engines start; called where the config names the environment."""
        return

    @optional
    async def reset(self, trajectory: Trajectory, earlier: Sequence[AnsweredTurn]) -> None:
        """Begin a trajectory, just before its first ``step`` in this process.

        ``earlier`` are the turns that an earlier process has answered, in order: where a run goes on, an
        environment with a state of its own plays them again, or raises.
        """
        return

    async def step(self, trajectory: Trajectory, turn: ModelTurn) -> EnvironmentAnswer:
        """Return the answer to a turn."""
        ...

    @optional
    async def close(self, trajectory: Trajectory) -> None:
        """Forget a trajectory that was begun: it is over, for whichever reason."""
        return

    @optional
    async def stop(self) -> None:
        """Close what ``start`` opened, when the engines have ended."""
        return
