"""How a rollout is scheduled does not change its tokens; --soak-minutes: all prompts, both engines."""

import asyncio

import pytest

from tests.support.installed import skip_without

from .equality import CONTROLS, PLAIN, SAMPLINGS, WAYS, roll_out_all_ways

pytestmark = pytest.mark.engine
skip_without("vllm", reason="vLLM is not installed: `make setup` installs it")

SMALL_WAYS = ("whole", "divided", "migrated", "killed", "drafted")
ALL_TOKENS = 178_599
"""Of the 48 groups of the example at temperature 1."""


@pytest.mark.first_by_default("engine", ["vllm", "sglang"])
def test_whole_divided_migrated_killed_and_drafted_rollouts_give_the_same_tokens(engine, soak):
    ways = WAYS if soak.full and engine == "vllm" else SMALL_WAYS
    groups, greedy_n = (None, 8) if soak.full else (2, 1)
    overrides = [f"seer.engine={engine}", *soak.overrides]
    rows = asyncio.run(roll_out_all_ways(ways, groups, greedy_n, overrides))
    by_way = {(row["way"], row["sampling"]): row for row in rows}
    assert [row["differing_responses"] for row in rows] == [0] * len(SAMPLINGS) * len(ways)
    assert sum(row["tokens"] for row in rows) >= 10_000
    if soak.full:
        assert {row["tokens"] for row in rows if row["sampling"] == PLAIN} == {ALL_TOKENS}
    for name in SAMPLINGS:
        assert by_way["killed", name]["instances_lost"] == 1
        assert by_way["drafted", name]["accepted_tokens"] > 0
        assert by_way["migrated", name]["migrations"] >= by_way["divided", name]["migrations"]
    assert by_way["migrated", PLAIN]["migrations"] > by_way["divided", PLAIN]["migrations"]
    assert by_way["drafted", PLAIN]["accepted_tokens"] > 0.2 * by_way["drafted", PLAIN]["tokens"]
    assert len({row["tokens"] for row in rows if row["way"] == "whole"}) == len(SAMPLINGS)
    assert max(row["largest_logprob_difference"] for row in rows) < 1e-3


@pytest.mark.long
@pytest.mark.first_by_default("engine", ["vllm", "sglang"])
def test_each_sampling_control_gives_the_same_tokens_divided_and_drafted(engine, soak):
    overrides = [f"seer.engine={engine}", *soak.overrides]
    ways = ("whole", "drafted")  # and divided
    groups = None if soak.full else 1
    samplings = {PLAIN: SAMPLINGS[PLAIN], **CONTROLS}
    most_tokens = 1 << 30 if soak.full else 300
    rows = asyncio.run(roll_out_all_ways(ways, groups, 1, overrides, samplings, most_tokens))
    assert [row["differing_responses"] for row in rows] == [0] * len(ways) * len(samplings)
    whole = {row["sampling"]: row["tokens"] for row in rows if row["way"] == "whole"}
    assert len(set(whole.values())) > len(CONTROLS) / 2  # they are at work
    if soak.full:
        assert min(whole.values()) >= 100_000
