"""Routed experts joined over chunks: each position once, those of the first time, none missing."""

import base64
import io

import numpy as np
import pytest
from seer_host.routed_experts import (
    ROUTED_EXPERTS,
    first_wanted,
    packed,
    routed_experts,
    unpacked,
    whole_attachments,
)

from seer_core.errors import EngineError
from seer_core.model import ChunkRecord, Completion, Sampling
from seer_core.model.requests import TurnRecord
from seer_core.ports.engine import ChunkJob

PROMPT = 5


def chunk(tokens, **attachments):
    return ChunkRecord("i", tokens, 0, 1, 0, 0, 0, 0, 0, attachments=attachments)


def response(chunks):
    tokens = list(range(sum(each.tokens for each in chunks)))
    logprobs = [0.0] * len(tokens)
    return Completion("g/0", "g", 0, 1, tokens, logprobs, None, "stop", 0, chunks, ["i"], 1.0, {}, turns=[])


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
    with pytest.raises(EngineError, match="routed experts are damaged"):
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


def served(experts):
    """Return a chunk's answer of a server of SGLang's: numbers without a shape, of all positions so far."""
    return {ROUTED_EXPERTS: base64.b64encode(experts.astype("<i4").tobytes()).decode(), "other": 1}


def test_answers_of_servers_are_joined_by_the_first_time_of_each_position():
    first, again = rows(PROMPT + 3), rows(PROMPT + 6, seed=1)
    found = response([chunk(4, **served(first)), chunk(3, **served(again))])
    expected = np.concatenate([first, again[PROMPT + 3 :]])
    assert (routed_experts(found, PROMPT, 2) == expected).all()
    whole = whole_attachments(found, PROMPT)
    assert whole == served(expected)
    with pytest.raises(EngineError, match=r"answers 6 routed experts for each token.*give experts_per_token"):
        routed_experts(found, PROMPT)
    with pytest.raises(EngineError, match="they cannot be read"):
        routed_experts(found, PROMPT + 1)
    assert whole_attachments(found, PROMPT + 1) == served(again)
    assert whole_attachments(found) == served(again)


def test_a_file_of_numpy_s_as_servers_of_vllm_answer_it_is_not_taken_for_plain_numbers():
    def answered(experts):
        file = io.BytesIO()
        np.save(file, experts.astype(np.uint8))
        return {ROUTED_EXPERTS: base64.b64encode(file.getvalue()).decode()}

    first, whole = rows(20, layers=4), rows(32, layers=4)  # positions of which the file's head is a multiple
    chunks = [chunk(20 - PROMPT + 1, **answered(first)), chunk(12, **answered(whole))]
    assert whole_attachments(response(chunks), PROMPT) == answered(whole)
    with pytest.raises(EngineError, match="file of NumPy's"):
        routed_experts(response(chunks), PROMPT, 2)


def test_an_earlier_answer_of_a_server_is_not_taken_for_one_about_all_positions():
    experts = rows(PROMPT + 3, layers=4)  # half as many positions as the response has, of twice the layers
    found = response([chunk(4, **served(experts)), chunk(8)])
    with pytest.raises(EngineError, match="last chunk was answered without them"):
        routed_experts(found, PROMPT, 2)


def test_a_server_s_answer_is_not_about_an_environment_s_last_tokens():
    experts = rows(PROMPT + 3, layers=4)  # half as many positions as the response has, of twice the layers
    found = response([chunk(4, **served(experts)), chunk(8)])
    found.chunks.pop()  # these tokens are an answer's
    found.turns.append(TurnRecord(4, 8))
    with pytest.raises(EngineError, match=f"of {PROMPT + 3} positions in place of {PROMPT + 11}"):
        routed_experts(found, PROMPT, 2)
    assert whole_attachments(found, PROMPT) == served(experts)


def test_a_server_s_answer_that_went_on_without_earlier_chunks_has_all_positions():
    whole = rows(PROMPT + 8)
    found = response([chunk(9)])
    found.chunks[:] = [chunk(4, **served(whole))]  # the tokens before it are of a chunk that is not at hand
    assert (routed_experts(found, PROMPT, 2) == whole).all()


def test_the_experts_of_chunks_come_back_as_those_of_one():
    whole = rows(PROMPT + 6)
    parts = [chunk(4, **{ROUTED_EXPERTS: packed(whole[: PROMPT + 3], 0)})]
    parts.append(chunk(3, **{ROUTED_EXPERTS: packed(whole[PROMPT + 3 :], PROMPT + 3)}))
    start, joined = unpacked(whole_attachments(response(parts))[ROUTED_EXPERTS])
    assert start == 0
    assert (joined == whole).all()
    assert whole_attachments(response([chunk(2, mine=3)])) == {"mine": 3}
    assert whole_attachments(response([])) == {}
