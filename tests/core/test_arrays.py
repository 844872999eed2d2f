"""Arrays of token ids and log-probs: small, and like lists where it matters."""

import copy
import pickle
import sys

import msgspec
import numpy as np
import pytest

from seer_core.model.arrays import Logprobs, Tokens, packed, unpacked


class Message(msgspec.Struct):
    tokens: Tokens
    logprobs: Logprobs


def test_they_equal_lists_of_the_same_values_and_so_do_their_parts_and_copies():
    tokens, logprobs = Tokens([5, 6, 7]), Logprobs([-0.5, -0.25])
    assert tokens == [5, 6, 7] == tokens
    assert logprobs == [-0.5, -0.25]
    assert tokens != [5, 6]
    assert not tokens != [5, 6, 7]  # noqa: SIM202 (an operator of its own)
    assert tokens != (5, 6, 7)
    assert tokens[1:] == [6, 7]
    assert (tokens[0], list(tokens), len(tokens)) == (5, [5, 6, 7], 3)
    for again in (tokens[:], copy.copy(tokens), copy.deepcopy(tokens), pickle.loads(pickle.dumps(tokens))):
        assert type(again) is Tokens
        assert again == tokens
        assert again is not tokens


def test_a_value_takes_four_bytes_and_numpy_sees_the_same_memory():
    assert sys.getsizeof(Tokens(range(10_000))) < 41_000
    tokens = Tokens([1, 2, 3])
    view = np.asarray(tokens)
    tokens[0] = 9
    assert (view.dtype, view.tolist()) == (np.int32, [9, 2, 3])
    assert np.asarray(Logprobs([-0.5])).dtype == np.float32


def test_they_travel_as_bytes_or_as_lists():
    for sent in (Message(Tokens([1, 70_000]), Logprobs([-0.5, -1.5])), Message([1, 70_000], [-0.5, -1.5])):
        raw = msgspec.msgpack.encode(sent, enc_hook=packed)
        found = msgspec.msgpack.decode(raw, type=Message, dec_hook=unpacked)
        assert (type(found.tokens), type(found.logprobs)) == (Tokens, Logprobs)
        assert (found.tokens, found.logprobs) == ([1, 70_000], [-0.5, -1.5])


@pytest.mark.parametrize("tokens", [b"abc", 5, ["a"], [2**40], None])
def test_what_is_no_array_is_refused(tokens):
    raw = msgspec.msgpack.encode({"tokens": tokens, "logprobs": []})
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(raw, type=Message, dec_hook=unpacked)
