"""Clocks that break their contract in one way each: the simulator's, altered."""

import re
from types import SimpleNamespace

import pytest
from seer_sim.clock import VirtualClock
from seer_testing import ClockContract


def clock(**methods):
    """Return a contract whose clocks have other methods."""
    made = type("Clock", (VirtualClock,), methods)
    return type("Broken", (ClockContract,), {"make": lambda self: made(), "patience_s": 0.2})


def never(self, when_s, callback):
    return VirtualClock.call_at(self, when_s + 3600, lambda: None)


def uncancelled(self, when_s, callback):
    VirtualClock.call_at(self, when_s, callback)
    return lambda: None


def at_once(self, when_s, callback):
    if when_s <= self.now():
        callback()
    return VirtualClock.call_at(self, when_s, callback)


ORDER = "test_callbacks_run_when_due_and_in_order"


CLOCKS = [
    (
        type("Broken", (ClockContract,), {"make": lambda self: SimpleNamespace(now=print)}),
        "test_it_is_a_clock",
        "",
    ),
    (clock(call_at=never), ORDER, "nothing will happen, but it will"),
    (clock(call_at=uncancelled), "test_a_cancelled_callback_never_runs", ""),
    (clock(call_at=at_once), "test_what_is_past_runs_at_once_but_not_within_the_call", "within call_at"),
]


@pytest.mark.parametrize(("contract", "test", "words"), CLOCKS)
def test_the_fault_is_found_and_named(contract, test, words, catches):
    assert re.search(words, catches(contract, test))


def test_every_test_of_the_contract_finds_a_fault(uncaught):
    assert not uncaught(ClockContract, CLOCKS)
