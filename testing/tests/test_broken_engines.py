"""Engines that break their contract in one way each: simulated ones, altered."""

import re

import attrs
import msgspec
import pytest
from seer_sim.plugin import Settings, make_fleet
from seer_testing import EngineContract

from seer_core.model.arrays import Logprobs, Tokens
from seer_core.ports.drafting import StepTimes
from seer_core.ports.engine import ChunkPiece


class Altered:
    """A simulated engine behind one that does everything as it does, until broken; also its sink."""

    def __init__(self, engine):
        self.engine = engine
        self.id = engine.id
        self.sink = None
        self.jobs = []

    def __getattr__(self, name):
        return getattr(self.engine, name)

    async def start(self, sink):
        self.sink = sink
        return await self.engine.start(self)

    def submit(self, job):
        self.jobs.append(job)
        self.engine.submit(job)

    def chunk_finished(self, instance_id, output):
        self.sink.chunk_finished(instance_id, output)

    def chunk_failed(self, instance_id, job_id, reason):
        self.sink.chunk_failed(instance_id, job_id, reason)

    def chunk_streamed(self, instance_id, piece):
        self.sink.chunk_streamed(instance_id, piece)

    def reported(self, report):
        self.sink.reported(report)

    def degraded(self, degradation):
        self.sink.degraded(degradation)

    def lost(self, instance_id, reason):
        self.sink.lost(instance_id, reason)


def engine(altered):
    """Return the contract of engines of that class."""

    def make(self):
        fleet = make_fleet(Settings())
        return attrs.evolve(fleet, engines=[altered(each) for each in fleet.engines])

    return type(altered.__name__, (EngineContract,), {"make": make})


def outputs(change):
    """Return the contract of engines whose outputs are changed like that."""

    class Liar(Altered):
        def chunk_finished(self, instance_id, output):
            self.sink.chunk_finished(instance_id, msgspec.structs.replace(output, **change(output)))

    return engine(Liar)


class TestAlteredInOrder(engine(Altered)):
    pass


class Talkative(Altered):
    """It has more to say than the contract asks for, as models have."""

    def submit(self, job):
        super().submit(msgspec.structs.replace(job, known_tokens=1000))


class TestAnEngineThatWouldGoOn(engine(Talkative)):
    pass


class TestAlteredAndShared(engine(Altered)):
    shared = True

    def test_any_order_leaves_the_shared_engines_as_the_next_test_wants_them(self):
        names = [name for name in dir(type(self)) if name.startswith("test_") and "any_order" not in name]
        for name in [*names, *reversed(names)]:
            getattr(self, name)()


class SameName(Altered):
    def __init__(self, engine):
        super().__init__(engine)
        self.id = "sim"


class OddCapacity(Altered):
    async def start(self, sink):
        return msgspec.structs.replace(await super().start(sink), kv_capacity_tokens=1001)


class Twice(Altered):
    def chunk_finished(self, instance_id, output):
        Altered.chunk_finished(self, instance_id, output)
        Altered.chunk_finished(self, instance_id, output)


class Guessing(Altered):
    """It sends pieces of a guess, and then writes something else."""

    def chunk_finished(self, instance_id, output):
        if any(job.id == output.job_id and job.streams for job in self.jobs):
            self.chunk_streamed(instance_id, ChunkPiece(output.job_id, 0, Tokens([7, 7]), Logprobs([-1, -1])))
        super().chunk_finished(instance_id, output)


class Hasty(Altered):
    def submit(self, job):
        if job.max_tokens > 1000:
            self.sink.chunk_failed(self.id, job.id, "too long")
        else:
            super().submit(job)


class Pedantic(Altered):
    def abort(self, job_id):
        assert job_id in [job.id for job in self.jobs], f"no chunk {job_id}"
        self.engine.abort(job_id)


class Obliging(Altered):
    def submit(self, job):
        self.engine.submit(msgspec.structs.replace(job, max_tokens=min(job.max_tokens, 100)))


class Curt(Altered):
    """It ends chunks early, and its info does not say so."""

    async def start(self, sink):
        return msgspec.structs.replace(await super().start(sink), ends_early=False)

    def submit(self, job):
        tokens = max(1, job.max_tokens // 2) if job.may_end_early else job.max_tokens
        super().submit(msgspec.structs.replace(job, max_tokens=tokens))


class Deaf(Altered):
    """It takes chunks, and does not end them."""

    def end_chunk(self, job_id):
        pass


class Loyal(Altered):
    async def reset_cache(self):
        pass


class Restless(Altered):
    """It says that it sleeps, and does not."""

    async def sleep(self):
        return 0

    async def wake(self):
        pass


class Insomniac(Altered):
    """It sleeps on request, and wakes by itself for a chunk."""

    async def sleep(self):
        return 0 if self.sink is None or self.engine._runs else await self.engine.sleep()

    def submit(self, job):
        self.engine._asleep = False
        super().submit(job)


class CannotStopTwice(Altered):
    stopped = False

    async def stop(self):
        assert not self.stopped, "stopped already"
        self.stopped = True
        await self.engine.stop()


class Sociable(Altered):
    def set_kv_pool(self, pool):
        return True


class Approximate(Altered):
    async def measure_steps(self, batch, draft_tokens, context_tokens=None):
        return StepTimes((1, 4), (0,), ((0.001,), (0.002,)))


def by_chunk(output):
    """Tokens that depend on the chunk that they come in."""
    return {"token_ids": [(token + len(output.token_ids)) % 32000 for token in output.token_ids]}


ACCOUNT = "test_a_chunk_s_account_adds_up"
ONCE = "test_every_chunk_is_answered_once"
PIECES = "test_pieces_of_a_running_chunk_are_what_it_will_have_written"
TOKENS = "test_the_same_seed_gives_the_same_tokens"
GIVEN_BACK = "test_a_chunk_that_cannot_be_run_is_given_back"
FORGOTTEN = "test_what_is_cached_is_forgotten_when_it_must_be"
SLEEP = "test_after_a_sleep_it_answers_as_before"
IDLE = "test_it_sleeps_only_while_it_is_idle_and_up_and_starts_awake"
STOPS = "test_it_stops_twice_and_says_nothing_afterwards"

ENGINES = [
    (engine(SameName), "test_it_is_a_fleet_of_engines", "ids of their own"),
    (engine(OddCapacity), "test_an_instance_says_what_it_can_hold", ""),
    (engine(Twice), ONCE, "answered chunk 'chunk 0' 2 times"),
    (outputs(lambda output: {"stopped": False}), ACCOUNT, "neither stopped nor full"),
    (engine(Guessing), PIECES, "sent other tokens"),
    (outputs(by_chunk), TOKENS, "divided and moved, it gave other tokens"),
    (
        engine(Hasty),
        "test_the_sink_is_never_called_from_within_submit_or_abort",
        r"called the sink from within submit\(\)",
    ),
    (engine(Pedantic), "test_an_aborted_chunk_disturbs_no_other", "no chunk unknown"),
    (engine(Obliging), GIVEN_BACK, "longer than the model"),
    (engine(Curt), "test_a_chunk_that_ends_early_has_a_token_at_least", "its info does not say so"),
    (engine(Deaf), "test_a_chunk_ends_on_demand", "no chunk ended early"),
    (engine(Loyal), FORGOTTEN, r"reset_cache\(\) left \d+ tokens"),
    (engine(Restless), SLEEP, "answered a chunk asleep"),
    (engine(Insomniac), IDLE, "slept before it had started"),
    (engine(CannotStopTwice), STOPS, "stopped already"),
    (engine(Sociable), "test_without_drafter_and_pool_it_goes_without", ""),
    (engine(Approximate), "test_steps_are_measured_on_the_grid_asked_for", ""),
]


@pytest.mark.parametrize(("contract", "test", "words"), ENGINES)
def test_the_fault_is_found_and_named(contract, test, words, catches):
    assert re.search(words, catches(contract, test))


def test_every_test_of_the_contract_finds_a_fault(uncaught):
    assert not uncaught(EngineContract, ENGINES)


def test_an_engine_that_takes_no_length_of_context_is_found():
    class Old(Altered):
        async def measure_steps(self, batch, draft_tokens):
            return await self.engine.measure_steps(batch, draft_tokens)

    with pytest.raises(TypeError, match="measure_steps"):
        engine(Old)().test_steps_are_measured_on_the_grid_asked_for()


def test_shared_engines_start_once_and_stop_in_the_end_or_when_a_test_fails():
    class Counted(Altered):
        starts = stops = 0

        async def start(self, sink):
            type(self).starts += 1
            return await super().start(sink)

        async def stop(self):
            type(self).stops += 1
            await self.engine.stop()

    contract = type("Shared", (engine(Counted),), {"shared": True})
    for _ in range(3):
        contract().test_every_chunk_is_answered_once()
    assert (Counted.starts, Counted.stops) == (2, 0)
    Counted.chunk_finished = Twice.chunk_finished
    with pytest.raises(AssertionError, match="2 times"):
        contract().test_every_chunk_is_answered_once()
    assert (Counted.starts, Counted.stops) == (2, 2)
    Counted.chunk_finished = Altered.chunk_finished
    contract().test_every_chunk_is_answered_once()
    contract.teardown_class()
    assert (Counted.starts, Counted.stops) == (4, 4)


def test_an_engine_that_promises_no_equal_tokens_is_not_asked_for_them():
    class Inexact(engine(Altered)):
        exact = False

    with pytest.raises(pytest.skip.Exception, match="does not promise"):
        getattr(Inexact(), TOKENS)()
