"""The KV of a response that stops for its environment and goes on elsewhere, in every engine's pool."""

from __future__ import annotations

import numpy as np
from msgspec import structs
from seer_kv_local.slot_table import SlotTable

from seer_core.model import Sampling

PLAIN = Sampling(1.0)

__all__ = [
    "expect_the_kv_of_a_trajectory_until_it_is_forgotten",
    "expect_the_kv_of_a_turn_until_its_group_is_over",
    "released",
]


def tables_of(pool, instance_id, block_bytes):
    """Return the tables of the pool."""
    settings = pool.store(instance_id).settings
    nonce = bytes.fromhex(settings["nonce"])
    return [SlotTable(path, nonce, block_bytes) for path in settings["tables"].values()]


def stored(pool, instance_id, block_bytes):
    """Return how many blocks the pool has, those that have been dropped among them."""
    return sum(np.count_nonzero(table._gens) for table in tables_of(pool, instance_id, block_bytes))


def released(pool, instance_id, block_bytes):
    """Return how many blocks of the pool have been dropped, and wait to be evicted."""
    return sum(
        np.count_nonzero((table._gens != 0) & (table._marks == 2 * table._gens + 1))
        for table in tables_of(pool, instance_id, block_bytes)
    )


def stopping(expected, by_text):
    """Return after how many of its tokens a response ends, and the sampling under which it does."""
    if not by_text:
        stop = next(token for token in expected[50:] if expected.index(token) >= 50)
        return expected.index(stop) + 1, Sampling(1.0, stop_token_ids=(stop,))
    words = [f"w{token}" for token in expected]
    for size in range(50, len(words)):
        stop = " ".join(words[size - 2 : size])
        if stop not in " ".join(words[: size - 1]):
            return size, Sampling(1.0, stop=(stop,))
    raise AssertionError("no words are new")


def expect_the_kv_of_a_turn_until_its_group_is_over(pair, prompt, expected, block, dropped, *, by_text=False):
    """Stop on the one instance and go on at the other, which both have forgotten the prompt.

    ``expected`` is the response to it by seed 0 at temperature 1, ``dropped`` returns how many blocks the
    pool has dropped; ``by_text`` the turn ends with a stop string.
    """
    a, b = pair
    a.group = b.group = "turns"
    size, stops = stopping(expected, by_text)
    first = structs.replace(a.job(list(prompt), 100, 0, stops), prompt_tokens=len(prompt), turns=True)
    [output] = a.run(a.chunks([first]))
    assert output.stopped
    assert output.token_ids == expected[:size]
    text, answer = [*prompt, *output.token_ids], [5, 6, 7]
    job = b.job([*text, *answer], 8, 0, stops)
    later = structs.replace(job, prompt_tokens=len(prompt), turns=True, turn_start=len(text) + len(answer))
    [output] = b.run(b.chunks([later]))
    full = (len(text) - 1) // block
    assert output.pool_tokens == full * block
    assert output.prefilled_tokens == len(text) + len(answer) - full * block
    assert dropped() == 0
    for here in pair:
        here.engine.forget_group("turns")
        here.run(here.engine.reset_cache())
    assert dropped() == full


def expect_the_kv_of_a_trajectory_until_it_is_forgotten(
    pair, prompt, expected, block, dropped, *, by_text=False
):
    """Write turns that are responses of their own, each on the other instance than the one before.

    ``expected``, ``dropped`` and ``by_text`` are as above.  The second turn is cut at its limit.
    """
    text, full = list(prompt), 0
    for number, (tokens, sampling) in enumerate(((100, stopping(expected, by_text)[1]), (40, PLAIN))):
        here = pair[number % 2]
        here.group = f"turn {number}"
        job = structs.replace(here.job(text, tokens, 0, sampling), last=True, trajectory="t")
        [output] = here.run(here.chunks([job]))
        assert output.stopped == (number == 0)
        assert output.pool_tokens == full * block
        assert output.prefilled_tokens == len(text) - full * block
        here.engine.forget_group(here.group)
        text += [*output.token_ids, 5, 6, 7]
        full = (len(text) - 4) // block
        assert dropped() == 0
    third = pair[0]
    aborted = structs.replace(third.job(text, 400, 0, PLAIN), trajectory="t")
    third.engine.submit(aborted)
    third.engine.abort(aborted.id)
    [output] = third.run(third.chunks([structs.replace(third.job(text, 8, 0, PLAIN), trajectory="t")]))
    assert output.pool_tokens + output.cached_tokens == full * block
    full = (len(text) + len(output.token_ids) - 1) // block
    for here in pair:
        here.engine.forget_group("t")
        here.run(here.engine.reset_cache())
    assert dropped() == full
