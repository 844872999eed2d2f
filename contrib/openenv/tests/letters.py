"""A game of letters: the reply to a message, its reward and the end follow from all messages so far."""

MODULUS = 1009
MOST_STEPS = 8


def begin(seed):
    """Return the state after a reset."""
    return seed % MODULUS


def answer(state, steps, message):
    """Return the next state, the reply, the reward and whether the episode is over, after so many steps."""
    state = (state * 31 + sum(map(ord, message))) % MODULUS
    reply = "".join(chr(ord("a") + (state + place) % 26) for place in range(1 + state % 7))
    return state, reply, state % 10 / 4, state % 5 == 0 or steps >= MOST_STEPS
