"""A rollout that another process goes on with: the same tokens, and none that was there is computed again."""

import asyncio
import importlib
from pathlib import Path

import pytest
from seer_journal import DiskJournal
from seer_session.runtime import Runtime
from seer_trace.records import TraceWriter, replay

from seer_core.errors import InputError
from seer_core.model import PromptGroup
from seer_core.model.arrays import Tokens
from seer_core.model.events import ChunkFinished
from seer_core.plugins.slots import Assembly, Strategies
from seer_core.scheduling.scheduler import CORE, Policies, Scheduler, Slot

from .helpers import Remembering, divided, outputs, play

ENGINE = Path(__file__).parents[2] / "examples/plugins/engines"
GROUPS = [PromptGroup(f"g{number}", (5, 6, 7 + number), 4, 300, seed=number) for number in range(6)]


@pytest.fixture
def no_model(monkeypatch):
    """Return a function that makes a runtime over engines without a model, whose tokens are keyed."""
    monkeypatch.syspath_prepend(str(ENGINE))
    module = importlib.import_module("seer_no_model")

    def make(policies=None, observers=(), instances=2):
        fleet = module.NoModelFleet(module.Settings(instances=instances, token_s=0.0))
        return Runtime(Assembly(fleet, Strategies(policies or divided(32), tuple(observers))))

    return make


class Death:
    """An observer that takes the journal away with a chunk, as the death of the process does."""

    def __init__(self, chunks):
        self.chunks = chunks
        self.rollout = None

    def observe(self, now, event, commands):
        self.chunks -= isinstance(event, ChunkFinished)
        if not self.chunks:
            self.rollout.journal = None


async def roll_out(runtime, journal):
    async with runtime:
        rollout = runtime.rollout(GROUPS, journal=journal)
        return outputs(await rollout.wait()), rollout.result.summary


async def die(make, journal, chunks):
    death = Death(chunks)
    async with make(observers=[Slot("observer", CORE, death)]) as runtime:
        death.rollout = runtime.rollout(GROUPS, journal=journal)
        await death.rollout.wait()


def test_the_tokens_are_those_of_an_undisturbed_rollout_wherever_it_ended(no_model, tmp_path):
    expected, undisturbed = play(roll_out(no_model(), None))
    assert undisturbed.resumed_tokens == 0
    for chunks in (1, 30, 80, 120):
        directory = tmp_path / str(chunks)
        with DiskJournal(directory) as journal:
            play(die(no_model, journal, chunks + 1))
        with DiskJournal(directory) as journal:
            found = journal.found_tokens
            assert 32 * (chunks - journal.found_responses) < found <= 32 * chunks
            again, summary = play(roll_out(no_model(divided(50), instances=3), journal))
        assert again == expected
        assert summary.resumed_tokens == found
        assert summary.tokens == undisturbed.tokens
        with DiskJournal(directory) as journal:  # all of it is there now
            third, summary = play(roll_out(no_model(Policies()), journal))
        assert third == expected
        assert summary.resumed_tokens == undisturbed.tokens


def test_what_was_finished_reaches_no_engine_and_the_rest_begins_behind_its_tokens(
    by_hand, hand, tmp_path, some_groups
):
    groups = some_groups(1, 3, 64)

    async def first():
        engine = hand()
        with DiskJournal(tmp_path / "j") as journal:
            async with by_hand(engine, policies=divided(16)) as runtime:
                rollout = runtime.rollout(groups, journal=journal)
                assert len(engine.jobs) == 3
                ids = list(engine.jobs)
                engine.finish(ids[0], 3)
                engine.finish(ids[1], 16, stopped=False)
                assert (await anext(rollout)).request_id == "a/0"

    async def second():
        engine = hand()
        with DiskJournal(tmp_path / "j") as journal:
            async with by_hand(engine, policies=divided(16)) as runtime:
                rollout = runtime.rollout(groups, journal=journal)
                completion = await anext(rollout)
                assert (completion.request_id, completion.finish_reason) == ("a/0", "stop")
                assert completion.token_ids == [5, 6, 7]
                assert [chunk.tokens for chunk in completion.chunks] == [3]
                jobs = {job.request_id: job for job in engine.jobs.values()}
                assert sorted(jobs) == ["a/1", "a/2"]
                assert jobs["a/1"].token_ids == [10, 11, 12, 13, *range(5, 21)]
                assert jobs["a/1"].prompt_tokens == 4
                assert jobs["a/1"].siblings_finished == 1
                assert rollout.written("a/1")[0] == Tokens(range(5, 21))
                engine.finish(next(iter(engine.jobs)), 2)
                completion = await anext(rollout)
                assert completion.token_ids == [*range(5, 23)] or completion.token_ids == [5, 6]

    play(first())
    play(second())


def test_an_abort_stays_and_leaving_is_none(by_hand, hand, tmp_path, some_groups):
    groups = some_groups(1, 2, 64)

    async def first():
        with DiskJournal(tmp_path / "j") as journal:
            async with by_hand(hand()) as runtime:
                rollout = runtime.rollout(groups, journal=journal)
                rollout.abort_request("a/1")
                await anext(rollout)
                await rollout.abort()

    async def second():
        engine = hand()
        with DiskJournal(tmp_path / "j") as journal:
            async with by_hand(engine) as runtime:
                rollout = runtime.rollout(groups, journal=journal)
                assert [each.request_id for each in rollout.unread()] == ["a/1"]
                assert [job.request_id for job in engine.jobs.values()] == ["a/0"]
                await rollout.abort()

    play(first())
    play(second())


def test_an_error_is_tried_again(by_hand, hand, tmp_path, some_groups):
    async def first():
        engine = hand()
        with DiskJournal(tmp_path / "j") as journal:
            async with by_hand(engine, max_chunk_failures=0) as runtime:
                rollout = runtime.rollout(some_groups(1, 1, 64), journal=journal)
                engine.fail()
                assert (await anext(rollout)).finish_reason == "error"

    async def second():
        engine = hand()
        with DiskJournal(tmp_path / "j") as journal:
            async with by_hand(engine) as runtime:
                runtime.rollout(some_groups(1, 1, 64), journal=journal)
                assert len(engine.jobs) == 1

    play(first())
    play(second())


def test_groups_of_another_run_are_refused_and_none_is_submitted(no_model, tmp_path):
    async def run():
        with DiskJournal(tmp_path / "j") as journal:
            async with no_model() as runtime:
                await runtime.rollout(GROUPS[:2], journal=journal).wait()
        other = PromptGroup("g1", (5, 6, 8), 4, 300, seed=99)
        with DiskJournal(tmp_path / "j") as journal:
            async with no_model() as runtime:
                rollout = runtime.open(journal=journal)
                with pytest.raises(InputError, match="group 'g1': its seed was 1 and is 99 now"):
                    rollout.add([GROUPS[0], other])
                assert not rollout.unfinished
                rollout.add(GROUPS[:1])
                assert len(rollout.unread()) == 4
                await rollout.abort()

    play(run())


def test_an_open_rollout_goes_on_with_the_groups_that_come_again(no_model, tmp_path):
    async def run(journal, groups):
        async with no_model() as runtime:
            rollout = runtime.open(journal=journal)
            for group in groups:
                rollout.add([group])
                await asyncio.sleep(0)
            rollout.close()
            return outputs(await rollout.wait())

    expected = play(run(None, GROUPS))
    with DiskJournal(tmp_path / "j") as journal:
        play(run(journal, GROUPS[:4]))
    with DiskJournal(tmp_path / "j") as journal:
        assert play(run(journal, reversed(GROUPS))) == expected


def test_the_trace_of_a_rollout_that_went_on_replays(no_model, tmp_path):
    with DiskJournal(tmp_path / "j") as journal:
        play(die(no_model, journal, 40))
    writer = TraceWriter(tmp_path / "trace.jsonl")
    with DiskJournal(tmp_path / "j") as journal:
        play(roll_out(no_model(observers=[Slot("observer", CORE, writer)]), journal))
    writer.close()
    assert replay(tmp_path / "trace.jsonl", Scheduler(divided(32))) > 20


def test_a_completion_waits_for_its_journal(by_hand, hand, some_groups):
    class Slow:
        def __init__(self):
            self.safe = asyncio.Event()
            self.chunks = []

        def begin(self, groups, version, fingerprints, end_token_ids=()):
            return [()] * len(groups)

        def chunk(self, *chunk):
            self.chunks.append(chunk)

        def answered(self, *answer):
            pass

        def aborted(self, *requests):
            pass

        async def synced(self):
            await self.safe.wait()

    async def run():
        engine, journal = hand(), Slow()
        async with by_hand(engine) as runtime:
            rollout = runtime.rollout(some_groups(1, 1, 64), journal=journal)
            engine.finish()
            reader = asyncio.ensure_future(anext(rollout))
            for _ in range(20):
                await asyncio.sleep(0)
            assert len(journal.chunks) == 1
            assert not reader.done()
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)
            journal.safe.set()
            assert (await anext(rollout)).token_ids == [5]  # a wait that was cancelled has taken nothing

    play(run())


def test_siblings_that_an_earlier_process_wrote_are_drafted_from(by_hand, hand, tmp_path, some_groups):
    class Drafter:
        policy = None

        def shares(self):
            return True

        def source(self, *_):
            return None

    drafter = Slot("drafter", CORE, Drafter())
    groups = some_groups(1, 2, 64)

    async def first():
        engine = hand()
        with DiskJournal(tmp_path / "j") as journal:
            async with by_hand(engine, drafter=drafter) as runtime:
                rollout = runtime.rollout(groups, journal=journal)
                engine.finish(tokens=3)
                await anext(rollout)

    async def second():
        engine = hand()
        with DiskJournal(tmp_path / "j") as journal:
            async with by_hand(engine, drafter=drafter) as runtime:
                runtime.rollout(groups, journal=journal)
                assert [(each.request_id, each.token_ids.tolist()) for each in engine.sibling_tokens] == [
                    ("a/0", [5, 6, 7])
                ]

    play(first())
    play(second())


@pytest.mark.parametrize("outlives", [True, False])
def test_a_finished_response_that_is_resumed_is_drafted_from_once_and_remembered_once(
    by_hand, hand, tmp_path, some_groups, outlives
):
    groups = some_groups(1, 2, 64)

    async def first(memory):
        engine = hand()
        with DiskJournal(tmp_path / "j") as journal:
            async with by_hand(engine, drafter=Slot("drafter", CORE, memory)) as runtime:
                rollout = runtime.rollout(groups, journal=journal)
                engine.finish(tokens=3)
                await anext(rollout)

    async def second(memory):
        engine = hand()
        with DiskJournal(tmp_path / "j") as journal:
            async with by_hand(engine, drafter=Slot("drafter", CORE, memory)) as runtime:
                runtime.rollout(groups, journal=journal)
                return [(each.request_id, each.token_ids.tolist()) for each in engine.sibling_tokens]

    memory = Remembering(sharing=True)
    play(first(memory))
    if not outlives:
        memory.clear()
    assert play(second(memory)) == [("a/0", [5, 6, 7])]
    assert [tokens.tolist() for _, tokens in memory.kept] == [[5, 6, 7]]
