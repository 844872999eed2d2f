"""Messages show foreign values on one line, shortened, with nothing that a terminal obeys."""

import pytest

from seer_core.error_origin import fact_of
from seer_core.errors import printable, quote
from tests.support.raising import ERRORS, class_of, raise_one


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("plain", "'plain'"),
        ("\x1b[31mred\x07", r"'\x1b[31mred\x07'"),
        ("a\nb\u202eb\udc80", r"'a\nb\u202eb\udc80'"),
        ("größer 中", "'größer 中'"),
        (b"\x9b1m", r"b'\x9b1m'"),
        (None, "None"),
        ({"\x1b]0;": [1]}, r"{'\x1b]0;': [1]}"),
        ("x" * 20_000_000, f"'{'x' * 100}'... (20,000,000 characters)"),
        (b"x" * 101, f"b'{'x' * 100}'... (101 bytes)"),
        (["\x1b"] * 1000, r"['\x1b', " + "'\\x1b', " * 11),
        (10**5000, "a value of type int that is too large to show"),
        ([10**5000], "a value of type list that is too large to show"),
    ],
    ids=range(12),
)
def test_a_quoted_value_is_one_short_harmless_line(value, shown):
    text = quote(value)
    assert text.startswith(shown)
    assert text.isprintable()
    assert len(text) < 140


def test_a_quoted_object_cannot_break_the_line_either():
    class Rude:
        def __repr__(self):
            return "one\ntwo\x1b[2J"

    assert quote(Rude()) == r"one\ntwo\x1b[2J"


class Odd:
    """An object with any text."""

    def __init__(self, text):
        self.text = text

    def __repr__(self):
        if isinstance(self.text, BaseException):
            raise self.text
        return self.text


class OddText(str):
    def isprintable(self):
        raise SystemExit(3)

    __len__ = __getitem__ = isprintable


class WithoutClass:
    @property
    def __class__(self):
        raise KeyError("class")

    def __repr__(self):
        return "odd"


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (Odd(KeyError("x")), "a value of type Odd whose text cannot be read, which raised KeyError"),
        (Odd(ValueError("x")), "a value of type Odd whose text cannot be read, which raised ValueError"),
        (Odd(SystemExit(3)), "a value of type Odd whose text cannot be read, which raised SystemExit"),
        (Odd(5), "a value of type Odd whose text cannot be read, which raised TypeError"),
        ([Odd(GeneratorExit())], "a value of type list whose text cannot be read"),
        (Odd("x" * 10**7), f"{'x' * 100}... (10,000,000 characters)"),
        (Odd("\ud800\x1b"), r"\ud800\x1b"),
        (Odd(OddText("odd")), "odd"),
        (OddText("odd"), "a value of type OddText whose text cannot be read, which raised SystemExit"),
        (WithoutClass(), "a value of type WithoutClass whose text cannot be read, which raised KeyError"),
    ],
    ids=range(10),
)
def test_an_object_with_any_text_can_be_quoted(value, shown):
    assert quote(value).startswith(shown)
    assert quote(value).isprintable()
    assert len(quote(value)) < 140


@pytest.mark.parametrize("name", ERRORS)
def test_the_first_line_of_any_error_can_be_said(name):
    try:
        raise_one(name)
    except BaseException as error:
        fact = fact_of(error)
    assert fact.startswith(class_of(name))
    assert fact.isprintable()
    assert len(fact) < 1200


def test_an_error_without_a_text_is_its_class():
    assert fact_of(ValueError()) == fact_of(ValueError(" \n")) == "ValueError"
    assert fact_of(ValueError("\n one\ntwo")) == "ValueError: one"


def test_text_for_the_screen_loses_its_escapes_and_may_keep_its_lines():
    assert printable("first\nsecond", keep="\n") == "first\nsecond"
    assert printable("first\nsecond") == r"first\nsecond"
    assert printable("\x1b[2Jgone\r\u200b\x85") == r"\x1b[2Jgone\r\u200b\x85"
    assert printable("x" * 50, 10) == "x" * 10 + "... (50 characters)"
