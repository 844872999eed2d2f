"""Reading what others wrote: every fault is one sentence with the place, the fact and the remedy."""

import gzip
import lzma
import sys

import msgspec
import pytest
from seer_cli.profiles import read_profile
from seer_host.json_files import JsonFormat, describe_flaw
from seer_trace.records import read_trace

from seer_core.errors import ConfigError, InputError


class Figures(msgspec.Struct):
    name: str
    value: float = 0.0
    more: object = None


FIGURES = JsonFormat[Figures](Figures, "no figures", "write them anew", InputError)


@pytest.mark.parametrize(
    ("raw", "fact"),
    [
        (b'{"name": "a\xff"}', "byte 0xff at 11 is not UTF-8"),
        (b'\xef\xbb\xbf{"name": "a"}', "it begins with a byte-order mark, save it as UTF-8 without one"),
        (b"version https://git-lfs/spec/v1\noid sha256:0", "git-lfs pointer and not the file itself, fetch"),
        (b'{"name": "a", "more": ' + b"[" * 100_000, "nested too deeply"),
        (b'{"name": "a", "else": ' + b"[" * 100_000, "nested too deeply"),
        (b'{"name": "a", "more": ' + b"9" * 5000 + b"}", "more: integer value out of range"),
        (b'{"name": "a", "value": 1e999}', "value: number out of range"),
        (b'{"value": 1}', "object missing required field `name`"),
        (b'{"name": 3}', "name: expected `str`, got `int`"),
        (b'["a"]', "expected `object`, got `array`"),
        (b'{"name": "a", "value": ', "it ends within a value"),
        (b"{\n", "its value has several lines, write each value in one, as `jq -c` does"),
        (b"", "it is empty"),
        (b"\n", "it is empty"),
        (gzip.compress(b'{"name": "a"}'), "it is compressed, unpack it with `gunzip`"),
        (lzma.compress(b'{"name": "a"}'), "it is compressed, unpack it with `unxz`"),
        (b"PK\x03\x04\x14", "it is a zip archive, unpack it with `unzip`"),
        ('{"name": "a"}'.encode("utf-16"), "it is text in UTF-16 or UTF-32, save it as UTF-8"),
        ('{"name": "a"}'.encode("utf-16-le"), "byte 1 is zero: it is damaged, or no text in UTF-8"),
        (b'{"name": "\\ud83d"}', "\\ud83d is half of a character, write both halves"),
        (b'{"name": "\\\\ud83d\\ude00\\ud83d\\ude00"}', "\\ude00 is half of a character"),
        (b'{"name": "a", "value": -Infinity}', "Infinity at byte 24 is no number in JSON"),
    ],
    ids=range(22),
)
def test_what_is_wrong_with_a_file_is_one_sentence(tmp_path, raw, fact):
    path = tmp_path / "figures.json"
    path.write_bytes(raw)
    with pytest.raises(InputError) as caught:
        FIGURES.read(path)
    message = str(caught.value)
    assert message.startswith(f"{path} is no figures: ")
    assert fact in message
    assert message.endswith("; write them anew")
    assert len(message) < 500 + len(str(path))


def test_what_is_wrong_with_bytes_that_are_not_given_is_said_of_any():
    with pytest.raises(msgspec.DecodeError) as caught:
        msgspec.json.decode(b'{"name": ')
    assert describe_flaw(caught.value) == "it ends within a value, or is empty"


def test_a_line_is_named_by_its_number(tmp_path):
    path = tmp_path / "figures.jsonl"
    path.write_bytes(b'{"name": "a"}\n{"name": "\xff"}\n')
    lines = FIGURES.lines(path)
    assert next(lines) == (1, Figures("a"))
    with pytest.raises(InputError, match=r"figures\.jsonl:2: no figures: byte 0xff at 10 is not UTF-8"):
        next(lines)


@pytest.mark.parametrize("name", ["missing", ".", "nul\0byte"])
def test_what_is_no_file_is_the_same_error(tmp_path, name):
    for read in (FIGURES.read, lambda path: list(FIGURES.lines(path))):
        with pytest.raises(InputError, match="write them anew"):
            read(tmp_path / name)


def test_a_key_as_long_as_the_file_or_with_escapes_is_shown_short_and_harmless(tmp_path):
    strict = JsonFormat[object](
        msgspec.defstruct("S", ["a"], forbid_unknown_fields=True), "no S", "go", InputError
    )
    for key in ("k" * 1_000_000, "\x1b[2J\x07"):
        (tmp_path / "s.json").write_bytes(msgspec.json.encode({key: 1}))
        with pytest.raises(InputError) as caught:
            strict.read(tmp_path / "s.json")
        assert str(caught.value).isprintable()
        assert len(str(caught.value)) < 1000


@pytest.mark.parametrize(
    "change",
    [{"seconds": [[1e-320]]}, {"seconds": [[1e300]]}, {"batch": [2**60]}, {"context_tokens": -1}],
)
def test_step_times_beyond_any_engine_are_no_profile(tmp_path, change):
    table = {"batch": [1], "draft_tokens": [0], "seconds": [[1e-3]]}
    path = tmp_path / "profile.json"
    path.write_bytes(msgspec.json.encode(table | change))
    with pytest.raises(ConfigError, match=r"is no profile: .*write one with `seer profile`"):
        read_profile(path)


def test_a_trace_that_is_not_there_is_an_input_error(tmp_path):
    with pytest.raises(InputError, match=r"cannot read .*nowhere.jsonl: No such file"):
        list(read_trace(tmp_path / "nowhere.jsonl"))


def test_reading_leaves_the_limit_on_digits_as_it_is():
    assert sys.get_int_max_str_digits() == 4300
