"""How long and how the checks of this folder run."""

import attrs
import pytest


@attrs.frozen
class Soak:
    """The options of the command line; ``full`` is whether checks of fixed size run in full."""

    minutes: float
    seed: int
    overrides: tuple[str, ...]

    @property
    def full(self):
        return self.minutes > 0


@pytest.fixture
def soak(request):
    option = request.config.getoption
    return Soak(option("--soak-minutes"), option("--soak-seed"), tuple(option("--soak-set")))


def pytest_generate_tests(metafunc):
    """Parametrize by all values of the marker ``first_by_default``, by default with the first alone."""
    for marker in metafunc.definition.iter_markers("first_by_default"):
        name, values = marker.args
        full = metafunc.config.getoption("--soak-minutes") > 0
        metafunc.parametrize(name, values if full else values[:1])
