"""How a rollout is scheduled does not change its tokens; --soak-minutes: all prompts, both engines."""

import asyncio

import pytest

from .equality import WAYS, roll_out_all_ways

pytestmark = pytest.mark.engine
pytest.importorskip("vllm", reason="vLLM is not installed: `make setup` installs it")

SMALL_WAYS = ("whole", "divided", "migrated", "killed", "drafted")
ALL_TOKENS = 178_599
"""Of the 48 groups of the example at temperature 1."""


@pytest.mark.first_by_default("engine", ["vllm", "sglang"])
def test_whole_divided_migrated_killed_and_drafted_rollouts_give_the_same_tokens(engine, soak):
    ways = WAYS if soak.full and engine == "vllm" else SMALL_WAYS
    groups, greedy_n = (None, 8) if soak.full else (2, 1)
    overrides = [f"seer.engine={engine}", *soak.overrides]
    rows = asyncio.run(roll_out_all_ways(ways, groups, greedy_n, overrides))
    by_way = {(row["way"], row["temperature"]): row for row in rows}
    assert [row["differing_responses"] for row in rows] == [0] * 2 * len(ways)
    assert sum(row["tokens"] for row in rows) >= 10_000
    if soak.full:
        assert {row["tokens"] for row in rows if row["temperature"]} == {ALL_TOKENS}
    assert by_way["migrated", 1.0]["migrations"] > by_way["divided", 1.0]["migrations"]
    assert by_way["killed", 1.0]["instances_lost"] == 1
    assert by_way["killed", 0.0]["instances_lost"] == 1
    assert by_way["drafted", 1.0]["accepted_tokens"] > 0.2 * by_way["drafted", 1.0]["tokens"]
    assert by_way["drafted", 0.0]["accepted_tokens"] > 0
    assert max(row["largest_logprob_difference"] for row in rows) < 1e-3
