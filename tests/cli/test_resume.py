"""``seer run --resume``: however often a run dies, the same command ends it, with the same tokens."""

import json
import os
import random
import shutil
import signal
from functools import partial

import pytest

from tests.support.eventually import eventually

from .helpers import BOUND_S, lines_of

ROLLOUT = """
[rollout]
n = 8
max_tokens = 600
[engine.no_model]
token_s = {token_s}
[plugin.divided_rollout]
chunk_tokens = 16
"""


@pytest.fixture
def run(no_model, write_config, write_prompts, tmp_path):
    """Return a function that gives the arguments of a run over engines with keyed tokens and no model."""
    prompts = write_prompts(*({"prompt_token_ids": [5, each], "group_id": str(each)} for each in range(6)))

    def arguments(out="out", *more, token_s=0.005, prompts=prompts):
        config = write_config(["divided_rollout"], ROLLOUT.format(token_s=token_s), engine="no_model")
        return ("run", config, "--prompts", prompts, "--out", tmp_path / out, *more)

    return arguments


@pytest.fixture
def killed(run, start_seer, tmp_path):
    """Return a function that starts a run and kills it once it has written some completions."""

    def kill(number=signal.SIGKILL, after=3, *more):
        process = start_seer(*run("out", *more))
        completions = tmp_path / "out" / "completions.jsonl"
        eventually(lambda: lines_in(completions) >= after or process.poll() is not None)
        assert process.poll() is None, process.stderr.read()
        process.send_signal(number)
        return process.communicate(timeout=BOUND_S)[1]

    return kill


def lines_in(path):
    return path.read_bytes().count(b"\n") if path.exists() else 0


def tokens_of(directory):
    found = {
        each["request_id"]: (each["token_ids"], each["logprobs"], each["finish_reason"])
        for each in lines_of(directory / "completions.jsonl")
    }
    assert len(found) == len(lines_of(directory / "completions.jsonl"))
    return found


def summary_of(directory):
    return json.loads((directory / "summary.json").read_bytes())


@pytest.fixture
def expected(run, seer, tmp_path):
    """Return the tokens of the run without a death."""
    assert seer(*run("undisturbed", token_s=0)).exit_code == 0
    return tokens_of(tmp_path / "undisturbed")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_run_that_was_killed_goes_on_with_the_same_command(run, killed, expected, seer, tmp_path, number):
    errors = killed(number)
    assert ("the same command with --resume" in errors) == (number != signal.SIGKILL)
    out = tmp_path / "out"
    assert len(tokens_of(out)) < len(expected)
    result = seer(*run("out", "--resume", token_s=0))
    assert result.exit_code == 0, result.output
    assert "the journal has " in result.stderr
    assert "tokens came from the journal and were not computed again" in result.stdout
    assert tokens_of(out) == expected
    summary = summary_of(out)
    assert 0 < summary["resumed_tokens"] < summary["tokens"]
    assert sorted(path.name for path in out.iterdir()) == ["completions.jsonl", "summary.json", "trace.jsonl"]
    result = seer(*run("out", "--resume", "--json", tmp_path / "summary.json"))
    assert (result.exit_code, result.stdout) == (0, f"the run in {out} has finished; nothing is left to do\n")
    assert json.loads((tmp_path / "summary.json").read_bytes()) == summary
    os.truncate(out / "completions.jsonl", (out / "completions.jsonl").stat().st_size // 2)
    result = seer(*run("out", "--resume"))
    assert result.exit_code == 2
    assert f" of its {summary['requests']} responses in completions.jsonl and no journal" in result.stderr


def test_a_run_that_was_killed_between_its_summary_and_the_end_leaves_no_journal(run, killed, seer, tmp_path):
    killed()
    out, aside = tmp_path / "out", tmp_path / "aside"
    shutil.copytree(out / "journal", aside)
    assert seer(*run("out", "--resume", token_s=0)).exit_code == 0
    shutil.copytree(aside, out / "journal")
    result = seer(*run("out", "--resume"))
    assert (result.exit_code, result.stdout) == (0, f"the run in {out} has finished; nothing is left to do\n")
    assert not (out / "journal").exists()


def test_a_run_that_dies_again_and_again_loses_nothing(run, start_seer, expected, tmp_path):
    draw, out, deaths = random.Random(3), tmp_path / "out", 0
    while True:
        process = start_seer(*run("out", "--resume", token_s=0.003))
        journal = out / "journal"
        wanted = draw.randrange(5, 30) * 1000
        before = _size(journal)
        eventually(partial(_has_grown_or_ended, journal, before + wanted, process))
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
            deaths += 1
        _, errors = process.communicate(timeout=BOUND_S)
        if process.returncode == 0:
            break
        assert process.returncode == -signal.SIGKILL, errors
    assert deaths > 1
    assert tokens_of(out) == expected


def _has_grown_or_ended(journal, size, process):
    return _size(journal) >= size or process.poll() is not None


def _size(directory):
    try:
        return sum(path.stat().st_size for path in directory.iterdir())
    except OSError:
        return 0


def test_without_resume_what_is_there_is_safe(run, killed, fails, seer, tmp_path):
    killed()
    out = tmp_path / "out"
    before = tokens_of(out)
    assert "holds a run that has not finished; go on with it with --resume, replace it" in fails(*run())
    assert tokens_of(out) == before
    assert seer(*run("out", "--overwrite", token_s=0)).exit_code == 0
    assert summary_of(out)["resumed_tokens"] == 0


def test_another_run_is_refused_in_words_of_its_settings(run, killed, fails, write_prompts, seer, tmp_path):
    killed()
    out = tmp_path / "out"
    before = sorted(path.name for path in (out / "journal").iterdir())
    resumed = run("out", "--resume", token_s=0)
    assert "--iteration was '0' and is '1' now" in fails(*resumed, "--iteration", "1")
    assert "[seer].seed was '0' and is '7' now" in fails(*resumed, "--set", "seer.seed=7")
    message = fails(*resumed, "--set", "rollout.max_tokens=500")
    assert "max_tokens was 600 and is 500 now" in message
    assert "sampling was" in fails(*resumed, "--set", "rollout.temperature=0.5")
    other = write_prompts({"prompt_token_ids": [9], "group_id": "9"}, name="other.jsonl")
    message = fails(*run("out", "--resume", prompts=other))
    assert "the digest of the prompts was" in message
    assert sorted(path.name for path in (out / "journal").glob("*") if path.stat().st_size > 200) == before
    assert seer(*resumed).exit_code == 0


def test_another_run_than_the_finished_one_is_refused_too(run, fails, seer, write_prompts, tmp_path):
    resumed = run("out", "--resume", token_s=0)
    assert seer(*resumed).exit_code == 0
    assert "--iteration was 0 and is 1 now; restore it" in fails(*resumed, "--iteration", "1")
    assert "[seer].seed was 0 and is 7 now; restore it" in fails(*resumed, "--set", "seer.seed=7")
    other = write_prompts({"prompt_token_ids": [5, 7], "group_id": "7"}, name="other.jsonl")
    for changed in (run("out", "--resume", prompts=other), (*resumed, "--set", "rollout.temperature=0.5")):
        assert "the digest of prompts and sampling was" in fails(*changed)
    assert seer(*run("out", "--resume", token_s=0.001)).exit_code == 0  # engines may be others


def test_engines_and_plug_ins_may_change(run, killed, expected, seer, tmp_path):
    killed()
    result = seer(
        *run("out", "--resume", "--set", "engine.no_model.instances=5", "-p", "no:divided_rollout", token_s=0)
    )
    assert result.exit_code == 0, result.output
    assert tokens_of(tmp_path / "out") == expected


def test_two_runs_do_not_write_into_one_directory(run, start_seer, fails, tmp_path):
    process = start_seer(*run("out", token_s=0.01))
    completions = tmp_path / "out" / "completions.jsonl"
    eventually(lambda: completions.exists() or process.poll() is not None)
    assert process.poll() is None
    message = fails(*run("out", "--resume"))
    assert f"another run writes into {tmp_path / 'out'}; let it end first" in message
    assert "another run writes into" in fails(*run("out", "--overwrite"))
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=BOUND_S)


def test_resume_begins_where_there_is_nothing_and_needs_a_journal(run, fails, seer, expected, tmp_path):
    assert seer(*run("out", "--resume", token_s=0)).exit_code == 0
    assert tokens_of(tmp_path / "out") == expected
    assert seer(*run("out", "--resume", "--overwrite")).exit_code == 2
    assert seer(*run("out", "--resume", "--journal", "none")).exit_code == 2
    (tmp_path / "out" / "summary.json").unlink()
    assert "no journal to go on with; replace them with --overwrite" in fails(*run("out", "--resume"))


def test_without_a_journal_there_is_none(run, killed, fails, tmp_path):
    errors = killed(signal.SIGTERM, 3, "--journal", "none")
    assert "--resume" not in errors
    assert not (tmp_path / "out" / "journal").exists()
    assert "no journal to go on with" in fails(*run("out", "--resume"))


def test_a_damaged_journal_costs_time_and_no_token(run, killed, expected, seer, tmp_path):
    killed()
    [path] = (tmp_path / "out" / "journal").iterdir()
    data, draw = bytearray(path.read_bytes()), random.Random(5)
    for _ in range(40):
        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    path.write_bytes(data)
    result = seer(*run("out", "--resume", token_s=0))
    assert result.exit_code == 0, result.output
    assert "journal_damaged" in result.stderr
    assert tokens_of(tmp_path / "out") == expected


def test_hidden_files_of_a_run_that_was_killed_early_are_removed(run, seer, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / ".completions.0123abcd.jsonl").write_text("{}\n")
    (tmp_path / "out" / ".notes").write_text("mine")
    assert seer(*run("out", token_s=0)).exit_code == 0
    assert [path for path in os.listdir(tmp_path / "out") if path.startswith(".")] == [".notes"]


def test_a_run_whose_directory_is_deleted_ends_at_the_next_response(run, start_seer, tmp_path):
    process = start_seer(*run("out", token_s=0.02))
    completions = tmp_path / "out" / "completions.jsonl"
    eventually(lambda: lines_in(completions) or process.poll() is not None)
    assert process.poll() is None, process.stderr.read()
    shutil.rmtree(tmp_path / "out")
    errors = process.communicate(timeout=BOUND_S)[1]
    assert process.returncode == 2, errors
    assert "completions.jsonl was deleted while the run wrote it" in errors
    assert "Traceback" not in errors
