from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from seer_core.scheduler import Policies
from seer_core.testing.rig import Rig


@pytest.fixture
def make_rig() -> Iterator[Callable[..., Rig]]:
    """Rigs on request; those that did not raise are checked once more at the end."""
    rigs: list[Rig] = []

    def make(policies: Policies | None = None, max_failures: int = 3) -> Rig:
        rigs.append(Rig(policies, max_failures))
        return rigs[-1]

    yield make
    for rig in rigs:
        if not rig.broken:
            rig.check()


@pytest.fixture
def rig(make_rig: Callable[..., Rig]) -> Rig:
    """A rig without any plug-in."""
    return make_rig()
