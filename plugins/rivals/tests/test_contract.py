"""The contracts of the slots that the rivals fill."""

from seer_rivals.expected_lengths import EarlierLengths
from seer_rivals.kv_aware_sticky import KvAwareSticky
from seer_rivals.longest_remaining import LongestRemaining
from seer_rivals.tail_isolation import TailIsolation

from seer_core.testing import PlacerContract, PrioritizerContract


class TestHistory(PrioritizerContract):
    def make(self):
        return LongestRemaining(EarlierLengths({"a": (5, 9)}).remaining)


class TestTailIsolation(PrioritizerContract):
    def make(self):
        return TailIsolation(EarlierLengths({"a": (5, 9)}).remaining, 1, 0.5)


class TestTailIsolationPlaces(PlacerContract):
    def make(self):
        return TailIsolation(EarlierLengths({}).remaining, 1, 0.5)


class TestKvAwareSticky(PlacerContract):
    leaves_room = False

    def make(self):
        return KvAwareSticky(0.9)
