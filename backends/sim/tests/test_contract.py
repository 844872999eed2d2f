"""The contracts of engines and of their clock."""

from seer_sim.clock import VirtualClock
from seer_sim.plugin import Settings, make_fleet
from seer_testing import ClockContract, EngineContract


class TestVirtualClock(ClockContract):
    def make(self):
        return VirtualClock()


class TestSimEngine(EngineContract):
    def make(self):
        return make_fleet(Settings())


class TestSimEngineWithLittleMemory(EngineContract):
    def make(self):
        return make_fleet(Settings(kv_capacity_tokens=128, max_model_tokens=128, max_running=3))
