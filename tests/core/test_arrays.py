"""Arrays of token ids and log-probs: small, and like lists where it matters."""

import copy
import pickle
import sys

import msgspec
import numpy as np
import pytest

from seer_core.model.arrays import Logprobs, Tokens, TopLogprobs, packed, unpacked


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


PLACES = [[(7, -0.5), (70_000, -1.5)], [(8, -0.25), (7, -2.0)], [(9, -0.125), (8, -4.0)]]


def test_the_most_probable_tokens_have_pairs_at_each_place_and_parts_of_their_own_kind():
    tops = TopLogprobs.of(PLACES)
    assert (len(tops), tops.width, tops[1], tops[-1]) == (3, 2, PLACES[1], PLACES[2])
    assert list(tops) == PLACES
    assert list(tops[1:]) == PLACES[1:]
    assert list(tops[1:1]) == list(TopLogprobs(0)) == []
    other = tops[:1]
    other.extend(tops[1:])
    assert other == tops != other[:2]
    assert tops.fits(2, 3)
    assert not tops.fits(1, 3)
    assert not tops.fits(2, 2)
    assert TopLogprobs(0).fits(5, 0)


class Found(msgspec.Struct):
    tops: TopLogprobs | None = None


def test_the_most_probable_tokens_travel_as_bytes_and_stand_in_files_as_pairs():
    for tops in (TopLogprobs.of(PLACES), TopLogprobs(3), None):
        raw = msgspec.msgpack.encode(Found(tops), enc_hook=packed)
        assert msgspec.msgpack.decode(raw, type=Found, dec_hook=unpacked).tops == tops
        text = msgspec.json.encode(Found(tops), enc_hook=list)
        assert msgspec.json.decode(text, type=Found, dec_hook=unpacked).tops == tops
    assert msgspec.json.decode(msgspec.json.encode(TopLogprobs.of(PLACES[:1]), enc_hook=list)) == [
        [[7, -0.5], [70_000, -1.5]]
    ]


@pytest.mark.parametrize(
    "tops", [5, b"abc", [2, b"abc", b""], [2, [1], [-1.0]], [[[1, -1.0]], []], [[[1]]], [["a"]], ["ab"], {}]
)
def test_what_are_no_most_probable_tokens_is_refused(tops):
    raw = msgspec.msgpack.encode({"tops": tops})
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(raw, type=Found, dec_hook=unpacked)


@pytest.mark.parametrize("tokens", [b"abc", 5, ["a"], [2**40], None])
def test_what_is_no_array_is_refused(tokens):
    raw = msgspec.msgpack.encode({"tokens": tokens, "logprobs": []})
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(raw, type=Message, dec_hook=unpacked)
