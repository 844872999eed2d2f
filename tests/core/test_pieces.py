"""Pieces of running chunks: the notices to observers, and pieces of chunks that were dropped."""

import asyncio
import math

import msgspec
import pytest

from seer_core.model import Sampling
from seer_core.model.arrays import Logprobs, Tokens
from seer_core.ports.engine import ChunkPiece
from seer_core.scheduling.scheduler import Slot
from tests.support.patience import PATIENCE_S


class Reader:
    """Reads from its ``rollout`` what responses have written, whenever it is notified."""

    rollout = None

    def __init__(self):
        self.pieces, self.events = [], []

    def observe(self, now, event, commands):
        self.events.append(type(event).__name__)

    def streamed(self, now, request_id):
        tokens, logprobs = self.rollout.written(request_id)
        assert len(tokens) == len(logprobs)
        self.pieces.append((request_id, list(tokens)))


def play(by_hand, engines, groups, act, *more, **settings):
    """Return what an observer has seen, and the completions, after ``act`` has played the engines."""
    reader = Reader()
    observers = [Slot("observer", "mine", each) for each in (*more, reader)]

    async def run():
        async with by_hand(*engines, observers=observers, **settings) as runtime:
            rollout = Reader.rollout = runtime.rollout(groups)
            await act(rollout)
            return (await rollout.wait()).completions

    return reader, asyncio.run(asyncio.wait_for(run(), PATIENCE_S))


@pytest.fixture
def group(some_groups):
    """One response that streams."""
    return msgspec.structs.replace(some_groups(1, 1, 20)[0], streams=True)


def test_an_observer_sees_what_a_chunk_has_written_and_the_scheduler_nothing_of_it(hand, by_hand, group):
    engine = hand()

    async def act(rollout):
        engine.grow(tokens=2)
        assert rollout.written("a/0") == ([5, 6], [-0.5, -0.5])
        engine.grow(tokens=3, start=2)
        assert rollout.written("a/0", 4) == ([9], [-0.5])
        engine.finish(tokens=6, stopped=False)
        assert rollout.written("a/0", 4) == ([9, 10], [-0.5, -0.5])
        engine.grow(tokens=2)
        assert rollout.written("a/0", 5) == ([10, 11, 12], [-0.5] * 3)
        assert rollout.written("a/0", 7) == ([12], [-0.5])
        engine.finish(tokens=4)

    seen, [completion] = play(by_hand, [engine], [group], act)
    assert seen.pieces == [("a/0", [5, 6]), ("a/0", [5, 6, 7, 8, 9]), ("a/0", list(range(5, 13)))]
    assert completion.token_ids == list(range(5, 15))
    assert [chunk.tokens for chunk in completion.chunks] == [6, 4]
    assert seen.events[1:-1] == ["GroupsSubmitted", "ChunkFinished", "ChunkFinished"]


def test_the_most_probable_tokens_come_with_the_pieces_and_stay_those_of_their_places(
    hand, by_hand, some_groups
):
    engine = hand()
    group = msgspec.structs.replace(some_groups(1, 1, 20)[0], streams=True, sampling=Sampling(top_logprobs=2))

    def tops(start, end):
        return [[(5 + place, -0.5), (6 + place, -1.5)] for place in range(start, end)]

    async def act(rollout):
        engine.grow(tokens=2)
        engine.grow(tokens=3)  # begun anew
        assert list(rollout.top_logprobs("a/0", 1, 3)) == tops(1, 3)
        engine.finish(tokens=4, stopped=False)
        engine.grow(tokens=2)
        assert list(rollout.top_logprobs("a/0", 3, 6)) == tops(3, 6)
        assert list(rollout.top_logprobs("a/0", 5, 6)) == tops(5, 6)
        [job] = engine.jobs.values()
        engine.sink.chunk_streamed(engine.id, ChunkPiece(job.id, 2, Tokens([11]), Logprobs([-0.5])))
        assert rollout.written_tokens("a/0") == 6  # a piece without them is none
        engine.finish(tokens=3)

    _, [completion] = play(by_hand, [engine], [group], act)
    assert list(completion.top_logprobs) == tops(0, 7)
    assert msgspec.json.decode(msgspec.json.encode(completion, enc_hook=list))["top_logprobs"][6] == [
        [11, -0.5],
        [12, -1.5],
    ]


def test_only_groups_that_stream_ask_for_it(hand, by_hand, some_groups, group):
    engine, other = hand(), some_groups(2, 1, 20)[1]

    async def act(rollout):
        assert [job.streams for job in engine.jobs.values()] == [True, False]
        engine.finish()
        engine.finish()

    play(by_hand, [engine], [group, other], act)


def test_a_chunk_that_failed_is_written_from_its_first_token_again(hand, by_hand, group):
    engine = hand()

    async def act(rollout):
        engine.grow(tokens=3)
        engine.fail()
        assert rollout.written("a/0") == ([], [])
        engine.grow(tokens=2)
        engine.finish(tokens=4)

    seen, [completion] = play(by_hand, [engine], [group], act)
    assert seen.pieces == [("a/0", [5, 6, 7]), ("a/0", [5, 6])]
    assert completion.token_ids == [5, 6, 7, 8]


def test_pieces_of_chunks_that_were_aborted_lost_or_are_over_are_dropped(hand, by_hand, some_groups):
    engines = [hand("first"), hand("second")]
    groups = [msgspec.structs.replace(each, streams=True) for each in some_groups(3, 1, 20)]

    async def act(rollout):
        first, second = engines
        jobs = {job.request_id: (engine, job.id) for engine in engines for job in engine.jobs.values()}

        def late(request_id):
            engine, job_id = jobs[request_id]
            piece = ChunkPiece(job_id, 0, Tokens([7]), Logprobs([-1.0]))
            engine.sink.chunk_streamed(engine.id, piece)

        rollout.abort_request("a/0")
        late("a/0")
        lost, _ = jobs["b/0"]
        lost.die()
        late("b/0")
        other = second if lost is first else first
        while other.jobs:
            other.finish()
        late("c/0")
        late("b/0")

    seen, completions = play(by_hand, engines, groups, act)
    assert seen.pieces == []
    assert {each.request_id: len(each.token_ids) for each in completions} == {"a/0": 0, "b/0": 1, "c/0": 1}


def test_a_piece_is_shown_as_far_as_it_is_new_sound_and_leaves_out_nothing(hand, by_hand, group):
    engine = hand()

    async def act(rollout):
        engine.grow(tokens=3)
        engine.grow(tokens=2)  # as after an instance has begun it anew
        engine.grow(tokens=5)
        engine.grow(tokens=2, start=6)
        engine.grow(tokens=2, start=5, logprob=math.nan)
        [job] = engine.jobs.values()
        engine.sink.chunk_streamed(engine.id, ChunkPiece(job.id, 5, Tokens([10, 11]), Logprobs([-0.5])))
        engine.finish(tokens=8)

    seen, [completion] = play(by_hand, [engine], [group], act)
    assert seen.pieces == [("a/0", [5, 6, 7]), ("a/0", [5, 6, 7, 8, 9])]
    assert completion.token_ids == list(range(5, 13))


def test_an_observer_that_raises_is_left_out(hand, by_hand, group):
    engine = hand()

    class Fragile(Reader):
        def streamed(self, now, request_id):
            super().streamed(now, request_id)
            raise ZeroDivisionError("oh")

    fragile = Fragile()

    async def act(rollout):
        engine.grow()
        engine.grow(start=1)
        engine.finish(tokens=3)

    seen, [completion] = play(by_hand, [engine], [group], act, fragile)
    assert (len(fragile.pieces), len(seen.pieces)) == (1, 2)
    assert completion.finish_reason == "stop"
