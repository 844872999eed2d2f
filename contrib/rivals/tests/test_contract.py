"""The contracts of the slots that the rivals fill."""

from seer_rivals.cache_ttl import CacheTtl
from seer_rivals.expected_lengths import EarlierLengths
from seer_rivals.kv_aware_sticky import KvAwareSticky
from seer_rivals.longest_remaining import LongestRemaining
from seer_rivals.migrate_in_tools import MigrateInTools
from seer_rivals.program_pause import ProgramPause
from seer_rivals.tail_isolation import TailIsolation
from seer_testing import PlacerContract, PrioritizerContract


class TestHistory(PrioritizerContract):
    def make(self):
        return LongestRemaining(EarlierLengths({"a": (5, 9)}).remaining)


class TestTailIsolation(PrioritizerContract):
    def make(self):
        return TailIsolation(EarlierLengths({"a": (5, 9)}).remaining, 1, 0.5)


class TestTailIsolationPlaces(PlacerContract):
    def make(self):
        return TailIsolation(EarlierLengths({}).remaining, 1, 0.5)


class TestCacheTtl(PrioritizerContract):
    def make(self):
        return CacheTtl(2.0)


class TestCacheTtlPlaces(PlacerContract):
    def make(self):
        return CacheTtl(2.0)


class TestProgramPause(PrioritizerContract):
    def make(self):
        return ProgramPause()


class TestProgramPausePlaces(PlacerContract):
    def make(self):
        return ProgramPause()


class TestMigrateInTools(PlacerContract):
    def make(self):
        return MigrateInTools()


class TestKvAwareSticky(PlacerContract):
    leaves_room = False

    def make(self):
        return KvAwareSticky(0.9)
