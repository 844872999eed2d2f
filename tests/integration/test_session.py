"""A session: engines that live between the steps of code without an event loop."""

import asyncio
import threading

import pytest
from seer_session import Session
from seer_session import rollout as short_form
from seer_sim.engine import SimEngine

from seer_core.errors import EngineError, PluginError, PromptError, SeerError
from tests.support.patience import PATIENCE_S

from .helpers import RECORDS, SMALL, in_a_thread, tokens


def test_a_session_rolls_out_step_after_step_and_takes_new_weights_between(config):
    with Session(config) as session:
        first = session.rollout(RECORDS)
        assert session.update_weights("step 1") == session.weight_version == 1
        streamed = list(session.stream(RECORDS))
        assert session.result.completions == streamed
        again = session.rollout(RECORDS, iteration=0)
    assert tokens(first.completions) == tokens(short_form(config, RECORDS).completions)
    assert tokens(streamed) == tokens(short_form(config, RECORDS, 1).completions)
    assert tokens(again.completions) == tokens(first.completions)
    assert (first.summary.weight_version, again.summary.weight_version) == (0, 1)


def test_it_may_be_used_from_any_thread(config):
    session = in_a_thread(lambda: Session(config).__enter__())
    try:
        first = in_a_thread(lambda: session.rollout(RECORDS, 0))
        second = in_a_thread(lambda: list(session.stream(RECORDS, 0)))
        assert in_a_thread(lambda: session.update_weights("step 1")) == 1
    finally:
        session.close()
    assert tokens(first.completions) == tokens(second)
    assert not any(thread.name == "seer-session" for thread in threading.enumerate())


def test_engines_are_served_while_the_caller_works_on_a_completion(played, hand):
    class Quick(hand):
        """It answers from its own side, in turns of the event loop."""

        def submit(self, job):
            super().submit(job)
            asyncio.get_running_loop().call_soon(self.finish, job.id)
            if job.request_id.endswith("/7"):
                asyncio.get_running_loop().call_soon(answered.set)

    answered = threading.Event()
    with played(Quick(max_running=1)) as session:
        for completion in session.stream([{"prompt_token_ids": [5], "n": 8, "max_tokens": 4}]):
            assert answered.wait(PATIENCE_S), "the engine waited for the caller"
            assert completion.finish_reason == "stop"


def test_prompts_may_be_added_by_some_threads_while_others_read(config):
    records = [{"prompt": f"prompt {number}", "n": 3} for number in range(12)]
    found, left = [], threading.Semaphore(0)

    def add(rollout, mine):
        for record in mine:
            rollout.add([record], 0)
        left.release()

    with Session(config) as session:
        with session.open(most_requests=9) as rollout:
            readers = [threading.Thread(target=lambda: found.extend(rollout)) for _ in range(2)]
            writers = [threading.Thread(target=add, args=(rollout, records[n::3])) for n in range(3)]
            for thread in (*readers, *writers):
                thread.start()
            assert all(left.acquire(timeout=PATIENCE_S) for _ in writers)
            rollout.close()
            for thread in (*readers, *writers):
                thread.join(PATIENCE_S)
            with pytest.raises(SeerError, match="this rollout is closed"):
                rollout.add(records)
        expected = session.rollout(records, 0)
    assert tokens(found) == tokens(expected.completions)


def test_a_prompt_that_waits_for_room_beside_itself_gets_a_name_of_its_own(played, hand):
    class AnswersInTurn(hand):
        """It answers in a turn of the event loop, behind those that add prompts."""

        def submit(self, job):
            super().submit(job)
            asyncio.get_running_loop().call_soon(self.finish, job.id)

    async def add(rollout):
        record = {"prompt_token_ids": [5], "n": 1, "max_tokens": 4}
        await asyncio.gather(*(rollout._add([record], 0) for _ in range(3)))

    with played(AnswersInTurn()) as session, session.open(most_requests=1) as rollout:
        session.submit(add(rollout)).result(PATIENCE_S)
        rollout.close()
        found = list(rollout)
    assert sorted(each.group_id.partition("-")[2] for each in found) == ["", "2", "3"]
    assert len({each.seed for each in found}) == 3


def test_an_open_rollout_that_is_left_gives_up_the_rest(config):
    with Session(config) as session:
        with session.open() as rollout:
            rollout.add(RECORDS)
            first = next(iter(rollout))
            rollout.abort_request("absent")
            rollout.abort_group(first.group_id)
            with pytest.raises(SeerError, match=r"is rolling out; one thing at a time"):
                session.update_weights("step 1")
        assert session.result.summary.requests == 5
        assert session.update_weights("step 1") == 1


def test_what_one_loop_over_an_open_rollout_leaves_the_next_one_gets(played, hand):
    engine = hand()

    def answer():
        for name in list(engine.jobs):
            engine.finish(name)
        answered.set()

    answered = threading.Event()
    with played(engine) as session, session.open(keep=False) as rollout:
        rollout.add([{"prompt_token_ids": [5], "n": 5, "max_tokens": 4}])
        session._loop.call_soon_threadsafe(answer)
        assert answered.wait(PATIENCE_S)
        rollout.close()
        indices = [next(iter(rollout)).index, next(iter(rollout)).index]
        indices += [completion.index for completion in rollout]
    assert indices == [0, 1, 2, 3, 4]


def test_a_stream_that_is_left_early_gives_up_the_rest(config):
    with Session(config) as session:
        for completion in session.stream(RECORDS):
            assert completion.finish_reason in ("stop", "length")
            break
        assert session.result.summary.finish_reasons["aborted"] > 0
        assert session.rollout(RECORDS).summary.requests == 5


def test_errors_come_out_as_they_are_and_the_session_goes_on(config):
    with Session(config) as session:
        with pytest.raises(PromptError, match="messages"):
            session.rollout([{"prompt": "a", "messages": []}])
        with pytest.raises(SeerError, match="rolled out nothing yet"):
            _ = session.result
        assert session.rollout(RECORDS).summary.requests == 5


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"journal": "out/journal"}, "journal is 'out/journal', which is no Journal: it lacks"),
        ({"environment": object()}, "which is no Environment: it lacks step; give an object with"),
    ],
    ids=["journal", "environment"],
)
def test_a_thing_of_another_kind_is_refused_in_a_sentence(config, given, sentence):
    with Session(config) as session:
        with pytest.raises(SeerError, match=sentence):
            session.rollout(RECORDS, **given)
        assert session.rollout(RECORDS).completions


def test_after_a_rollout_that_failed_midway_a_session_is_renewed_and_goes_on(config, monkeypatch):
    from seer_divided_rollout.splitter import AffordableChunks

    def raising(*_):
        raise ValueError("struck")

    class Counting:
        """It sees what happens."""

        seen = 0

        def observe(self, now, event, commands):
            self.seen += 1

    observer = Counting()
    with Session(config, [observer]) as session:
        session.update_weights("step 1")
        with monkeypatch.context() as patch:
            patch.setattr(AffordableChunks, "split", raising)
            with pytest.raises(PluginError, match="struck"):
                session.rollout(RECORDS, 0)
        with pytest.raises(SeerError, match=r"failed midway; .* a session by reset_strategies\(\)"):
            session.rollout(RECORDS, 0)
        session.reset_strategies()
        seen = observer.seen
        again = session.rollout(RECORDS, 0)
        assert observer.seen > seen
        assert session.weight_version == 1
    assert tokens(again.completions) == tokens(short_form(config, RECORDS, 0).completions)


DRAFTS_ALONE = """
from seer_core.scheduling.defaults import FirstComeFirstServed
from seer_core.ports.drafting import SourceSpec
from seer_core.plugins.hookspecs import hookimpl


class Steady:
    def source(self):
        return SourceSpec("steady:Source", {}, 4)

    def shares(self):
        return False

    def policy(self, step_times):
        return self

    def lengths(self, probes, others):
        return 4, 4

    def record_acceptance(self, drafted_at, accepted_at):
        pass


@hookimpl
def seer_make_drafter():
    return Steady()
"""

DRAFTS_ORDERS_AND_WATCHES = f"""{DRAFTS_ALONE}

class Several(Steady, FirstComeFirstServed):
    seen = 0

    def observe(self, now, event, commands):
        self.seen += 1


@hookimpl
def seer_make_drafter():
    return Several()


seer_make_prioritizer = seer_make_observer = seer_make_drafter
"""


@pytest.mark.parametrize("source", [DRAFTS_ALONE, DRAFTS_ORDERS_AND_WATCHES])
def test_a_renewed_session_keeps_a_drafter_unless_it_fills_another_slot_too(
    distribution, write_config, monkeypatch, source
):
    starts, start = [], SimEngine.start

    async def counted(self, sink):
        starts.append(self.id)
        return await start(self, sink)

    monkeypatch.setattr(SimEngine, "start", counted)
    distribution("steady", source)
    alone = source == DRAFTS_ALONE
    with Session(write_config(["divided_rollout", "steady"], SMALL)) as session:
        session.update_weights("step 1")
        before, first = session.runtime.drafter, session.rollout(RECORDS, 0)
        starts.clear()
        session.reset_strategies()
        again = session.rollout(RECORDS, 0)
        drafter = session.runtime.drafter
        assert session.weight_version == 1
        assert (drafter is before, not starts) == (alone, alone)
        if not alone:
            assert session.runtime._controller.scheduler.policies.prioritizer.strategy is drafter.strategy
            assert drafter.strategy.seen > 0
    assert tokens(again.completions) == tokens(first.completions)


def test_a_session_whose_engines_do_not_start_leaves_nothing(played, hand):
    class Broken(hand):
        async def start(self, sink):
            raise OSError("no more memory")

    broken = Broken()
    with pytest.raises(EngineError, match="no more memory"):
        played(broken).start()
    assert broken.stops
    assert not any(thread.name == "seer-session" for thread in threading.enumerate())


def test_a_second_use_at_a_time_is_one_clear_error(config):
    with Session(config) as session:
        stream = session.stream(RECORDS)
        next(stream)
        for use in (
            lambda: session.rollout(RECORDS),
            lambda: session.update_weights("step 1"),
            lambda: next(session.stream(RECORDS)),
        ):
            with pytest.raises(SeerError, match=r"is rolling out; one thing at a time: .* close"):
                in_a_thread(use)
        stream.close()
        assert session.rollout(RECORDS).summary.requests == 5


def test_a_session_is_used_once_and_within_its_life(config):
    session = Session(config)
    with pytest.raises(SeerError, match="not running; use it within `with Session"):
        session.rollout(RECORDS)
    with session, pytest.raises(SeerError, match="has been started before"):
        session.start()
    session.close()
    with pytest.raises(SeerError, match="not running"):
        session.rollout(RECORDS)
    with pytest.raises(SeerError, match="make another one"):
        session.start()
