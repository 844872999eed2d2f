"""The tokens of a paced instance, and scripts that will not do.  No engine is needed."""

import json

import pytest
from seer_paced.script import Script, ScriptError, read_script
from seer_sim.lengths import Lengths
from seer_sim.tokens import EOS_TOKEN_ID, generate

from seer_core.errors import ConfigError
from seer_core.model import Sampling
from seer_core.ports.engine import ChunkJob

TEXT = [11, 12, 13, 14, 2]


def job(request="g/0", generated=(), max_tokens=8, known=None, turn_start=0):
    return ChunkJob(
        "c",
        request,
        "g",
        [5, 6, 7, *generated],
        prompt_tokens=3,
        max_tokens=max_tokens,
        sampling=Sampling(),
        seed=9,
        weight_version=0,
        known_tokens=known,
        turns=bool(turn_start),
        turn_start=turn_start,
    )


def written(tmp_path, *lines):
    path = tmp_path / "completions.jsonl"
    path.write_text("".join(line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines))
    return path


def recorded(tmp_path, **more):
    line = {"request_id": "g/0", "token_ids": TEXT, "finish_reason": "stop", "cost": 3} | more
    return Script(100, Lengths(), read_script(written(tmp_path, line), 100))


def test_made_up_text_is_that_of_the_simulator_whole_or_in_chunks():
    script = Script(32000, Lengths())
    whole = script.tokens_of(job(known=8, max_tokens=100))
    assert (list(whole.token_ids), whole.end) == (generate(9, 3, 8, True, 32000)[0], EOS_TOKEN_ID)
    first = script.tokens_of(job(known=8, max_tokens=5))
    assert first.end is None
    second = script.tokens_of(job(known=8, generated=first.token_ids))
    assert [*first.token_ids, *second.token_ids] == whole.token_ids
    with pytest.raises(ScriptError, match="'g/0' was over before this chunk"):
        script.tokens_of(job(known=8, generated=whole.token_ids))


def test_behind_an_answer_a_length_is_that_of_the_turn():
    script = Script(32000, Lengths())
    first = script.tokens_of(job(known=8, max_tokens=100)).token_ids
    text = [*first, 7, 7, 7, 7, 7]
    turn = script.tokens_of(job(known=8, generated=text, max_tokens=100, turn_start=3 + len(text)))
    assert (list(turn.token_ids), turn.end) == (generate(9, 3 + len(text), 8, True, 32000)[0], EOS_TOKEN_ID)


def test_a_recorded_text_is_repeated(tmp_path):
    script = recorded(tmp_path)
    assert script.has_text
    assert list(script.tokens_of(job(max_tokens=3)).token_ids) == TEXT[:3]
    written = script.tokens_of(job(generated=TEXT[:3]))
    assert (list(written.token_ids), written.end) == (TEXT[3:], 2)


def test_a_chunk_that_the_script_has_not_is_refused_in_one_sentence(tmp_path):
    script = recorded(tmp_path, finish_reason="length")
    with pytest.raises(ScriptError, match="has no response 'h/0'; name the completions"):
        script.tokens_of(job("h/0"))
    with pytest.raises(ScriptError, match=r"has 5 tokens, .* up to number 8: it was cut there; lower"):
        script.tokens_of(job())
    with pytest.raises(ScriptError, match="come back with other tokens"):
        script.tokens_of(job(generated=[11, 13], max_tokens=1))
    with pytest.raises(ScriptError, match="it stopped there"):
        recorded(tmp_path).tokens_of(job(generated=TEXT))


@pytest.mark.parametrize(
    ("lines", "complaint"),
    [
        ([], "is empty"),
        (["{"], "line 1: .*; name the completions.jsonl"),
        ([{"request_id": "a"}], "line 1: .*token_ids"),
        ([{"request_id": "a", "token_ids": []}], "'a' is empty; drop it"),
        ([{"request_id": "a", "token_ids": [7, 100]}], "not below vocab_size = 100; raise it"),
        ([{"request_id": "a", "token_ids": [7, 8, 7]}], "its last token, which would end it, in its midst"),
        ([{"request_id": "a", "token_ids": [7]}] * 2, "line 2: 'a' stands there twice"),
    ],
)
def test_a_script_that_will_not_do_is_refused_with_its_line(tmp_path, lines, complaint):
    with pytest.raises(ConfigError, match=complaint):
        read_script(written(tmp_path, *lines), 100)


def test_a_script_that_is_not_there_is_a_config_error(tmp_path):
    with pytest.raises(ConfigError, match=r"engine.paced.script: .*nowhere cannot be read"):
        read_script(tmp_path / "nowhere", 100)
