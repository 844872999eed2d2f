"""The contracts of the slots that the baselines fill."""

from seer_baselines.group_round_robin import GroupRoundRobin
from seer_baselines.oracle_longest_first import OracleLongestFirst
from seer_baselines.sticky_sessions import StickySessions
from seer_testing import PlacerContract, PrioritizerContract


class TestGroupRoundRobin(PlacerContract):
    leaves_room = False

    def make(self):
        return GroupRoundRobin()


class TestStickySessions(PlacerContract):
    leaves_room = False

    def make(self):
        return StickySessions()


class TestOracleLongestFirst(PrioritizerContract):
    def make(self):
        return OracleLongestFirst()
