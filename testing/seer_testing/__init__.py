"""The author's kit: contracts that a plug-in's tests inherit, and a lab that runs it on the simulator.

A contract is a class of tests.  Subclass it, say how your part is made, and pytest runs them all:

    class TestShortestFirst(PrioritizerContract):
        def make(self):
            return ShortestFirst()

No test of a contract asks for a fixture, reads the wall clock to judge, or leaves anything behind.  Chance is
drawn the same in each run; a failure shows the smallest story that leads to it.
``python -m seer_testing`` draws afresh, for as long as it is asked to.
"""

from __future__ import annotations

from pathlib import Path

from seer_host.installation import how_to_install

try:
    import hypothesis  # noqa: F401
    import numpy  # noqa: F401
    import pytest
except ImportError as error:
    raise ImportError(
        f"seer_testing needs {error.name}, which is not installed;"
        f" {how_to_install('testing', '`make setup`')}"
    ) from error

PARTS = [path.stem for path in Path(__file__).parent.glob("[a-z]*.py")]
pytest.register_assert_rewrite(*(f"{__name__}.{part}" for part in PARTS))

from seer_testing.clock import ClockContract  # noqa: E402
from seer_testing.drafting import DrafterContract, DraftPolicyContract, DraftSourceContract  # noqa: E402
from seer_testing.engine import EngineContract  # noqa: E402
from seer_testing.environment import EnvironmentContract  # noqa: E402
from seer_testing.kv import KVPoolContract  # noqa: E402
from seer_testing.policy import (  # noqa: E402
    ObserverContract,
    PlacerContract,
    PrioritizerContract,
    SplitterContract,
)
from seer_testing.queue_harness import QueueHarness  # noqa: E402
from seer_testing.simulate import SimulatedRollout, Simulation  # noqa: E402

__all__ = [
    "ClockContract",
    "DraftPolicyContract",
    "DraftSourceContract",
    "DrafterContract",
    "EngineContract",
    "EnvironmentContract",
    "KVPoolContract",
    "ObserverContract",
    "PlacerContract",
    "PrioritizerContract",
    "QueueHarness",
    "SimulatedRollout",
    "Simulation",
    "SplitterContract",
]
