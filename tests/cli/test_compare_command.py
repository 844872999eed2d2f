"""``seer compare``: its table, its JSON and its refusals."""

import json

import pytest

from .helpers import SMALL, TECHNIQUES


@pytest.fixture
def compared(seer, write_config, prompts, tmp_path):
    """Return a function that compares and returns click's result and the JSON written."""

    def run(*options, more=""):
        config = write_config(TECHNIQUES, f"{SMALL}\n[plugin.divided_rollout]\nchunk_tokens = 4\n{more}")
        result = seer("compare", config, "--json", tmp_path / "compare.json", *options)
        document = (tmp_path / "compare.json").read_bytes()
        return result, json.loads(document) if document else None

    return run


def test_compare_prints_a_table_and_writes_one_object_per_arm(compared):
    result, arms = compared("--log-level", "error")
    assert result.exit_code == 0, result.output
    assert [arm["name"] for arm in arms] == ["baseline", "+ divided_rollout", "+ context_sched", "oracle"]
    assert all(arm["tokens_equal_to_baseline"] for arm in arms)
    assert all(arm["tokens"] == arms[0]["tokens"] for arm in arms)
    assert arms[1]["chunks"] == 2 * arms[0]["chunks"] == 8
    keys = {"throughput_tokens_per_s", "total_time_s", "tail_time_s", "preemptions", "recomputed_tokens"}
    assert all(keys | {"chunks", "migrations"} < set(arm) for arm in arms)
    for text in ("4 responses of 2 groups", "tail time, s", "same tokens", "(2.00x)", "baseline"):
        assert text in result.stdout


def test_compare_repeats_and_takes_other_prompts(compared, write_prompts):
    other = write_prompts({"prompt": "c", "n": 3}, name="other.jsonl")
    result, arms = compared("--repeat", 2, "--prompts", other, "-p", "no:context_sched")
    assert result.exit_code == 0, result.output
    assert "3 responses of 1 groups; medians of 2 runs [least, most]" in result.stdout
    assert [(arm["name"], arm["repeats"]) for arm in arms] == [
        ("baseline", 2),
        ("+ divided_rollout", 2),
        ("oracle", 2),
    ]


def test_on_a_narrow_terminal_arms_stand_below_one_another_and_nothing_is_cut(compared, monkeypatch):
    monkeypatch.setattr("seer_cli.tables.PLAIN_WIDTH", 80)
    result, arms = compared("--repeat", 3, "--log-level", "error")
    assert result.exit_code == 0, result.output
    assert "\u2026" not in result.stdout  # an ellipsis
    assert result.stdout.count("preemptions") == result.stdout.count("recomputed tokens") > 1
    for arm in arms:
        assert result.stdout.count(f" {arm['name']} ") == 1
    assert all(len(line) <= 80 for line in result.stdout.splitlines() if line[:1] in "┃│┡└├")


def test_compare_refuses_what_cannot_be_compared(fails, write_config, prompts):
    assert "no technique to compare" in fails("compare", write_config((), SMALL))
    config = write_config(TECHNIQUES, f"{SMALL}[compare]\nbaseline = ['group_round_robn']")
    assert "did you mean 'group_round_robin'?" in fails("compare", config)
    config = write_config(TECHNIQUES, f"{SMALL}[compare]\nprompts = 'none.jsonl'")
    assert "none.jsonl: No such file" in fails("compare", config)


def test_finished_arms_stay_and_the_others_are_run(compared, fails, write_config, prompts, tmp_path):
    out = tmp_path / "arms"
    result, arms = compared("--repeat", 2, "--out", out)
    assert result.exit_code == 0, result.output
    files = {path: path.stat().st_mtime_ns for path in out.iterdir()}
    assert len(files) == 8
    again, same = compared("--repeat", 2, "--out", out, "--resume", "--log-level", "info")
    assert (again.exit_code, same) == (0, arms)
    assert "groups_submitted" not in again.stderr
    lost = sorted(files)[:3]
    for path in lost:
        path.unlink()
    again, others = compared("--repeat", 2, "--out", out, "--resume", "--log-level", "info")
    assert again.exit_code == 0, again.output
    assert again.stderr.count("groups_submitted") == 3
    assert [arm["tokens"] for arm in others] == [arm["tokens"] for arm in arms]
    assert all(arm["tokens_equal_to_baseline"] for arm in others)
    now = {path: path.stat().st_mtime_ns for path in out.iterdir()}
    assert {path for path in files if now[path] != files[path]} == set(lost)


def test_arms_of_another_comparison_are_refused(compared, fails, write_config, prompts, tmp_path):
    out = tmp_path / "arms"
    assert compared("--out", out)[0].exit_code == 0
    config = tmp_path / "seer.toml"
    assert "holds a comparison; go on with it with --resume" in fails("compare", config, "--out", out)
    resumed = ("compare", config, "--out", out, "--resume")
    assert "with other settings, prompts or another model" in fails(*resumed, "--set", "seer.seed=5")
    next(out.iterdir()).write_bytes(b"\xc1")
    assert "is no finished arm; delete it, and its arm is run again" in fails(*resumed)
    assert fails("compare", config, "--out", tmp_path / "seer.toml" / "x", code=2)
