"""A stock SGLang server as Seer's engines, with deterministic inference on a CPU."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from seer_testing import EngineContract

pytestmark = [pytest.mark.engine, pytest.mark.long]


class TestSglangServer(EngineContract):
    """It keeps the contract of engines, as two instances under two names."""

    shared = True
    patience_s = 300.0

    @pytest.fixture(autouse=True)
    def _server(self, serve_sglang, fleet_of, models):
        url = serve_sglang(models[0]).url
        ways = [SimpleNamespace(url=url), SimpleNamespace(url=url.replace("127.0.0.1", "localhost"))]
        self.make = lambda: fleet_of(*ways, dialect="sglang", poll_s=0.5)
        self.weights = str(models[1])
