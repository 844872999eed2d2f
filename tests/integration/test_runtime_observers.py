"""Observers of a runtime: what they see, when they live, and what becomes of those that fail."""

import socket
from pathlib import Path

import pytest
import structlog
from seer_divided_rollout import Chunks
from seer_host.tables import SeerTable

from seer_core.errors import (
    PluginError,
)
from seer_core.model.events import (
    ChunkFinished,
    InstanceStarted,
)
from seer_core.plugins.slots import Strategies
from seer_core.scheduling.defaults import FirstComeFirstServed
from seer_core.scheduling.scheduler import Policies, Slot

from .helpers import Recorder, divided, outputs, play, policies, roll_out


class Fragile:
    """It sees one chunk's end and raises at it."""

    def __init__(self):
        self.chunks = 0

    def observe(self, now, event, commands):
        if isinstance(event, ChunkFinished):
            self.chunks += 1
            raise KeyError("oh")


def test_an_observer_that_raises_is_left_out_and_the_rollout_goes_on(simulated, some_groups):
    fragile, recorder = Fragile(), Recorder()
    observers = [Slot("observer", "fragile", fragile), Slot("observer", "recorder", recorder)]
    with structlog.testing.capture_logs() as logs:
        result = roll_out(simulated(divided(), observers), some_groups(2, 2, 200))
    expected = roll_out(simulated(divided()), some_groups(2, 2, 200))
    assert outputs(result) == outputs(expected)
    assert fragile.chunks == 1
    assert sum(isinstance(event, ChunkFinished) for event in recorder.seen) == result.summary.chunks
    assert (result.summary.observers_failed, expected.summary.observers_failed) == (1, 0)
    [entry] = [each for each in logs if each["event"] == "observer_failed"]
    line = Fragile.observe.__code__.co_firstlineno + 3
    assert entry["plugin"] == "fragile"
    assert entry["error"].startswith("KeyError: 'oh' at ")
    assert entry["error"].endswith(f"{Path(__file__).name}:{line}")


def test_in_debug_an_observer_that_raises_is_named(simulated, some_groups):
    observer = Slot("observer", "fragile", Fragile())
    with pytest.raises(
        PluginError,
        match=r"'fragile', slot 'observer': raised KeyError: 'oh' at \S*_observers.py:\d+;.*-p no:fragile",
    ):
        roll_out(simulated(observers=[observer], seer=SeerTable(debug=True)), some_groups(1, 1))


def test_an_observer_cannot_change_what_is_carried_out(simulated, some_groups):
    class Censor:
        def observe(self, now, event, commands):
            commands.clear()

    result = roll_out(simulated(observers=[Slot("observer", "censor", Censor())]), some_groups(2, 2))
    assert len(result.completions) == 4
    assert result.summary.observers_failed == 1


class Meddler(FirstComeFirstServed):
    """It wears requests out by looking at them."""

    def peek(self):
        request = super().peek()
        if request is not None and request.remaining_tokens > 1:
            request.generated_tokens += 1
        return request


def test_a_request_that_a_plug_in_has_changed_does_not_end_short_without_a_word(simulated, some_groups):
    groups = some_groups(2, 2, 40)
    with pytest.raises(PluginError, match=r"'a/0' ended at its limit of 40 tokens with \d+: .* --debug"):
        roll_out(simulated(policies(prioritizer=Meddler(), splitter=Chunks(16))), groups)
    with pytest.raises(
        PluginError, match=r"'mine', slot 'prioritizer': peek\(\) changed .*'a/0' from 0 to 1"
    ):
        roll_out(simulated(policies(prioritizer=Meddler()), seer=SeerTable(debug=True)), groups)


class Server(Recorder):
    """An observer that holds a port from its start to its stop."""

    def __init__(self, port):
        super().__init__()
        self.port = port
        self.calls = []

    async def start(self):
        self.calls.append("start")
        self.socket = socket.socket()
        self.socket.bind(("127.0.0.1", self.port))
        self.port = self.socket.getsockname()[1]

    async def stop(self):
        self.calls.append("stop")
        self.socket.close()


def test_an_observer_lives_from_before_the_engines_start_until_they_have_ended(simulated, some_groups):
    server = Server(0)

    async def run():
        runtime = simulated(observers=[Slot("observer", "server", server)])
        async with runtime:
            assert server.calls == ["start"]
            assert [type(event) for event in server.seen] == [InstanceStarted] * 2
            await runtime.rollout(some_groups(1, 1)).wait()
            other = Server(server.port)
            await runtime.use(Strategies(Policies(), (Slot("observer", "other", other),)))
            assert (server.calls, other.calls) == (["start", "stop"], ["start"])
            assert [type(event) for event in other.seen] == [InstanceStarted] * 2
        await runtime.stop()
        assert (server.calls, other.calls) == (["start", "stop"], ["start", "stop"])

    play(run())


def test_a_runtime_that_was_never_entered_starts_no_observer(simulated):
    server = Server(0)

    async def run():
        runtime = simulated(observers=[Slot("observer", "server", server)])
        await runtime.use(Strategies(Policies(), (Slot("observer", "other", server),)))
        await runtime.stop()

    play(run())
    assert server.calls == []


def test_an_observer_that_does_not_start_is_named_and_the_others_are_stopped(simulated):
    first = Server(0)

    class Late(Server):
        async def start(self):
            self.port = first.port
            await super().start()

    second = Late(0)
    observers = [Slot("observer", "first", first), Slot("observer", "second", second)]

    async def run():
        async with simulated(observers=observers):
            pass

    with pytest.raises(
        PluginError, match=r"'second', slot 'observer': raised OSError: .* at .*test_runtime_observers.py:"
    ):
        play(run())
    assert (first.calls, second.calls) == (["start", "stop"], ["start"])
    second.socket.close()


def test_an_observer_that_does_not_stop_is_logged_and_the_others_are_stopped(simulated, some_groups):
    class Clinging(Server):
        async def stop(self):
            await super().stop()
            raise OSError("no")

    first, second = Server(0), Clinging(0)
    observers = [Slot("observer", "first", first), Slot("observer", "second", second)]
    with structlog.testing.capture_logs() as logs:
        roll_out(simulated(observers=observers), some_groups(1, 1))
    [entry] = [each for each in logs if each["event"] == "stop_failed"]
    assert (entry["slot"], entry["plugin"]) == ("observer", "second")
    assert first.calls == second.calls == ["start", "stop"]
