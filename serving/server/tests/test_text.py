"""Text in pieces: the same as at once, wherever it is cut."""

import shutil
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from seer_host.text import REPLACEMENT, GrowingText, find_stop, text_before_stop
from seer_server.text import StreamedText
from seer_worker.tokenizer import ModelTokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from seer_core.model import Sampling
from seer_core.model.arrays import Tokens

WEIGHTS = Path(__file__).parents[3] / "examples/tiny_reasoner/weights"


BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
WORDS = ["▁how", "▁far", "far", "▁"]


def of_bytes(folder):
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({letter: number for number, letter in enumerate(alphabet)}, []))
    made.decoder = decoders.ByteLevel()
    made.save(str(folder / "tokenizer.json"))
    return one_of(256)


def of_words(folder):
    """Words with a mark for the space before, and bytes for all else, as SentencePiece has them."""
    vocabulary = {word: number for number, word in enumerate([*WORDS, *BYTES])}
    made = Tokenizer(models.BPE(vocabulary, [], byte_fallback=True))
    marks, strip = decoders.Replace("▁", " "), decoders.Strip(content=" ", left=1, right=0)
    made.decoder = decoders.Sequence([marks, decoders.ByteFallback(), decoders.Fuse(), strip])
    made.save(str(folder / "tokenizer.json"))
    letters = st.characters(codec="utf-8").map(str.encode)
    characters = letters.map(lambda letter: [len(WORDS) + byte for byte in letter])
    return one_of(len(WORDS)) | characters | one_of(len(WORDS) + 256)


def of_the_reasoner(folder):
    shutil.copy(WEIGHTS / "tokenizer.json", folder)
    return one_of(Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab_size())


def one_of(size):
    return st.integers(0, size - 1).map(lambda token: [token])


@pytest.fixture(scope="module", params=[of_bytes, of_words, of_the_reasoner])
def tokenizer(request, tmp_path_factory):
    """Return a tokenizer, and a strategy for what its tokens come in."""
    folder = tmp_path_factory.mktemp("tokenizer")
    some = request.param(folder)
    return ModelTokenizer(folder), some


@given(data=st.data())
@settings(max_examples=100, deadline=None)
def test_pieces_make_the_text_that_the_tokens_make(tokenizer, data):
    tokenizer, some = tokenizer
    tokens = [token for each in data.draw(st.lists(some, max_size=40)) for token in each]
    cuts = sorted(data.draw(st.lists(st.integers(0, len(tokens)), max_size=8)))
    growing = StreamedText(tokenizer.decode)
    pieces = [growing.add(tokens[start:stop]) for start, stop in zip([0, *cuts], cuts, strict=False)]
    text = whole_text(tokenizer.decode, [], tokens)
    assert "".join(pieces) + growing.rest(text) == text
    if REPLACEMENT not in tokenizer.decode(tokens):
        assert text == tokenizer.decode(tokens)


def whole_text(decode, prompt, tokens):
    return text_before_stop(decode, Sampling(), prompt, Tokens(tokens), False).text


def cut(tokens, cuts):
    places = sorted(min(each, len(tokens)) for each in cuts)
    return [tokens[start:stop] for start, stop in zip([0, *places], [*places, len(tokens)], strict=True)]


def streamed(decode, sampling, prompt, tokens, cuts, text):
    """Return the pieces of a stream, of which the last has what is missing of the whole text."""
    stream = StreamedText(decode, sampling, prompt)
    pieces = [stream.add(piece) for piece in cut(tokens, cuts)]
    return [*pieces, stream.rest(text)]


CUTS = st.lists(st.integers(0, 60), max_size=12)
SEEDS = st.integers(0, 15)


def tokens_of(made):
    """Return a strategy for tokens: any of them, and more often bytes and special ones."""
    size, special = made.get_vocab_size(), [made.token_to_id(word) for word in ("<s>", "<|mark|>")]
    parts = [made.token_to_id(f"<0x{byte:02X}>") for byte in (0xE2, 0x9D, 0xA4, 0xF0, 0x9F, 0x0A)]
    some = [token for token in parts if token is not None] or list(range(size))
    return st.lists(st.integers(0, size - 1) | st.sampled_from(special) | st.sampled_from(some), max_size=40)


@given(data=st.data(), seed=SEEDS, cuts=CUTS)
@settings(max_examples=200, deadline=None)
def test_a_stream_s_pieces_make_the_whole_text_of_any_tokens(random_tokenizer, data, seed, cuts):
    made = random_tokenizer(seed)
    prompt, tokens = data.draw(tokens_of(made)), data.draw(tokens_of(made))
    text = whole_text(made.decode, prompt, tokens)
    assert "".join(streamed(made.decode, Sampling(), prompt, tokens, cuts, text)) == text
    growing = GrowingText(made.decode, prompt)
    assert growing.add(tokens) + growing.rest() == text
    if random_tokenizer.kind == "byte_level" and not prompt:
        assert text == made.decode(tokens)


@given(data=st.data(), seed=SEEDS, cuts=CUTS, include=st.booleans())
@settings(max_examples=200, deadline=None)
def test_a_stream_ends_at_a_stop_string_as_the_whole_text_does(random_tokenizer, data, seed, cuts, include):
    made = random_tokenizer(seed)
    prompt, tokens = data.draw(tokens_of(made)), data.draw(tokens_of(made))
    settled = GrowingText(made.decode, prompt).add(tokens)
    places = st.tuples(st.integers(0, max(0, len(settled) - 1)), st.integers(1, 4))
    stop = data.draw(places.map(lambda place: settled[place[0] : sum(place)])) or "never"
    sampling = Sampling(stop=(stop,), include_stop_str_in_output=include)
    growing, seen = GrowingText(made.decode, prompt), ""
    for number, token in enumerate(tokens, 1):  # as engines look for it
        new = growing.add([token])
        found = find_stop(seen, new, (stop,))
        seen += new
        if found is not None:
            tokens = tokens[:number]
            break
    ending = text_before_stop(made.decode, sampling, prompt, Tokens(tokens), True)
    assert ending.stop_reason == (stop if stop in settled else None)
    if stop in settled:
        end = settled.index(stop) + (len(stop) if include else 0)
        assert ending.text == settled[:end]
    # The token that ends a response comes with its whole text.
    pieces = streamed(made.decode, sampling, prompt, tokens[:-1], cuts, ending.text)
    assert "".join(pieces) == ending.text


@given(data=st.data(), seed=SEEDS)
@settings(max_examples=100, deadline=None)
def test_bytes_of_a_prompt_that_are_no_text_are_not_in_the_response(random_tokenizer, data, seed):
    made = random_tokenizer(seed)
    prompt = data.draw(tokens_of(made))
    words = [token for token in range(made.get_vocab_size()) if made.decode([token, token]).isascii()]
    words = [token for token in words if not made.id_to_token(token).startswith("<0x")]
    tokens = data.draw(st.lists(st.sampled_from(words), min_size=1, max_size=10))
    text = whole_text(made.decode, prompt, tokens)
    assert REPLACEMENT not in text
    if random_tokenizer.kind == "byte_level":
        assert text == made.decode(tokens)


class Bytes:
    """A tokenizer whose tokens are bytes."""

    def decode(self, token_ids):
        return bytes(token_ids).decode(errors="replace")


@given(text=st.text(max_size=30), width=st.integers(1, 5))
@settings(max_examples=100, deadline=None)
def test_no_character_waits_once_it_is_whole(text, width):
    tokens, growing, seen = text.encode(), StreamedText(Bytes().decode), ""
    for start in range(0, len(tokens), width):
        seen += growing.add(tokens[start : start + width])
        whole = tokens[: start + width].decode(errors="ignore")
        assert seen in (whole, whole.rstrip("\N{REPLACEMENT CHARACTER}"))


class Counting:
    """A tokenizer that counts what it decodes."""

    def __init__(self):
        self.decoded = 0

    def decode(self, token_ids):
        self.decoded += len(token_ids)
        return "x" * len(token_ids)


def test_a_long_text_is_not_decoded_anew_with_each_piece():
    tokenizer = Counting()
    growing = StreamedText(tokenizer.decode)
    assert [growing.add([1] * 16) for _ in range(1000)] == ["x" * 16] * 1000
    assert tokenizer.decoded <= 4 * 16 * 1000
