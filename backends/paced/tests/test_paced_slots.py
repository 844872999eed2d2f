"""Fingerprints of KV that is kept token by token: each byte of each slot counts."""

import numpy as np
import pytest
from seer_paced.fingerprints import WrongKVError
from seer_paced.slots import Slots, prints_of

TEXT = [7, 7, 9, 2, 5]
HELD = np.array([3, 9, 4, 8, 1])


def filled(prints):
    memory = np.zeros((2, 12), np.uint64)
    slots = Slots(*memory)
    slots.write(HELD, prints)
    return slots, memory


def test_a_token_s_fingerprint_is_of_all_before_it_and_of_the_weights():
    prints = prints_of(TEXT, 0)
    assert len(set(prints.tolist())) == len(TEXT)
    assert (prints_of(TEXT[:3], 0) == prints[:3]).all()
    assert (prints_of([7, 8, 9, 2, 5], 0)[1:] != prints[1:]).all()
    assert (prints_of([7, 9, 7, 2, 5], 0)[2:4] != prints[2:4]).any()
    assert (prints_of(TEXT, 1) != prints).all()


def test_slots_that_hold_their_text_pass_and_no_others():
    slots, _ = filled(prints_of(TEXT, 0))
    slots.check(HELD, prints_of(TEXT, 0), ["g/0"])
    for wrong in (HELD[[1, 0, 2, 3, 4]], np.full(5, 11)):
        with pytest.raises(WrongKVError, match="of request 'g/0' does not hold the KV of its text"):
            slots.check(wrong, prints_of(TEXT, 0), ["g/0"])
    slots.clear()
    with pytest.raises(WrongKVError, match="slot 3 of request 'a'"):
        slots.check(HELD, prints_of(TEXT, 0), ["a", "b", "c", "d", "e"])


@pytest.mark.parametrize("part", [0, 1], ids=["keys", "values"])
def test_one_wrong_bit_is_noticed(part):
    slots, memory = filled(prints_of(TEXT, 0))
    memory[part, HELD[3]] ^= np.uint64(1 << 40)
    with pytest.raises(WrongKVError, match="slot 8 of request 'd'"):
        slots.check(HELD, prints_of(TEXT, 0), ["a", "b", "c", "d", "e"])
