"""The contracts of a drafter, of its policy, and of its sources."""

import msgspec
from seer_grouped_spec.plugin import GroupedDrafter, Settings
from seer_grouped_spec.source import GroupedSource
from seer_testing import DrafterContract, DraftSourceContract


class TestGroupedDrafter(DrafterContract):
    def make(self):
        return GroupedDrafter(Settings(), None)


class TestSourceThatChoosesTokens(DraftSourceContract):
    policy = "token"

    def make_source(self, host):
        spec = GroupedDrafter(Settings(policy=self.policy), None).source()
        return GroupedSource(msgspec.to_builtins(spec.settings), host)


class TestSourceThatChoosesByClass(TestSourceThatChoosesTokens):
    policy = "class"
