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


def test_compare_refuses_what_cannot_be_compared(fails, write_config, prompts):
    assert "no technique to compare" in fails("compare", write_config((), SMALL))
    config = write_config(TECHNIQUES, f"{SMALL}[compare]\nbaseline = ['group_round_robn']")
    assert "did you mean 'group_round_robin'?" in fails("compare", config)
    config = write_config(TECHNIQUES, f"{SMALL}[compare]\nprompts = 'none.jsonl'")
    assert "none.jsonl: No such file" in fails("compare", config)
