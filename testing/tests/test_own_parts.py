"""The core's own parts keep the contracts that it sets others."""

import tempfile
from pathlib import Path
from typing import get_args

from seer_testing import (
    ClockContract,
    ObserverContract,
    PlacerContract,
    PrioritizerContract,
    SplitterContract,
)
from seer_testing.scenarios import every_event
from seer_trace.records import TraceWriter

from seer_core.model.events import Command, Event
from seer_core.ports.clock import RealClock
from seer_core.scheduling.defaults import FirstComeFirstServed, LeastLoaded, WholeRequests


class TestWholeRequests(SplitterContract):
    def make(self):
        return WholeRequests()


class TestFirstComeFirstServed(PrioritizerContract):
    def make(self):
        return FirstComeFirstServed()


class TestLeastLoaded(PlacerContract):
    leaves_room = False

    def make(self):
        return LeastLoaded()


class TestTraceWriter(ObserverContract):
    def make(self):
        self.directory = tempfile.TemporaryDirectory()
        return Written(Path(self.directory.name) / "trace.jsonl")


class Written(TraceWriter):
    """A trace that closes its file by itself."""

    def __del__(self):
        self.close()


class TestRealClock(ClockContract):
    def make(self):
        return RealClock()


def test_observers_are_shown_every_kind_of_event_and_command():
    shown = every_event()
    assert {type(event) for event, _ in shown} == set(get_args(Event))
    assert {type(command) for _, commands in shown for command in commands} == set(get_args(Command))
