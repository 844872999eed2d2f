"""The book of a rollout: jobs out, tokens in, completions; nothing else is needed to keep it."""

import json
import math

import msgspec
import pytest

from seer_core.errors import PluginError, TransitionError, WeightVersionError
from seer_core.model import PromptGroup, Sampling
from seer_core.model.arrays import Logprobs, PromptLogprobs, Tokens, TopLogprobs
from seer_core.model.events import ChunkFailed, ChunkFinished, Complete, Dispatch
from seer_core.ports.drafting import SiblingTokens
from seer_core.ports.engine import ChunkOutput
from seer_core.runtime.transcripts import Transcripts


def group(name="a", n=2, max_tokens=8):
    return PromptGroup(id=name, prompt_token_ids=(1, 2, 3), n=n, max_tokens=max_tokens)


def book_of(*groups, **settings):
    book = Transcripts(**settings)
    for each in groups:
        book.add(each)
    return book


def send(book, request_id="a/0", instance="x", max_tokens=4, now=1.0):
    return book.job(Dispatch(request_id, instance, max_tokens, 16, migrated=False), now)


def answer(job, token_ids, *, stopped=False, logprobs=None, version=0):
    return ChunkOutput(
        job_id=job.id,
        token_ids=token_ids,
        logprobs=[-0.5] * len(token_ids) if logprobs is None else logprobs,
        stopped=stopped,
        cached_tokens=0,
        prefilled_tokens=len(job.token_ids),
        computed_tokens=len(job.token_ids) + len(token_ids) - 1,
        preemptions=0,
        weight_version=version,
    )


def test_what_a_prompt_has_for_its_engine_goes_out_with_each_chunk_and_answers_come_back():
    book = book_of(msgspec.structs.replace(group(), attachments={"image": "a cat"}))
    for _ in range(2):
        job = send(book)
        assert job.attachments == {"image": "a cat"}
        routed = msgspec.structs.replace(answer(job, [7] * 4), attachments={"experts": job.id})
        book.finished("x", routed, 2.0)
    completion = book.complete(Complete("a/0", "length"), 3.0).completion
    assert [chunk.attachments for chunk in completion.chunks] == [
        {"experts": "a/0#0@x"},
        {"experts": "a/0#1@x"},
    ]


def test_a_request_goes_out_in_chunks_and_comes_back_whole():
    book = book_of(group(), read_text=lambda *response: (f"{len(response[2])} tokens", None))
    first = send(book)
    assert (first.id, first.token_ids, first.prompt_tokens, first.last) == ("a/0#0@x", [1, 2, 3], 3, False)
    assert book.under_way == [("x", "a/0#0@x")]
    event = book.finished("x", answer(first, [7, 8, 9, 10]), 2.0)
    assert event == ChunkFinished("a/0", "x", 4, False, prefilled_tokens=3)
    second = send(book, instance="y")
    assert (list(second.token_ids), second.last) == ([1, 2, 3, 7, 8, 9, 10], True)
    book.finished("y", answer(second, [11], stopped=True), 3.0)
    closed = book.complete(Complete("a/0", "stop"), 3.0)
    completion = closed.completion
    assert (list(completion.token_ids), completion.text) == ([7, 8, 9, 10, 11], "5 tokens")
    assert completion.instances == ["x", "y"]
    assert [(each.dispatched_s, each.finished_s) for each in completion.chunks] == [(1.0, 2.0), (1.0, 3.0)]
    assert closed.instances == ()
    assert list(book.unfinished) == ["a/1"]


def test_the_last_of_a_group_returns_the_instances_that_may_forget_it():
    book = book_of(group())
    for request_id, instance in (("a/0", "x"), ("a/1", "y")):
        job = send(book, request_id, instance)
        book.finished(instance, answer(job, [5], stopped=True), 1.0)
    assert book.complete(Complete("a/0", "stop"), 1.0).instances == ()
    assert book.complete(Complete("a/1", "stop"), 1.0).instances == ("x", "y")
    assert not book.unfinished


def test_an_answer_to_a_dropped_chunk_changes_nothing():
    book = book_of(group())
    jobs = [send(book, "a/0", "x"), send(book, "a/1", "y")]
    book.lost("x")
    assert book.drop("a/1") == jobs[1].id
    assert [book.finished("x", answer(job, [5]), 1.0) for job in jobs] == [None, None]
    assert book.failed("x", jobs[0].id, "too late") is None
    assert book.under_way == []
    with pytest.raises(KeyError):
        book.drop("a/1")


def test_a_chunk_given_back_or_without_finite_log_probs_has_failed():
    book = book_of(group())
    assert book.failed("x", send(book).id, "no room") == ChunkFailed("a/0", "x", "no room")
    event = book.finished("x", answer(send(book), [5], logprobs=[math.nan]), 1.0)
    assert event == ChunkFailed("a/0", "x", "its log-probs are no finite numbers")
    assert send(book).token_ids == [1, 2, 3]


def test_what_no_engine_may_answer_raises():
    book = book_of(group(), weight_version=3)
    with pytest.raises(WeightVersionError, match="weight version 2, the rollout runs on 3"):
        book.finished("x", answer(send(book), [5], version=2), 1.0)
    with pytest.raises(TransitionError, match="2 tokens but 1 log-probs"):
        book.finished("x", answer(send(book), [5, 6], logprobs=[-1.0], version=3), 1.0)
    book.add(msgspec.structs.replace(group("b"), sampling=Sampling(top_logprobs=3)))
    with pytest.raises(TransitionError, match="without the 3 most probable tokens for each of its 2"):
        book.finished("x", answer(send(book, "b/0"), [5, 6], version=3), 1.0)
    book.add(msgspec.structs.replace(group("c"), sampling=Sampling(prompt_logprobs=0)))
    with pytest.raises(TransitionError, match="without the log-probs of its prompt"):
        book.finished("x", answer(send(book, "c/0"), [5, 6], version=3), 1.0)
    with pytest.raises(PluginError, match="ended at its limit of 8 tokens with 0"):
        book.complete(Complete("a/0", "length"), 1.0)


def pending(book, request_id):
    return [(name, text.request_id, text.start, text.token_ids) for name, text in book.pending(request_id)]


def write(book, request_id, instance, tokens, *, stopped=False):
    job = send(book, request_id, instance)
    book.finished(instance, answer(job, tokens, stopped=stopped), 1.0)


def test_instances_get_what_siblings_write_elsewhere_while_they_work_on_the_group():
    book = book_of(group(n=3), rollout_id="r", sharing=True)
    first = send(book, "a/0", "x")
    assert pending(book, "a/0") == []
    send(book, "a/1", "y")
    book.finished("x", answer(first, [7, 8]), 1.0)
    assert pending(book, "a/0") == [("y", "a/0", 0, [7, 8])]
    write(book, "a/0", "x", [9], stopped=True)
    assert pending(book, "a/0") == [("y", "a/0", 2, [9])]
    book.complete(Complete("a/0", "stop"), 1.0)
    send(book, "a/2", "late")
    assert pending(book, "a/2") == [("late", "a/0", 0, [7, 8, 9])]
    assert pending(book, "a/2") == []


def test_responses_of_earlier_rollouts_are_sent_like_siblings_text_and_first():
    book = Transcripts(rollout_id="r", sharing=True)
    book.add(group(), earlier=[Tokens([4, 5]), Tokens([6])])
    write(book, "a/0", "x", [7, 8], stopped=True)
    earlier = [("a/earlier-0", 0, [4, 5]), ("a/earlier-1", 0, [6])]
    assert pending(book, "a/0") == []  # nothing of it is under way
    closed = book.complete(Complete("a/0", "stop"), 1.0)
    assert list(closed.prompt) == [1, 2, 3]
    send(book, "a/1", "x")
    assert pending(book, "a/1") == [("x", *each) for each in earlier]
    assert pending(book, "a/1") == []


def test_text_that_goes_out_with_a_chunk_is_not_sent_beside_it():
    book = book_of(group(), sharing=True)
    write(book, "a/0", "x", [7, 8])
    send(book, "a/0", "y")
    assert pending(book, "a/0") == []


def test_an_instance_that_was_lost_or_gave_a_chunk_back_gets_the_text_again():
    book = book_of(group(), sharing=True)
    write(book, "a/0", "x", [7, 8])
    job = send(book, "a/1", "y")
    everything = [("y", "a/0", 0, [7, 8])]
    assert pending(book, "a/1") == everything
    book.failed("y", job.id, "no luck")
    send(book, "a/1", "y")
    assert pending(book, "a/1") == everything
    book.lost("y")
    assert pending(book, "a/1") == []
    send(book, "a/1", "y")
    assert pending(book, "a/1") == everything


def test_instances_get_text_as_long_as_a_chunk_of_the_group_is_under_way_there():
    book = book_of(group(n=4), sharing=True)
    jobs = {name: send(book, name, "y") for name in ("a/1", "a/2")}
    write(book, "a/0", "x", [7])
    assert pending(book, "a/0") == [("y", "a/0", 0, [7])]
    book.finished("y", answer(jobs["a/1"], [1]), 1.0)
    write(book, "a/0", "x", [8])
    assert pending(book, "a/0") == [("y", "a/0", 1, [8])]
    book.finished("y", answer(jobs["a/2"], [2]), 1.0)
    write(book, "a/0", "x", [9])
    assert pending(book, "a/0") == []
    send(book, "a/3", "y")
    assert pending(book, "a/3") == [("y", "a/0", 2, [9])]


def test_without_sharing_no_text_is_sent():
    book = book_of(group())
    write(book, "a/0", "x", [7, 8])
    send(book, "a/1", "y")
    assert pending(book, "a/1") == []


def test_a_group_that_is_over_is_no_longer_kept_for_sharing():
    book = book_of(group(n=1), group("b", n=2), sharing=True)
    write(book, "a/0", "x", [7], stopped=True)
    book.complete(Complete("a/0", "stop"), 1.0)
    assert list(book._shared) == ["b"]


def of_family(name, prompt):
    return PromptGroup(name, prompt, 1, 8, family="f", trajectories=("t",))


def test_groups_of_a_family_are_sent_each_other_s_text_until_the_family_is_forgotten():
    book = book_of(of_family("a", (1, 2)), of_family("b", (1, 2, 7, 9)), sharing=True, rollout_id="r")
    send(book, "b/0", "y")
    job = send(book, "a/0", "x")
    assert (job.group_id, job.trajectory) == ("f", "t")
    book.finished("x", answer(job, [7, 8], stopped=True), 1.0)
    assert book.pending("a/0") == [("y", SiblingTokens("r", "f", "a/0", 0, Tokens([7, 8])))]
    closed = book.complete(Complete("a/0", "stop"), 1.0)
    assert (closed.group_over, closed.instances) == (True, ())
    book.add(of_family("c", (1, 2, 3)))
    send(book, "c/0", "late")
    assert pending(book, "c/0") == [("late", "a/0", 0, [7, 8])]
    book.forget("f")
    book.finished("y", answer(send(book, "b/0", "y"), [5]), 2.0)
    assert pending(book, "b/0") == []


def test_a_chunk_may_end_early_where_less_than_all_of_it_is_reserved():
    book = book_of(group())
    assert not send(book).may_end_early
    job = book.job(Dispatch("a/1", "x", 4, 16, migrated=False, reserved_tokens=2), 1.0)
    assert job.may_end_early
    event = book.finished("x", answer(job, [7]), 2.0)
    assert (event.tokens, event.stopped) == (1, False)


def test_the_log_probs_of_a_prompt_come_with_its_first_chunk_and_stay():
    book = book_of(msgspec.structs.replace(group(n=1), sampling=Sampling(prompt_logprobs=1)))
    found = PromptLogprobs(Logprobs([-1.0, -2.0]), TopLogprobs.of([[(7, -0.5)], [(8, -0.5)]]))
    first = msgspec.structs.replace(answer(send(book), [5]), prompt_logprobs=found)
    book.finished("x", first, 1.0)
    book.finished("x", answer(send(book), [6], stopped=True), 2.0)
    completion = book.complete(Complete("a/0", "stop"), 2.0).completion
    assert completion.prompt_logprobs == found
    line = json.loads(msgspec.json.encode(completion, enc_hook=list))
    tops = [[[7, -0.5]], [[8, -0.5]]]
    assert line["prompt_logprobs"] == {"logprobs": [-1.0, -2.0], "top_logprobs": tops}


@pytest.mark.parametrize(
    ("found", "width", "fits"),
    [
        (PromptLogprobs(Logprobs([-1.0, -2.0])), 0, True),
        (PromptLogprobs(Logprobs([-1.0, -2.0])), 1, False),
        (PromptLogprobs(Logprobs([-1.0])), 0, False),
        (PromptLogprobs(Logprobs([-1.0] * 2), TopLogprobs.of([[(7, -0.5)]] * 2)), 1, True),
        (PromptLogprobs(Logprobs([-1.0] * 2), TopLogprobs.of([[(7, -0.5)]] * 2)), 2, False),
    ],
)
def test_log_probs_of_a_prompt_have_a_place_for_each_token_but_its_first(found, width, fits):
    assert found.fits(width, 3) is fits
    assert PromptLogprobs(Logprobs()).fits(width, 1)
