"""Drafts whose worth follows from recorded text: read, replayed and simulated by the commands."""

import json

import numpy as np
import pytest
from click.testing import CliRunner
from seer_grouped_spec.replay import Recording
from seer_lab.cli import sim_command
from seer_lab.replayed import read_replayed, replayed_drafts


def groups(count=4, size=4, tokens=300, seed=0):
    """Groups that repeat a phrase but for one token of ten, or nothing where the group's number is odd."""
    random = np.random.default_rng(seed)
    made = []
    for group in range(count):
        text = np.resize(random.integers(0, 5000, 40), tokens)
        changed = 1.0 if group % 2 else 0.1
        texts = [
            np.where(random.random(tokens) < changed, random.integers(0, 5000, tokens), text)
            for _ in range(size)
        ]
        responses = tuple(each[8 * number :].astype(np.int32) for number, each in enumerate(texts))
        made.append(Recording(f"g{group}", np.zeros(1, np.int32), responses))
    return made


def test_responses_that_repeat_gain_more_than_those_that_do_not():
    drafts = replayed_drafts(groups())
    gains = {
        kind: [each.gain(0, each.tokens) for each in drafts.responses if int(each.group[1:]) % 2 == kind]
        for kind in (0, 1)
    }
    assert max(gains[1]) < 0.1 < np.mean(gains[0])
    assert drafts.texts[0].gain < drafts.texts[-1].gain
    steps = sum(sum(each.steps) for each in drafts.responses)
    tokens = sum(each.tokens for each in drafts.responses)
    assert np.mean([text.gain for text in drafts.texts]) == pytest.approx(tokens / steps - 1, rel=0.1)


@pytest.fixture
def recorded(tmp_path):
    """Write recorded groups as text and as lengths, and return both files."""
    made = groups()
    text, lengths = tmp_path / "text.jsonl", tmp_path / "lengths.jsonl"
    lines = [{"group": each.group, "responses": [r.tolist() for r in each.responses]} for each in made]
    text.write_text("".join(json.dumps(line) + "\n" for line in lines))
    lines = [
        {"group": each.group, "prompt_tokens": 16, "output_tokens": [len(r) for r in each.responses]}
        for each in made
    ]
    lengths.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return text, lengths


def test_the_command_takes_recorded_responses_and_drafts_only_where_a_policy_does(recorded, tmp_path):
    text, lengths = recorded
    file = tmp_path / "rows.json"
    arguments = [str(lengths), "--policy", "context", "--policy", "seer", "--json", str(file)]
    totals = []
    for more in ([], ["--drafts", str(text)]):
        result = CliRunner().invoke(sim_command, [*arguments, *more], catch_exceptions=False)
        assert result.exit_code == 0
        totals.append([row["total_time_s"] for row in json.loads(file.read_text())])
    assert totals[0][0] == totals[1][0]
    assert totals[0][1] != totals[1][1]


def test_a_bound_is_refused_beside_recorded_drafts(recorded):
    text, lengths = recorded
    result = CliRunner().invoke(sim_command, [str(lengths), "--drafts", str(text), "--bound"])
    assert result.exit_code != 0
    assert "--bound has no least time for drafts of recorded text" in " ".join(result.output.split())


@pytest.mark.parametrize(("answered", "written"), [(0, 9), (3, 6)])
def test_a_runs_directory_stands_for_its_responses_without_the_answers_of_environments(
    tmp_path, answered, written
):
    turns = [{"tokens": 3, "answer_tokens": answered}, {"tokens": 6 - answered, "answer_tokens": 0}]
    line = {"group_id": "a", "index": 0, "token_ids": [5, 6, 7, 5, 6, 7, 5, 6, 7], "turns": turns}
    (tmp_path / "completions.jsonl").write_text(json.dumps(line) + "\n")
    (response,) = read_replayed(tmp_path).responses
    assert (response.id, response.group, response.tokens) == ("a/0", "a", written)
