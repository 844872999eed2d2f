"""Turns as their environment sees them: each alone, with what stood before it."""

from seer_session.turns import answered_turns, trajectory_of, turn_of

from seer_core.model import PromptGroup, Sampling, TurnRecord
from seer_core.model.arrays import Tokens
from seer_core.ports.extension import HeldResponse

GROUP = PromptGroup("a", (1, 2, 3), 2, 20, Sampling(stop=("=",)), metadata={"task": 1}, turns=True)


def spelt(token_ids):
    """Return tokens as letters; 61 is the stop string."""
    return "".join(chr(token) if token > 32 else chr(96 + token) for token in token_ids)


def test_an_environment_sees_the_turn_alone_and_the_trajectory():
    held = HeldResponse(GROUP, 0, 5, Tokens([7, 8, 61]), ())
    turn = turn_of(held, spelt)
    assert (turn.number, turn.token_ids, turn.text, turn.stop_reason) == (0, [7, 8, 61], "gh", "=")
    assert turn.left_tokens == 17
    held = HeldResponse(GROUP, 0, 5, Tokens([7, 8, 61, 9, 10, 11, 12]), (TurnRecord(3, 2),))
    turn = turn_of(held, spelt)
    assert (turn.number, turn.token_ids, turn.text, turn.stop_reason) == (1, [11, 12], "kl", None)
    [earlier] = answered_turns(held, spelt)
    assert (earlier.turn.text, earlier.answer_token_ids) == ("gh", [9, 10])
    trajectory = trajectory_of("a/0", held)
    assert (trajectory.group_id, trajectory.index, trajectory.metadata) == ("a", 0, {"task": 1})
    assert trajectory.prompt_token_ids == (1, 2, 3)


def test_without_a_tokenizer_a_turn_has_no_text():
    assert turn_of(HeldResponse(GROUP, 1, 5, Tokens([7, 61]), ()), None).text is None
