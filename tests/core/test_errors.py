"""Messages show foreign values on one line, shortened, with nothing that a terminal obeys."""

import pytest

from seer_core.errors import printable, quote


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


def test_text_for_the_screen_loses_its_escapes_and_may_keep_its_lines():
    assert printable("first\nsecond", keep="\n") == "first\nsecond"
    assert printable("first\nsecond") == r"first\nsecond"
    assert printable("\x1b[2Jgone\r\u200b\x85") == r"\x1b[2Jgone\r\u200b\x85"
    assert printable("x" * 50, 10) == "x" * 10 + "... (50 characters)"
