"""Sessions that Ctrl-C or another thread ends."""

import asyncio
import os
import signal
import threading
from concurrent.futures import Future

import pytest
from seer_session import Session
from seer_session.environment import EnvironmentAnswer

from seer_core.errors import SeerError
from tests.support.eventually import PATIENCE_S

from .helpers import in_a_thread


def interrupt():
    """Press Ctrl-C: the main thread gets the signal, as from a terminal."""
    signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)


def test_ctrl_c_ends_a_rollout_in_order_and_the_session_can_go_on(played, hand):
    class Interrupting(hand):
        def submit(self, job):
            super().submit(job)
            interrupt()

    engine = Interrupting()
    with played(engine) as session:
        with pytest.raises(KeyboardInterrupt):
            session.rollout([{"prompt_token_ids": [5], "max_tokens": 4, "n": 1}])
        assert (len(engine.aborted), engine.jobs) == (1, {})
        assert session.result.summary.finish_reasons == {"aborted": 1}
        with pytest.raises(KeyboardInterrupt):
            next(session.stream([{"prompt_token_ids": [5], "max_tokens": 4, "n": 1}]))
        assert (len(engine.aborted), engine.jobs) == (2, {})
        assert session.update_weights("step 1") == 1
    assert engine.stops == 1


def test_ctrl_c_during_a_start_stops_what_has_started(played, hand):
    class Slow(hand):
        async def start(self, sink):
            interrupt()
            await asyncio.Event().wait()

    ready, slow = hand("x"), Slow("y")
    with pytest.raises(KeyboardInterrupt):
        played(ready, slow).start()
    assert ready.stops
    assert slow.stops
    assert not any(thread.name == "seer-session" for thread in threading.enumerate())


def test_ctrl_c_during_an_update_takes_effect_once_all_engines_have_the_weights(played, hand):
    class Interrupting(hand):
        async def update_weights(self, source, version):
            interrupt()
            await asyncio.sleep(0)
            await super().update_weights(source, version)

    engine = Interrupting()
    with played(engine) as session:
        with pytest.raises(KeyboardInterrupt):
            session.update_weights("step 1")
        assert (engine.weights, session.weight_version) == ([("step 1", 1)], 1)


def test_closing_from_another_thread_ends_the_wait_of_the_one_that_rolls_out(played, hand):
    class Silent(hand):
        def submit(self, job):
            super().submit(job)
            busy.set()

    busy = threading.Event()
    session = played(Silent())
    session.start()

    def close():
        busy.wait(PATIENCE_S)
        session.close()

    closer = threading.Thread(target=close)
    closer.start()
    # Which of the two it is depends on whether it waits already.
    with pytest.raises(SeerError, match=r"the engines were stopped before the rollout|is not running"):
        session.rollout([{"prompt_token_ids": [5], "max_tokens": 4, "n": 1}])
    closer.join(PATIENCE_S)


def test_two_threads_may_close_a_session_at_a_time(played, hand):
    class Slow(hand):
        async def stop(self):
            stopping.set()
            await asyncio.to_thread(second.wait, 60)
            await super().stop()

    stopping, second = threading.Event(), threading.Event()
    engine = Slow()
    session = played(engine)
    session.start()
    closer = threading.Thread(target=session.close, daemon=True)
    closer.start()
    assert stopping.wait(PATIENCE_S)
    second.set()
    session.close()
    closer.join(PATIENCE_S)
    assert (engine.stops, closer.is_alive()) == (1, False)


def test_calls_of_a_session_that_another_thread_is_closing_raise_one_sentence(played, hand, monkeypatch):
    class Late(Future):
        def __init__(self):  # the call has looked for the loop, and not yet asked it
            super().__init__()
            monkeypatch.undo()
            in_a_thread(session.close)

    with played(hand()) as session, session.open() as rollout:
        monkeypatch.setattr("seer_session.session.Future", Late)
        with pytest.raises(SeerError, match="this session is not running"):
            rollout.close()


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # of Python 3.12, in a process with threads
def test_a_forked_child_leaves_the_session_to_its_parent(played, hand):
    engine = hand()
    with played(engine) as session:
        child = os.fork()
        if not child:
            status = 1
            try:
                session.close()
                try:
                    session.sleep()
                except SeerError as error:
                    status = 0 if "forked" in str(error) else 2
            finally:
                os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert engine.stops == 0
        assert session.update_weights("step 1") == 1


class Tool:
    """An environment whose turns do something in the event loop of a session, but for the first response."""

    def __init__(self, act):
        self.act = act

    async def step(self, trajectory, turn):
        if trajectory.index == 0:
            return EnvironmentAnswer(done=True)
        return await self.act()


class PlainTool(Tool):
    def step(self, trajectory, turn):
        if trajectory.index == 0:
            return EnvironmentAnswer(done=True)
        raise self.act


async def in_a_task(error):
    async def tool():
        raise error

    await asyncio.gather(tool(), asyncio.sleep(0))


async def in_a_coroutine(error):
    raise error


@pytest.mark.parametrize("error", [KeyboardInterrupt("7"), SystemExit(7), asyncio.CancelledError("7")])
@pytest.mark.parametrize("how", [in_a_coroutine, in_a_task, None])
def test_what_an_environment_raises_ends_its_responses_and_neither_others_nor_the_session(config, error, how):
    tool = PlainTool(error) if how is None else Tool(lambda: how(error))
    with Session(config) as session:
        result = session.rollout([{"prompt": "a", "n": 4, "max_tokens": 400}], environment=tool)
        found = {each.index: each for each in result.completions}
        assert found[0].finish_reason == "stop"
        for index in (1, 2, 3):
            assert found[index].finish_reason == "error"
            assert f"its environment raised {type(error).__name__}: 7 at " in found[index].error
        assert len(session.rollout([{"prompt": "a", "n": 2}]).completions) == 2


@pytest.mark.parametrize("error", [KeyboardInterrupt("7"), SystemExit(7)])
def test_an_event_loop_that_is_left_ends_the_rollout_with_the_reason_and_goes_on(config, error):
    def leave():
        raise error

    async def act():
        asyncio.get_running_loop().call_soon(leave)
        await asyncio.Event().wait()

    with Session(config) as session:
        reason = f"the event loop of this session was left by {type(error).__name__}: 7 at "
        with pytest.raises(SeerError, match=reason):
            session.rollout([{"prompt": "a", "n": 2, "max_tokens": 400}], environment=Tool(act))
        session.reset_strategies()
        assert len(session.rollout([{"prompt": "a", "n": 2}]).completions) == 2
        with pytest.raises(SeerError, match=reason):
            session.submit(in_a_coroutine(error)).result(PATIENCE_S)
    assert not any(thread.name == "seer-session" for thread in threading.enumerate())


def test_an_event_loop_that_an_environment_stops_goes_on(config):
    async def act():
        asyncio.get_running_loop().stop()
        return EnvironmentAnswer(done=True)

    with (
        Session(config) as session,
        pytest.raises(SeerError, match="was left by RuntimeError: Event loop stopped"),
    ):
        session.rollout([{"prompt": "a", "n": 2, "max_tokens": 400}], environment=Tool(act))


def test_a_session_without_an_event_loop_raises_in_its_caller(config, monkeypatch):
    def full():
        raise OSError(24, "Too many open files")

    monkeypatch.setattr("asyncio.events.new_event_loop", full)
    with pytest.raises(SeerError, match="Too many open files"):
        Session(config).start()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_thread_that_dies_raises_in_its_callers(config, monkeypatch):
    async def act():
        monkeypatch.delattr(Session, "_interrupted")
        asyncio.get_running_loop().stop()
        await asyncio.Event().wait()

    session = Session(config)
    session.start()
    with pytest.raises(SeerError, match="the thread of this session died of AttributeError: "):
        session.rollout([{"prompt": "a", "n": 2, "max_tokens": 400}], environment=Tool(act))
    with pytest.raises(SeerError, match="this session is not running"):
        session.rollout([{"prompt": "a"}])
    session.close()
    session._thread.join(PATIENCE_S)
