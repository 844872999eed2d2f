"""Real SGLang keeps the contract of engines."""

import pytest
from seer_testing import EngineContract

pytestmark = pytest.mark.engine


class TestSglangEngine(EngineContract):
    shared = True
    patience_s = 300.0
    ranks = 1

    @pytest.fixture(autouse=True)
    def _model(self, models, make_fleet):
        self.make = lambda: make_fleet(models[0], instances=2, tensor_parallel=self.ranks)
        self.weights = str(models[1])


@pytest.mark.long
class TestSglangOfTwoRanks(TestSglangEngine):
    """With tensor parallelism."""

    ranks = 2
