from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from seer_testing.harness import SchedulerHarness

from seer_core.scheduling.scheduler import Policies


@pytest.fixture
def make_rig() -> Iterator[Callable[..., SchedulerHarness]]:
    """Rigs on request; those that did not raise are checked once more at the end."""
    rigs: list[SchedulerHarness] = []

    def make(policies: Policies | None = None, max_failures: int = 3) -> SchedulerHarness:
        rigs.append(SchedulerHarness(policies, max_failures))
        return rigs[-1]

    yield make
    for rig in rigs:
        if not rig.broken:
            rig.check()


@pytest.fixture
def rig(make_rig: Callable[..., SchedulerHarness]) -> SchedulerHarness:
    """A rig without any plug-in."""
    return make_rig()
