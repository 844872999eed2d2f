"""Paced instances keep the contract of engines, on either clock."""

import pytest
from seer_testing import EngineContract

pytestmark = pytest.mark.engine


class TestVirtualEngine(EngineContract):
    shared = True
    patience_s = 300.0

    def make(self):
        plugin = pytest.importorskip("seer_paced.plugin")
        return plugin.make_fleet(plugin.Settings())


class TestPacedProcess(EngineContract):
    shared = True
    patience_s = 300.0

    def make(self):
        plugin = pytest.importorskip("seer_paced.plugin")
        return plugin.make_fleet(plugin.Settings(clock="real", speed=20.0))


class TestVirtualSglang(EngineContract):
    shared = True
    patience_s = 300.0

    def make(self):
        plugin = pytest.importorskip("seer_paced.plugin")
        return plugin.make_fleet(plugin.Settings(scheduler="sglang"))
