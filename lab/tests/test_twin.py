"""The twin of a simulated engine predicts it, and what does not go together is named."""

import json
import re
import shutil
from functools import partial
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner
from seer_cli import main
from seer_cli.profiles import read_profile
from seer_host.config_files import load_config
from seer_lab.twin import make_twin, recorded_drafts

from seer_core.errors import ConfigError, PromptError

ROOT = Path(__file__).parents[2]

CONFIG = """
[seer]
engine = "sim"
kv_pool = "sim_pool"
plugins = ["divided_rollout", "context_sched", "grouped_spec"]

[engine.sim]
kv_capacity_tokens = 8192
max_model_tokens = 4096
acceptance = { request_s = 0 }
cost = { prefill_attention_flops = 0, request_s = 2e-5 }

[plugin.divided_rollout]
chunk_tokens = 512
reserved_share = 1  # with half, the twin of the arm with drafts is 3.7 % off
"""


@pytest.fixture(scope="module")
def sitting(tmp_path_factory):
    """A directory with a config and all that was measured of its engines."""
    return measure(tmp_path_factory.mktemp("twin"), groups=16, n=8, max_tokens=2500)


@pytest.fixture(scope="module")
def short_sitting(tmp_path_factory):
    """Such a directory of a few short responses, which are simulated in no time."""
    return measure(tmp_path_factory.mktemp("short"), groups=2, n=2, max_tokens=200)


def measure(folder, *, groups, n, max_tokens):
    """Write a config, and all that is measured of its engines."""
    (folder / "config.toml").write_text(CONFIG)
    lines = [json.dumps({"prompt": f"question {i}", "n": n, "max_tokens": max_tokens}) for i in range(groups)]
    (folder / "prompts.jsonl").write_text("\n".join(lines))

    def seer(command, *arguments):
        result = CliRunner().invoke(main, [command, str(folder / "config.toml"), *map(str, arguments)])
        assert result.exit_code == 0, result.output
        return result

    seer("profile", "--together", "--context", 64, "--context", 1024, "--out", folder / "profile.json")
    seer("run", "--prompts", folder / "prompts.jsonl", "--out", folder / "run")
    seer("compare", "--json", folder / "compare.json")
    return folder


def test_an_engine_that_does_not_draft_has_a_twin(seer, sitting, tmp_path):
    config = tmp_path / "config.toml"
    config.write_text(CONFIG.replace(', "grouped_spec"', ""))
    files = {name: tmp_path / f"{name}.json" for name in ("profile", "compare", "twin")}
    prompts = ("--prompts", sitting / "prompts.jsonl")
    for command in (
        ("profile", config, "--together", "--context", 64, "--context", 1024, "--out", files["profile"]),
        ("run", config, *prompts, "--out", tmp_path / "run"),
        ("compare", config, *prompts, "--json", files["compare"]),
    ):
        assert seer(*command).exit_code == 0
    assert read_profile(files["profile"]).draft_tokens == (0,)
    more = ("--compare", files["compare"], "--json", files["twin"])
    result = seer("twin", config, "--profile", files["profile"], "--lengths", tmp_path / "run", *more)
    assert result.exit_code == 0, result.output
    for arm in json.loads(files["twin"].read_text()):
        assert arm["error"]["total_time_s"] == pytest.approx(0, abs=0.02), arm


def twin(seer, folder, *more, **files):
    names = {"config": "config.toml", "profile": "profile.json", "lengths": "run", **files}
    paths = {name: folder / file for name, file in names.items()}
    return seer("twin", paths["config"], "--profile", paths["profile"], "--lengths", paths["lengths"], *more)


@pytest.fixture(scope="module")
def bounded(sitting):
    """Output, arms and page of the twin of the sitting, with the least times."""
    files = "--compare", sitting / "compare.json", "--json", sitting / "twin.json"
    run = partial(CliRunner().invoke, main)
    result = twin(
        lambda *arguments: run([str(argument) for argument in arguments]),
        sitting,
        *("--bound", *files, "--report", sitting / "page.html"),
    )
    assert result.exit_code == 0, result.output
    return result.stdout, json.loads((sitting / "twin.json").read_text()), (sitting / "page.html").read_text()


def test_the_twin_of_a_simulated_engine_predicts_it_within_one_percent(bounded):
    shown, arms, _ = bounded
    assert [arm["name"] for arm in arms][-2:] == ["+ grouped_spec", "oracle"]
    for arm in arms:
        assert arm["over_bound"]["predicted"] > 1
        assert arm["over_bound"]["measured"] == pytest.approx(arm["over_bound"]["predicted"], rel=0.01)
        assert sum(arm["shares"].values()) == pytest.approx(1)
    assert arms[3]["bound"]["total_time_s"] < arms[4]["bound"]["total_time_s"]
    assert "over bound" in shown
    assert "bound+drafts" in shown
    for arm in arms:
        assert arm["error"]["total_time_s"] == pytest.approx(0, abs=0.01), arm
        assert arm["predicted"]["preemptions"] == arm["measured"]["preemptions"]
    assert arms[0]["measured"]["preemptions"] > 0
    assert arms[3]["predicted"]["acceptance_length"] > 1.1
    assert arms[3]["error"]["acceptance_length"] == pytest.approx(0, abs=0.02)
    assert "predicted" in shown
    assert "error" in shown


@pytest.mark.engine
@pytest.mark.long
def test_vllm_s_own_scheduler_paced_by_the_profile_takes_as_long_too(seer, sitting, tmp_path):
    pytest.importorskip("vllm")
    arms = json.loads((sitting / "compare.json").read_text())
    (tmp_path / "plain.json").write_text(json.dumps(arms[:3]))
    measured = ("--compare", tmp_path / "plain.json", "--json", tmp_path / "twin.json")
    plain = ("--set", 'compare.techniques=["divided_rollout", "context_sched"]', "--set", "compare.oracle=[]")
    result = twin(seer, sitting, "--engine", "paced", *plain, *measured)
    assert result.exit_code == 0, result.output
    arms = json.loads((tmp_path / "twin.json").read_text())
    assert [arm["name"] for arm in arms] == ["baseline", "+ divided_rollout", "+ context_sched"]
    for arm in arms:
        assert arm["error"]["total_time_s"] == pytest.approx(0, abs=0.05), arm
    assert arms[0]["predicted"]["preemptions"] == pytest.approx(arms[0]["measured"]["preemptions"], rel=0.1)


def test_without_a_comparison_only_predictions_are_shown(seer, sitting):
    result = twin(seer, sitting)
    assert result.exit_code == 0, result.output
    assert "predicted" in result.stdout
    assert "measured" not in result.stdout.partition("fitted")[0]


def test_its_page_says_how_far_the_recorded_run_was_from_its_bound(bounded):
    _, rows, page = bounded
    data = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.S)
    recorded, *arms = json.loads(data[1])["runs"]
    bounds = {row["name"]: row["bound"]["total_time_s"] for row in rows}
    assert recorded["name"] == "recorded"
    assert recorded["bound_s"] == bounds["+ grouped_spec"]
    assert 1 <= recorded["total_s"] / recorded["bound_s"] < 2
    assert {run["name"]: run["bound_s"] for run in arms} == bounds


def test_a_calibrated_twin_takes_as_long_as_the_recorded_run(seer, sitting, tmp_path, changed_file):
    def hasten(profile):
        profile["info"]["prefill_s_per_token"] /= 2
        for table in (profile, *profile["more"]):
            table["seconds"] = [[second / 2 for second in row] for row in table["seconds"]]

    measured = "--compare", sitting / "compare.json", "--json", tmp_path / "twin.json"
    result = twin(seer, sitting, "--calibrate", *measured, profile=changed_file("profile.json", hasten))
    assert result.exit_code == 0, result.output
    arms = json.loads((tmp_path / "twin.json").read_text())
    assert [arm["is_recorded_run"] for arm in arms] == [False, False, False, True, False]
    for arm in arms:
        assert arm["slowed_by"] == pytest.approx(2, rel=0.01)
        assert arm["error"]["total_time_s"] == pytest.approx(0, abs=0.01), arm


def test_drafts_are_worth_what_the_run_says(sitting):
    summary = json.loads((sitting / "run" / "summary.json").read_text())
    by_draft = recorded_drafts(sitting / "run", selective=False)
    by_step = recorded_drafts(sitting / "run", selective=True)
    assert by_draft.siblings == by_step.siblings
    assert by_draft.siblings[0] == 0
    first = [row[0] for row in by_draft.rates]
    assert min(first) <= summary["acceptance_at"][0] <= max(first)
    assert by_step.tokens is None  # of simulated drafts, whose worth goes by siblings
    for rates, verified, accepted in zip(by_draft.rates, by_step.verified, by_step.rates, strict=True):
        assert accepted[0] == pytest.approx(verified[0] * rates[0])
        assert 0 < sum(verified) <= len(verified)


def test_what_a_step_with_drafts_takes_counts_also_where_the_run_did_not_draft(sitting, tmp_path):
    profile = read_profile(sitting / "profile.json")
    slower = [
        msgspec.structs.replace(
            table,
            seconds=tuple(
                tuple(s + 5e-4 * (drafted > 0) for s, drafted in zip(row, table.draft_tokens, strict=True))
                for row in table.seconds
            ),
        )
        for table in profile.tables
    ]
    first, *more = slower
    profile = msgspec.structs.replace(profile, seconds=first.seconds, more=tuple(more))
    lengths = tmp_path / "lengths.jsonl"
    lengths.write_text('{"group": 0, "prompt_tokens": 9, "output_tokens": [40, 90]}')
    made, fitted = make_twin(load_config(sitting / "config.toml"), profile, lengths)
    assert fitted.drafts_s == pytest.approx(5e-4, rel=0.05)
    assert made.tables["engine"]["sim"]["acceptance"] == {"step_s": fitted.drafts_s}


@pytest.fixture
def changed_file(sitting, tmp_path):
    """Return a function that writes a file of the sitting anew, changed, and returns its path."""

    def change(name, edit):
        document = json.loads((sitting / name).read_text())
        edit(document)
        (tmp_path / name).write_text(json.dumps(document))
        return tmp_path / name

    return change


def test_a_profile_of_another_engine_is_refused(seer, sitting, changed_file):
    path = changed_file("profile.json", lambda profile: profile.update(engine="vllm"))
    result = twin(seer, sitting, profile=path)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "the profile is of engine 'vllm', the config says 'sim'" in result.stderr


def test_a_run_on_larger_instances_is_refused(seer, sitting, changed_file):
    path = changed_file("profile.json", lambda profile: profile["info"].update(kv_capacity_tokens=4096))
    result = twin(seer, sitting, profile=path)
    assert result.exit_code == 2
    words = " ".join(result.stderr.split())
    assert "with kv_capacity_tokens = 4096" in words
    assert "ran on one with 8192" in words


def test_a_run_that_two_processes_made_is_refused(seer, short_sitting, tmp_path):
    folder = tmp_path / "folder"
    shutil.copytree(short_sitting, folder)
    trace = folder / "run" / "trace.jsonl"
    submitted = next(line for line in trace.read_text().splitlines() if "GroupsSubmitted" in line)
    record = json.loads(submitted)
    record["event"]["groups"][0]["resumed"] = [{"tokens": 3}, {"tokens": 0}]
    trace.write_text(trace.read_text().replace(submitted, json.dumps(record)))
    result = twin(seer, folder)
    assert result.exit_code == 2
    assert "was resumed, so its times are those of its last process alone" in " ".join(result.stderr.split())


def test_an_arm_that_the_config_has_not_is_named(seer, sitting, changed_file):
    path = changed_file("compare.json", lambda arms: arms[1].update(name="+ divided_rolout"))
    result = twin(seer, sitting, "--compare", path)
    assert result.exit_code == 2
    assert "no arm '+ divided_rolout'; did you mean '+ divided_rollout'?" in result.stderr


def test_a_comparison_that_is_none_is_refused(seer, sitting):
    result = twin(seer, sitting, "--compare", sitting / "prompts.jsonl")
    assert result.exit_code == 2
    assert "write one with `seer compare --json`" in result.stderr


def test_an_empty_trace_is_refused(seer, sitting, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "trace.jsonl").write_text("")
    result = twin(seer, sitting, lengths=tmp_path / "run")
    assert result.exit_code == 2
    assert "nothing to simulate" in result.stderr


def test_a_run_without_completions_is_refused(tmp_path):
    with pytest.raises(PromptError, match="name the directory of a `seer run`"):
        recorded_drafts(tmp_path, selective=True)


def test_what_is_no_profile_is_refused(sitting):
    with pytest.raises(ConfigError, match=r"is no profile.*`seer profile`"):
        read_profile(sitting / "compare.json")
    assert read_profile(sitting / "profile.json").together


@pytest.mark.parametrize(
    ("name", "broken"),
    [
        ("profile.json", b"\xff"),
        ("profile.json", b'{"batch": [1], "draft_tokens": [0], "seconds": [[1e-300]]}'),
        ("profile.json", b'{"batch": [1, 2], "draft_tokens": [0], "seconds": [[0.1]]}'),
        ("compare.json", b'[{"name": "baseline"}]'),
        ("compare.json", b'[{"name": "\xff"}]'),
        ("compare.json", b'[{"name": ["x"], "total_time_s": "y"}]'),
        ("run/summary.json", b"{}"),
        ("run/summary.json", b'{"total_time_s": null, "plugins": []}'),
        ("run/summary.json", b'{"total_time_s": 1e8, "plugins": []}'),
        ("run/summary.json", b'{"total_time_s": 1, "plugins": ["x"]}'),
        ("run/trace.jsonl", b"\xff\n"),
        ("run/trace.jsonl", b"[" * 5000),
        ("run/completions.jsonl", b'{"request_id": 3}\n'),
        ("run/completions.jsonl", b"\xff\n"),
    ],
    ids=range(14),
)
def test_a_broken_file_is_named_in_one_sentence(seer, short_sitting, tmp_path, name, broken):
    folder = tmp_path / "folder"
    shutil.copytree(short_sitting, folder)
    (folder / name).write_bytes(broken)
    result = twin(seer, folder, "--calibrate", "--compare", folder / "compare.json")
    assert result.exit_code == 2, result.output
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") <= 2  # lines of lengths are listed, then the remedy
    assert name.rpartition("/")[0] in result.stderr


def test_drafts_of_which_more_were_accepted_than_made_are_named_by_line(sitting, tmp_path):
    lines = (sitting / "run" / "completions.jsonl").read_text().splitlines()
    completion = json.loads(lines[1])
    completion["chunks"][0] |= {"drafted_at": [1], "accepted_at": [2]}
    (tmp_path / "completions.jsonl").write_text("\n".join([lines[0], json.dumps(completion)]))
    with pytest.raises(PromptError, match=r"completions\.jsonl:2: a chunk accepted more drafts than it made"):
        recorded_drafts(tmp_path, selective=True)


def test_positions_whose_drafts_were_never_accepted_count_as_rejected(sitting, tmp_path):
    completion = json.loads((sitting / "run" / "completions.jsonl").read_text().splitlines()[0])
    completion["chunks"] = [completion["chunks"][0] | {"steps": 9, "drafted_at": [8, 4], "accepted_at": [2]}]
    (tmp_path / "completions.jsonl").write_text(json.dumps(completion))
    (tmp_path / "trace.jsonl").write_text("")
    drafts = recorded_drafts(tmp_path, selective=True)
    assert (drafts.rates, drafts.verified) == (((0.25, 0.0),), ((1.0, 0.5),))


def test_drafts_are_separated_by_what_is_written_in_the_middle_of_a_chunk(sitting, tmp_path):
    completion = json.loads((sitting / "run" / "completions.jsonl").read_text().splitlines()[0])
    chunk = completion["chunks"][0] | {"tokens": 1000, "steps": 601, "drafted_at": [600]}
    completion["chunks"] = [chunk | {"accepted_at": [accepted]} for accepted in (60, 540)]
    (tmp_path / "completions.jsonl").write_text(json.dumps(completion))
    (tmp_path / "trace.jsonl").write_text("")
    drafts = recorded_drafts(tmp_path, selective=True)
    assert (drafts.tokens, drafts.rates) == ((0, 1024), ((0.1,), (0.9,)))


def test_lengths_may_be_those_of_a_trainer_s_dump(seer, sitting):
    result = twin(seer, sitting, lengths=ROOT / "lab/tests/data/verl")
    assert result.exit_code == 0, result.output
    assert "lengths are estimated" in " ".join(result.stdout.split())
