"""Routed experts joined over chunks: each position once, those of the first time, none missing."""

import numpy as np
import pytest
from seer_host.routed_experts import ROUTED_EXPERTS, first_wanted, packed, routed_experts

from seer_core.errors import EngineError
from seer_core.model import ChunkRecord, Completion, Sampling
from seer_core.ports.engine import ChunkJob

PROMPT = 5


def chunk(tokens, **attachments):
    return ChunkRecord("i", tokens, 0, 1, 0, 0, 0, 0, 0, attachments=attachments)


def response(chunks):
    tokens = list(range(sum(each.tokens for each in chunks)))
    logprobs = [0.0] * len(tokens)
    return Completion("g/0", "g", 0, 1, tokens, logprobs, None, "stop", 0, chunks, ["i"], 1.0, {})


def rows(positions, layers=3, experts=2, seed=0, most=64):
    return np.random.default_rng(seed).integers(0, most, (positions, layers, experts))


def test_chunks_make_up_all_positions_but_the_last_token_s():
    whole = rows(PROMPT + 9)
    parts = [whole[: PROMPT + 3], whole[PROMPT + 3 : PROMPT + 7], whole[PROMPT + 7 :]]
    starts = [0, PROMPT + 3, PROMPT + 7]
    chunks = [
        chunk(tokens, **{ROUTED_EXPERTS: packed(part, start)})
        for tokens, part, start in zip((4, 4, 2), parts, starts, strict=True)
    ]
    joined = routed_experts(response(chunks), PROMPT)
    assert joined.dtype == np.uint16
    assert (joined == whole).all()


def test_what_is_computed_again_keeps_the_experts_of_the_first_time_and_what_is_cut_off_is_left_out():
    first, again = rows(PROMPT + 3), rows(PROMPT + 8, seed=1)
    chunks = [
        chunk(4, **{ROUTED_EXPERTS: packed(first, 0)}),
        chunk(3, **{ROUTED_EXPERTS: packed(again, 0)}),
    ]
    joined = routed_experts(response(chunks), PROMPT)
    assert (joined == np.concatenate([first, again[PROMPT + 3 : PROMPT + 6]])).all()


def test_more_than_256_experts_are_kept_whole():
    whole = rows(PROMPT + 1, most=384) | 256
    assert (routed_experts(response([chunk(2, **{ROUTED_EXPERTS: packed(whole, 0)})]), PROMPT) == whole).all()


def test_an_engine_that_answers_none_has_none():
    assert routed_experts(response([chunk(4), chunk(1)]), PROMPT) is None


@pytest.mark.parametrize(
    ("chunks", "found"),
    [
        ([chunk(4, routed_experts=packed(rows(PROMPT + 3), 0)), chunk(4)], PROMPT + 3),
        ([chunk(4), chunk(4, routed_experts=packed(rows(4), PROMPT + 3))], 0),
        (
            [
                chunk(4, routed_experts=packed(rows(PROMPT + 3), 0)),
                chunk(4, routed_experts=packed(rows(4, layers=2), PROMPT + 3)),
            ],
            PROMPT + 3,
        ),
    ],
)
def test_positions_without_experts_are_an_error_that_counts_them(chunks, found):
    with pytest.raises(EngineError, match=f"of {found} positions in place of {PROMPT + 7}"):
        routed_experts(response(chunks), PROMPT)


@pytest.mark.parametrize(
    "change",
    [
        {"data": "?"},
        {"data": ""},
        {"bytes": 3},
        {"shape": [1]},
        {"shape": None},
        {"start": -1},
        {"start": "a"},
    ],
)
def test_damaged_experts_are_an_error(change):
    part = packed(rows(PROMPT + 3), 0) | change
    with pytest.raises(EngineError, match="routed experts of response 'g/0' are damaged"):
        routed_experts(response([chunk(4, routed_experts=part)]), PROMPT)


@pytest.mark.parametrize(
    ("context", "turn_start", "start"),
    [(PROMPT, 0, 0), (PROMPT + 4, 0, PROMPT + 3), (12, 12, 0), (14, 12, 13)],
)
def test_a_chunk_answers_what_those_before_it_have_not(context, turn_start, start):
    job = ChunkJob(
        "j", "g/0", "g", [1] * context, PROMPT, 4, Sampling(), seed=1, weight_version=0, turn_start=turn_start
    )
    assert first_wanted(job) == start
