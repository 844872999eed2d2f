"""The KV of a response that stops for its environment and goes on elsewhere, in every engine's pool."""

from __future__ import annotations

import numpy as np
from msgspec import structs
from seer_kv_local.slot_table import SlotTable

from seer_core.model import Sampling

__all__ = ["expect_the_kv_of_a_turn_until_its_group_is_over", "released"]


def released(pool, instance_id, block_bytes):
    """Return how many blocks of the pool have been dropped, and wait to be evicted."""
    settings = pool.store(instance_id).settings
    nonce = bytes.fromhex(settings["nonce"])
    tables = [SlotTable(path, nonce, block_bytes) for path in settings["tables"].values()]
    return sum(
        np.count_nonzero((table._gens != 0) & (table._marks == 2 * table._gens + 1)) for table in tables
    )


def expect_the_kv_of_a_turn_until_its_group_is_over(pair, prompt, expected, block, dropped):
    """Stop on the one instance and go on at the other, which both have forgotten the prompt.

    ``expected`` is the response to it by seed 0 at temperature 1, ``dropped`` returns how many blocks the
    pool has dropped.
    """
    a, b = pair
    a.group = b.group = "turns"
    stop = next(token for token in expected[50:] if expected.index(token) >= 50)
    stops = Sampling(1.0, stop_token_ids=(stop,))
    first = structs.replace(a.job(list(prompt), 100, 0, stops), prompt_tokens=len(prompt), turns=True)
    [output] = a.run(a.chunks([first]))
    assert output.stopped
    assert output.token_ids == expected[: expected.index(stop) + 1]
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
