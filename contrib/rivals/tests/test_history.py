"""The order by the last epoch's lengths."""

import json

import pytest
from seer_rivals.expected_lengths import EarlierLengths, read_lengths, true_remaining
from seer_rivals.history import Settings, seer_make_prioritizer

from seer_core.errors import ConfigError, PromptError
from seer_core.model import GroupContext, Request
from seer_core.plugins.hookspecs import Startup


def request(group_id="g", *, index=0, generated=0, known=None, seq=0, limit=100):
    group = GroupContext(group_id, seq, 4, 10, limit, known, left=4, first_seq=4 * seq)
    return Request(group, index, generated_tokens=generated)


def test_what_is_left_is_the_mean_of_the_longer_ones():
    lengths = EarlierLengths({"g": (10, 20, 60)})
    assert lengths.remaining(request()) == 30
    assert lengths.remaining(request(generated=10)) == 30
    assert lengths.remaining(request(generated=20)) == 40


def test_a_response_that_outgrows_all_earlier_ones_may_reach_its_limit():
    lengths = EarlierLengths({"g": (10, 20, 60)})
    assert lengths.remaining(request(generated=60)) == 40
    assert lengths.remaining(request("new", generated=5)) == 95
    assert EarlierLengths({"g": (500,)}).remaining(request(generated=5)) == 95


def test_without_a_file_the_lengths_come_with_the_prompts():
    assert EarlierLengths(None).remaining(request(known=(10, 50))) == 30
    assert true_remaining(request(index=1, known=(10, 50), generated=20)) == 30
    for remaining in (EarlierLengths(None).remaining, true_remaining):
        with pytest.raises(PromptError, match="lengths of group 'g' are not known"):
            remaining(request())


def test_the_longest_remaining_is_first_and_a_chunk_changes_that(tmp_path):
    (tmp_path / "lengths.json").write_text(json.dumps({"long": [90, 90], "short": [20, 20]}))
    queue = seer_make_prioritizer(Settings(lengths="lengths.json"), Startup(base_dir=tmp_path, seed=0))
    long, short = request("long", seq=0), request("short", seq=1)
    queue.push(short)
    queue.push(long)
    assert queue.peek() is long
    queue.take(long)
    long.generated_tokens = 85
    queue.push(long)
    assert queue.peek() is short
    queue.take(long)
    assert (queue.peek(), len(queue)) == (short, 1)


@pytest.mark.parametrize("text", ["{", '{"g": 5}', '["g"]'])
def test_a_file_of_something_else_is_refused_with_the_remedy(tmp_path, text):
    file = tmp_path / "lengths.json"
    file.write_text(text)
    with pytest.raises(ConfigError, match=r"no file of lengths.*last epoch"):
        read_lengths(file)
