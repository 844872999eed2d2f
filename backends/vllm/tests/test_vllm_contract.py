"""Real vLLM keeps the contract of engines."""

import pytest
from seer_testing import EngineContract

pytestmark = pytest.mark.engine


class TestVllmEngine(EngineContract):
    shared = True
    patience_s = 300.0
    ranks = 1

    @pytest.fixture(autouse=True)
    def _model(self, models, make_fleet):
        pytest.importorskip("vllm")
        self.make = lambda: make_fleet(models[0], instances=2, tensor_parallel=self.ranks)
        self.weights = str(models[1])


@pytest.mark.long
class TestSecondRunner(EngineContract):
    """With vLLM's second model runner, in Triton's interpreter."""

    shared = True
    patience_s = 300.0

    @pytest.fixture(autouse=True)
    def _model(self, models, make_fleet, interpret):
        def make():
            fleet = make_fleet(models[0], instances=2, runner="second", max_running=8)
            for engine in fleet.engines:
                engine.spec = interpret(engine.spec)
            return fleet

        self.make = make
        self.weights = str(models[1])


@pytest.mark.long
class TestVllmOfTwoRanks(TestVllmEngine):
    """With tensor parallelism."""

    ranks = 2
