"""The text of a response: what it adds to its prompt, and where a stop string cuts it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from seer_host.text import GrowingText, find_stop, text_before_stop

from seer_core.model import Sampling
from seer_core.model.arrays import Tokens

WORDS = ["let", "me", "be", "quick", "."]


def words(token_ids):
    """Join words as many tokenizers do: none but the first has a space before it."""
    return " ".join(WORDS[token % len(WORDS)] for token in token_ids)


def of_bytes(token_ids):
    return bytes(token_ids).decode(errors="replace")


def test_the_first_word_of_a_response_keeps_its_space():
    assert text_before_stop(words, Sampling(), [0, 1], Tokens([2, 3]), False).text == " be quick"
    assert text_before_stop(words, Sampling(), [], Tokens([2, 3]), False).text == "be quick"


@pytest.mark.parametrize("size", range(30))
def test_a_character_that_a_prompt_begins_is_the_response_s(size):
    prompt, rest = [*b"ab" * size, *"é".encode()[:1]], [*"é".encode()[1:], *b"x"]
    assert text_before_stop(of_bytes, Sampling(), prompt, Tokens(rest), False).text == "éx"
    growing = GrowingText(of_bytes, prompt)
    assert growing.add(rest[:1]) + growing.add(rest[1:]) == "éx"


def falling_back(token_ids):
    """Decode as tokenizers do that fall back to bytes: a run of bytes that is no text is none in any part."""
    pieces, run = [], []
    for token in [*token_ids, None]:
        if token is not None and token < 256:
            run.append(token)
            continue
        try:
            pieces.append(bytes(run).decode())
        except UnicodeDecodeError:
            pieces.append("\N{REPLACEMENT CHARACTER}" * len(run))
        run = []
        pieces.append("" if token is None else f" word{token}")
    return "".join(pieces)


HEART, BROKEN = [*"❤".encode()], [0xE2]


@pytest.mark.parametrize(
    ("prompt", "tokens", "text"),
    [
        ([300], [*HEART, *BROKEN, 301], "❤\ufffd word301"),
        ([300], [*HEART, *BROKEN], "❤\ufffd"),
        ([300], [10, *BROKEN, 301], "\n\ufffd word301"),
        ([300], [10, *HEART, 301], "\n❤ word301"),
        ([300, *HEART], [*BROKEN, 301], "\ufffd word301"),
        ([300, *HEART[:2]], [*HEART[2:], 301], "❤ word301"),
        ([300, *HEART, *HEART[:1]], [*HEART[1:], 301], "❤ word301"),
        ([300, *BROKEN], [301], " word301"),
        ([300, 10, *BROKEN], [*BROKEN, 301], "\ufffd word301"),
        ([300] * 30 + BROKEN * 30, [301], " word301"),
        ([300], BROKEN * 600, "\ufffd" * 600),
    ],
)
def test_a_character_that_was_whole_stays_and_bytes_of_the_prompt_stay_there(prompt, tokens, text):
    assert text_before_stop(falling_back, Sampling(), prompt, Tokens(tokens), False).text == text
    for width in (1, 2, 3, 100):
        growing = GrowingText(falling_back, prompt)
        pieces = [growing.add(tokens[start : start + width]) for start in range(0, len(tokens), width)]
        assert "".join(pieces) + growing.rest() == text


def test_a_replacement_character_of_the_prompt_is_not_in_the_response():
    prompt, rest = [*"ab\ufffd".encode()], [*b"cd"]
    assert text_before_stop(of_bytes, Sampling(), prompt, Tokens(rest), False).text == "cd"
    assert GrowingText(of_bytes, prompt).add(rest) == "cd"
    assert (
        text_before_stop(of_bytes, Sampling(), prompt, Tokens([*"\ufffdc".encode()]), False).text == "\ufffdc"
    )


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        (Sampling(stop=("cd",)), ("ab", "cd")),
        (Sampling(stop=("cd",), include_stop_str_in_output=True), ("abcd", "cd")),
        (Sampling(stop=("zz", "bcd", "cd")), ("a", "bcd")),
        (Sampling(stop=("cd", "bcd")), ("ab", "cd")),
        (Sampling(stop=("a",)), ("abcd", None)),  # it was within ``min_tokens``
        (Sampling(stop_token_ids=(ord("d"),)), ("abc", ord("d"))),
        (Sampling(stop_token_ids=(ord("d"),), include_stop_str_in_output=True), ("abcd", ord("d"))),
        (Sampling(), ("abcd", None)),
    ],
)
def test_a_stopped_text_ends_where_vllm_cuts_it(sampling, expected):
    ending = text_before_stop(of_bytes, sampling, [*b"xy"], Tokens([*b"abcd"]), True)
    assert (ending.text, ending.stop_reason) == expected


def test_a_text_that_its_limit_ends_is_whole():
    ending = text_before_stop(of_bytes, Sampling(stop=("d",)), [*b"xy"], Tokens([*b"abcd"]), False)
    assert (ending.text, ending.stop_reason) == ("abcd", None)
    assert text_before_stop(None, Sampling(stop_token_ids=(9,)), [1], Tokens([9]), True).stop_reason == 9


@given(
    text=st.text("abé", max_size=30),
    cuts=st.lists(st.integers(0, 30), max_size=5),
    prompt=st.text("abé", max_size=40),
)
def test_pieces_make_the_text(text, cuts, prompt):
    tokens, places = text.encode(), sorted({0, *cuts})
    growing = GrowingText(of_bytes, [*prompt.encode()])
    pieces = [
        growing.add([*tokens[start:stop]]) for start, stop in zip(places, [*places[1:], None], strict=True)
    ]
    assert "".join(pieces) == text


@given(
    text=st.text("ab", max_size=20),
    at=st.integers(0, 20),
    stops=st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_a_stop_is_found_once_it_is_complete_and_no_sooner(text, at, stops):
    before, new = text[:at], text[at:]
    ends = [
        (start + len(stop), number, start)
        for number, stop in enumerate(stops)
        for start in range(len(text))
        if text.startswith(stop, start) and start + len(stop) > len(before)
    ]
    expected = None if not ends else (stops[min(ends)[1]], min(ends)[2])
    assert find_stop(before, new, stops) == expected
