"""Pieces that a worker sends of running chunks whose responses are read meanwhile."""

from importlib import import_module
from pathlib import Path

import pytest
from msgspec import structs
from seer_worker.process.streams import PIECE_INTERVAL_S
from seer_worker.process.worker import Worker
from seer_worker.wire import AbortChunk, EndChunkEarly, Failed, Finished, Start, Streamed, Submit

from seer_core.model import Sampling, StructuredOutputs
from seer_core.ports.engine import ChunkJob


def job(name="j", group="g", streams=True, max_tokens=20):
    return ChunkJob(name, name, group, [1, 2, 3], 3, max_tokens, Sampling(), 5, 0, streams=streams)


@pytest.fixture
def worker(tmp_path, monkeypatch):
    """Return a function that makes a worker five of whose steps take the time between pieces."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent))

    def make(kind):
        sent = []
        now_s = 0.0

        def clock():
            nonlocal now_s
            now_s += 0.101 * PIECE_INTERVAL_S  # asked before a step and after it
            return now_s

        start = Start("", "toy", {}, str(tmp_path))
        toy = getattr(import_module("toys"), kind)(start)
        made = Worker(lambda *messages: sent.append(messages), toy, start, clock)
        return made, sent

    return make


def run(worker, sent, *jobs):
    """Run chunks to their end; return the pieces that came, and the answers."""
    for each in jobs:
        worker.handle(Submit(each))
    while worker.busy:
        worker.step()
    messages = [message for each in sent for message in each]
    pieces = {each.id: [] for each in jobs}
    for message in messages:
        if isinstance(message, Streamed):
            pieces[message.piece.job_id].append(message.piece)
    outputs = {each.output.job_id: each.output for each in messages if isinstance(each, Finished)}
    return pieces, outputs


def test_the_first_token_is_sent_at_once_and_others_now_and_then(worker):
    pieces, outputs = run(*worker("Streaming"), job("a"), job("b"), job("silent", streams=False))
    assert pieces["silent"] == []
    for name in "ab":
        assert [(each.start, len(each.token_ids)) for each in pieces[name]] == [
            (0, 1),
            (1, 5),
            (6, 5),
            (11, 5),
        ]
        sent = [token for each in pieces[name] for token in each.token_ids]
        assert sent == list(outputs[name].token_ids[:16])
        scores = [score for each in pieces[name] for score in each.logprobs]
        assert scores == pytest.approx(list(outputs[name].logprobs[:16]))


def test_one_that_comes_later_sends_its_first_token_at_once(worker):
    made, sent = worker("Streaming")
    made.handle(Submit(job("early")))
    for _ in range(3):
        made.step()
    pieces, _ = run(made, sent, job("late"), job("early"))
    assert pieces["late"][0].start == 0
    assert len(pieces["late"][0].token_ids) == 1


def test_a_chunk_of_one_step_has_only_its_answer(worker):
    pieces, outputs = run(*worker("Streaming"), job(max_tokens=1))
    assert pieces == {"j": []}
    assert list(outputs) == ["j"]


def test_what_is_not_finite_is_never_sent_nor_what_follows_it(worker):
    pieces, _ = run(*worker("Streaming"), job(group="poisoned"))
    assert sum(len(each.token_ids) for each in pieces["j"]) == 5


def test_a_chunk_that_its_instance_begins_anew_sends_nothing_twice(worker):
    pieces, outputs = run(*worker("Hesitant"), job())
    sent = [(each.start, token) for each in pieces["j"] for token in each.token_ids]
    assert [token for _, token in sent] == list(outputs["j"].token_ids[: len(sent)])
    assert len(sent) > 4


def test_an_aborted_chunk_sends_nothing_more(worker):
    made, sent = worker("Streaming")
    made.handle(Submit(job()))
    made.step()
    made.handle(AbortChunk("j"))
    sent.clear()
    run(made, sent, job("other"))
    assert {each.piece.job_id for sending in sent for each in sending if isinstance(each, Streamed)} == {
        "other"
    }


def test_a_chunk_that_is_to_end_and_is_begun_anew_ends_early_all_the_same(worker):
    made, _ = worker("Endable")
    made.handle(Submit(job("spoilt", group="spoilt")))
    for _ in range(2):
        made.step()
    made.handle(Submit(job()))
    made.handle(EndChunkEarly("j"))
    made.adapter.ending.clear()  # its step is not over when another chunk spoils the memory
    made.step()
    assert made.adapter.ending == ["j"]
    made.step()
    assert not made.busy


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ValueError("it is no grammar"), "it is no grammar"),
        (ImportError("no xgrammar"), "this engine follows no structured_outputs: ImportError: no xgrammar"),
    ],
)
def test_a_chunk_whose_grammar_cannot_be_read_fails_alone(worker, monkeypatch, error, reason):
    def refuse(*model):
        raise error

    monkeypatch.setattr("seer_worker.sampling.grammars.grammars_of", refuse)
    made, sent = worker("Streaming")
    made.adapter.vocab_size = 64
    formed = structs.replace(job(), sampling=Sampling(structured_outputs=StructuredOutputs(json_object=True)))
    made.handle(Submit(formed))
    assert sent == [(Failed("j", reason),)]
    assert not made.busy


def test_the_most_probable_tokens_are_sent_with_the_pieces_or_no_pieces_are_sent(worker):
    asking = structs.replace(job(), sampling=Sampling(top_logprobs=1))
    pieces, _ = run(*worker("Ranking"), asking, job("plain"))
    assert len(pieces["j"]) > 1
    for piece in pieces["j"]:
        assert [token for [(token, _)] in piece.top_logprobs] == list(piece.token_ids)
    assert {piece.top_logprobs for piece in pieces["plain"]} == {None}
    pieces, _ = run(*worker("Streaming"), asking, job("plain"))
    assert pieces["j"] == []
    assert pieces["plain"]


def test_an_instance_that_cannot_stream_is_not_called(worker):
    pieces, outputs = run(*worker("Toy"), job())
    assert pieces == {"j": []}
    assert len(outputs["j"].token_ids) == 20
