"""Emulated clocks: their counts, and the report of a busy machine.  No engine is needed."""

import time

import pytest
from seer_paced import emulated_clock
from seer_paced.emulated_clock import CountingClock, SleepingClock


class Time:
    """A machine whose work takes the seconds that a test says."""

    def __init__(self):
        self.now = 100.0
        self.slept = []

    def perf_counter(self):
        return self.now

    def sleep(self, seconds):
        self.slept.append(seconds)
        self.now += seconds


@pytest.fixture
def machine(monkeypatch):
    machine = Time()
    monkeypatch.setattr(emulated_clock, "time", machine)
    return machine


def step(pace, machine, works_s, takes_s, follows=True):
    if not follows:
        pace.idle()
    pace.begin_step()
    machine.now += works_s
    pace.spend(takes_s)


def test_a_step_ends_when_its_time_is_over_with_what_the_host_does_in_it(machine):
    pace = SleepingClock(speed=2.0)
    step(pace, machine, 0.3, 1.0, follows=False)
    assert machine.slept == pytest.approx([0.2])
    machine.now += 0.1  # between two steps
    step(pace, machine, 0.3, 1.0)
    assert machine.slept == pytest.approx([0.2, 0.1])
    assert pace.overrun().late == 0
    assert pace.overrun().share == 0.0


def test_later_steps_make_up_for_a_late_one(machine):
    pace = SleepingClock(speed=1.0)
    step(pace, machine, 1.5, 1.0, follows=False)
    assert pace.overrun().lost_s == pytest.approx(0.5)
    step(pace, machine, 0.2, 1.0)
    overrun = pace.overrun()
    assert (overrun.steps, overrun.late) == (2, 1)
    assert overrun.lost_s == 0.0
    assert machine.now == pytest.approx(102.0)


def test_what_an_idle_instance_was_late_by_is_lost(machine):
    pace = SleepingClock(speed=4.0)
    step(pace, machine, 1.5, 4.0, follows=False)
    machine.now += 10
    step(pace, machine, 0.1, 4.0, follows=False)
    overrun = pace.overrun()
    assert overrun.lost_s == pytest.approx(2.0)
    assert overrun.share == pytest.approx(0.25)


def test_a_virtual_step_counts_on_from_the_clock():
    pace = CountingClock()
    pace.clock_s = 3.0
    pace.begin_step()
    pace.spend(0.5)
    pace.spend(0.25)
    assert (pace.step_s, pace.now()) == (0.75, 3.75)
    began = time.perf_counter()
    pace.spend(1e6)
    assert time.perf_counter() - began < 1e5
