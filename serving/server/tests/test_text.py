"""Text in pieces: the same as at once, wherever it is cut."""

import shutil
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from seer_server.text import StreamedText
from seer_worker.tokenizer import ModelTokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

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
    # Whole characters alone: bytes that are no text change the text before them.
    letters = st.characters(codec="utf-8").map(str.encode)
    return one_of(len(WORDS)) | letters.map(lambda letter: [len(WORDS) + byte for byte in letter])


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
    text = tokenizer.decode(tokens)
    assert "".join(pieces) + growing.rest(text) == text


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
