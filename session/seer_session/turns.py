"""Turns of a response, as its environment sees them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from seer_host.text import CONTEXT_TOKENS, text_before_stop

from seer_core.model.arrays import Tokens
from seer_core.ports.extension import HeldResponse
from seer_session.environment import AnsweredTurn, ModelTurn, Trajectory

__all__ = ["answered_turns", "trajectory_of", "turn_of"]

Decode = Callable[[Sequence[int]], str] | None


def trajectory_of(request_id: str, response: HeldResponse) -> Trajectory:
    """Return a response that is held as a trajectory."""
    group = response.group
    return Trajectory(
        request_id,
        group.id,
        response.index,
        response.seed,
        group.prompt_token_ids,
        group.metadata,
        group.labels,
    )


def turn_of(response: HeldResponse, decode: Decode) -> ModelTurn:
    """Return the turn that a response has just written; ``decode`` turns tokens into text."""
    start = response.turn_start
    return _turn(response, decode, len(response.turns), start, len(response.token_ids) - start)


def answered_turns(response: HeldResponse, decode: Decode) -> list[AnsweredTurn]:
    """Return the turns of a response that its environment has answered."""
    found, start = [], 0
    for number, record in enumerate(response.turns):
        turn = _turn(response, decode, number, start, record.tokens)
        end = start + record.tokens + record.answer_tokens
        found.append(AnsweredTurn(turn, list(response.token_ids[start + record.tokens : end])))
        start = end
    return found


def _turn(response: HeldResponse, decode: Decode, number: int, start: int, tokens: int) -> ModelTurn:
    group, end = response.group, start + tokens
    token_ids = Tokens(response.token_ids[start:end])
    context = slice(max(0, start - CONTEXT_TOKENS.stop), start)
    before = [*group.prompt_token_ids[-CONTEXT_TOKENS.stop :], *response.token_ids[context]]
    ending = text_before_stop(decode, group.sampling, before, token_ids, True)
    return ModelTurn(number, token_ids.tolist(), ending.text, ending.stop_reason, group.max_tokens - end)
