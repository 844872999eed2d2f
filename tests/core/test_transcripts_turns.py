"""The book of a rollout with an environment: its answers stand between the model's turns, and are masked."""

import msgspec
import pytest
from seer_host.text import text_before_stop

from seer_core.model import ChunkRecord, PromptGroup, Sampling, TurnRecord, WrittenResponse
from seer_core.model.arrays import LEAST_LOGPROB, Logprobs, Tokens, TopLogprobs
from seer_core.model.events import Complete, Dispatch, EnvironmentAnswered, ResumedResponse
from seer_core.ports.engine import ChunkOutput
from seer_core.runtime.transcripts import Transcripts

SAMPLING = Sampling(stop=("=",))


def group(max_tokens=20, sampling=SAMPLING):
    return PromptGroup("a", (1, 2, 3), 2, max_tokens, sampling, metadata={"task": 1}, turns=True)


def spelt(token_ids):
    """Return tokens as letters; 61 is the stop string."""
    return "".join(chr(token) if token > 32 else chr(96 + token) for token in token_ids)


def read_text(*response):
    found = text_before_stop(spelt, *response)
    return found.text, found.stop_reason


def book_of(group, written=(), **settings):
    book = Transcripts(read_text=read_text, **settings)
    book.add(group, written)
    return book


def write(book, tokens, *, stopped=False, now=2.0, request_id="a/0", prefilled=0, computed=0, tops=None):
    """Send a chunk, let it write these tokens, and return its job."""
    left = 20 - len(book.written(request_id)[0])
    job = book.job(Dispatch(request_id, "x", left, 64, migrated=False), 1.0)
    logprobs = [-0.5] * len(tokens)
    output = ChunkOutput(job.id, tokens, logprobs, stopped, 0, prefilled, computed, 0, 0, top_logprobs=tops)
    book.finished("x", output, now)
    return job


def test_an_answer_is_appended_and_the_next_chunk_goes_on_behind_it():
    book = book_of(group())
    first = write(book, [7, 8], stopped=False)
    second = write(book, [61], stopped=True)
    assert (first.turn_start, second.turn_start, second.context_tokens) == (0, 0, 3)
    book.hold("a/0", 2.0)
    assert book.extend("a/0", [9, 10], None, False, 5.0) == EnvironmentAnswered("a/0", 2, False)
    third = write(book, [11], stopped=True)
    assert third.token_ids == [1, 2, 3, 7, 8, 61, 9, 10]
    assert (third.prompt_tokens, third.turn_start, third.context_tokens) == (3, 8, 8)


def test_a_completion_has_the_turns_the_mask_and_the_sum_of_the_rewards():
    book = book_of(group())
    write(book, [7, 8, 61], stopped=True)
    book.hold("a/0", 2.0)
    book.extend("a/0", [9, 10], 0.25, False, 5.0)
    write(book, [11], stopped=True)
    book.hold("a/0", 6.0)
    book.extend("a/0", [], 1.0, True, 6.5)
    completion = book.complete(Complete("a/0", "stop"), 7.0).completion
    assert list(completion.token_ids) == [7, 8, 61, 9, 10, 11]
    assert list(completion.logprobs) == [-0.5, -0.5, -0.5, 0.0, 0.0, -0.5]
    assert completion.turns == [TurnRecord(3, 2, 3.0, 0.25), TurnRecord(1, 0, 0.5, 1.0)]
    assert completion.loss_mask == [1, 1, 1, 0, 0, 1]
    assert (completion.reward, completion.finish_reason) == (1.25, "stop")


def test_a_response_without_an_environment_is_all_the_model_s():
    book = book_of(msgspec.structs.replace(group(), turns=False))
    write(book, [7, 8, 9], stopped=True)
    completion = book.complete(Complete("a/0", "stop"), 7.0).completion
    assert (completion.turns, completion.loss_mask, completion.reward) == ([], [1, 1, 1], None)


def test_an_answer_without_room_is_cut_at_the_limit():
    book = book_of(group())
    write(book, [7] * 18, stopped=True)
    book.hold("a/0", 2.0)
    assert book.extend("a/0", [9, 10, 11], None, False, 5.0) == EnvironmentAnswered("a/0", 2, False)
    completion = book.complete(Complete("a/0", "length"), 5.0).completion
    assert (len(completion.token_ids), completion.turns) == (20, [TurnRecord(18, 2, 3.0)])


def test_the_text_of_a_response_that_its_environment_ends_is_not_cut():
    book = book_of(group())
    write(book, [7, 61], stopped=True)
    book.hold("a/0", 2.0)
    book.extend("a/0", [8, 61], None, True, 5.0)
    completion = book.complete(Complete("a/0", "stop"), 5.0).completion
    assert (completion.text, completion.stop_reason) == ("g=h=", None)


def test_a_turn_that_was_cut_short_is_a_turn_too():
    book = book_of(group())
    write(book, [7, 61], stopped=True)
    book.hold("a/0", 2.0)
    book.extend("a/0", [8], None, False, 5.0)
    write(book, [9])
    completion = book.complete(Complete("a/0", "aborted"), 6.0).completion
    assert completion.turns == [TurnRecord(2, 1, 3.0), TurnRecord(1)]


def test_the_reason_for_which_an_environment_failed_comes_with_the_completion():
    book = book_of(group())
    write(book, [7, 61], stopped=True)
    book.hold("a/0", 2.0)
    book.extension_failed("a/0", "no network")
    completion = book.complete(Complete("a/0", "error"), 6.0).completion
    assert (completion.error, completion.turns) == ("no network", [TurnRecord(2)])


def test_the_environment_s_tokens_are_not_counted_as_recomputed():
    book = book_of(group())
    write(book, [7, 61], stopped=True, prefilled=3, computed=4)
    book.hold("a/0", 2.0)
    book.extend("a/0", [8, 9, 10], None, False, 5.0)
    # The last token of the turn, the three of the answer, and the first two new ones were run.
    write(book, [11, 12, 13], stopped=True, prefilled=4, computed=6)
    chunks = book.complete(Complete("a/0", "stop"), 6.0).completion.chunks
    assert [chunk.recomputed_tokens for chunk in chunks] == [0, 0]


@pytest.mark.parametrize(("behind", "recomputed"), [([], 4), ([11], 8)])
def test_an_answer_that_an_earlier_process_got_is_not_recomputed_either_unless_it_was_read(
    behind, recomputed
):
    chunks = [ChunkRecord("x", count, 0.0, 1.0, 0, 3, 0, 0, 0) for count in (2, 1)[: 1 + len(behind)]]
    tokens = [7, 61, 8, 9, 10, *behind]
    left = WrittenResponse(
        Tokens(tokens), Logprobs([-0.5] * len(tokens)), chunks, turns=[TurnRecord(2, 3, 0.5)]
    )
    book = book_of(group(), [left, WrittenResponse()])
    # All before is computed again, and then the first two new ones.
    write(book, [12, 13, 14], stopped=True, prefilled=3 + len(tokens), computed=5 + len(tokens))
    completion = book.complete(Complete("a/0", "stop"), 6.0).completion
    assert completion.chunks[-1].recomputed_tokens == recomputed


def test_most_probable_tokens_have_places_for_the_environment_s_tokens():
    book = book_of(group(sampling=Sampling(top_logprobs=2)))
    write(book, [7], stopped=True, tops=TopLogprobs(2, [7, 8], [-0.5, -2.0]))
    book.hold("a/0", 2.0)
    book.extend("a/0", [9], None, True, 5.0)
    tops = book.complete(Complete("a/0", "stop"), 6.0).completion.top_logprobs
    assert list(tops) == [[(7, -0.5), (8, -2.0)], [(9, 0.0), (9, LEAST_LOGPROB)]]


def test_siblings_elsewhere_get_the_environment_s_tokens_with_the_model_s():
    book = book_of(group(), sharing=True)
    job = book.job(Dispatch("a/1", "y", 4, 64, migrated=False), 1.0)
    write(book, [7, 61], stopped=True)
    book.hold("a/0", 2.0)
    book.extend("a/0", [8, 9], None, False, 5.0)
    write(book, [10])
    [(name, text)] = book.pending("a/1")
    assert (name, text.start, text.token_ids) == ("y", 0, [7, 61, 8, 9, 10])
    assert job.group_id == "a"


@pytest.mark.parametrize("acting", [False, True])
def test_a_response_of_an_earlier_process_goes_on_in_its_turn(acting):
    tokens = [7, 61, 8, 9, 10]
    left = WrittenResponse(
        Tokens(tokens), Logprobs([-0.5] * 5), turns=[TurnRecord(2, 1, 0.5, 1.0)], acting=acting
    )
    book = Transcripts(read_text=read_text)
    spec = book.add(group(), [left, WrittenResponse()])
    assert spec.turns
    assert spec.resumed == (ResumedResponse(5, acting=acting), ResumedResponse(0))
    if acting:
        book.hold("a/0", 0.0)
        held = book.held("a/0")
        assert (held.turn_start, held.token_ids[held.turn_start :].tolist()) == (3, [9, 10])
        book.extend("a/0", [11], 0.5, False, 1.0)
    job = write(book, [12], stopped=True)
    assert job.turn_start == (9 if acting else 6)
    completion = book.complete(Complete("a/0", "stop"), 2.0).completion
    turns = [
        TurnRecord(2, 1, 0.5, 1.0),
        *([TurnRecord(2, 1, 1.0, 0.5), TurnRecord(1)] if acting else [TurnRecord(3)]),
    ]
    assert completion.turns == turns
    assert completion.reward == (1.5 if acting else 1.0)
