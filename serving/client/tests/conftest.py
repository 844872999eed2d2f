"""A server in a thread, on simulated engines or on one that is played by hand."""

import importlib.util
from functools import partial
from pathlib import Path

import pytest
import structlog
from seer_client import Client
from seer_host.config_files import make_config
from seer_session.runtime import Runtime

from seer_core.plugins.slots import Assembly, Strategies
from seer_core.scheduling.scheduler import Policies, Slot

ROOT = Path(__file__).parents[3]


def load(path):
    spec = importlib.util.spec_from_file_location(path.parent.name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(autouse=True)
def _quiet_logs():
    structlog.configure(processors=[lambda logger, method, event: _drop()])


def _drop():
    raise structlog.DropEvent


@pytest.fixture(scope="session")
def serving():
    """Return a module: that of the server's own tests, which has a server in a thread."""
    return load(ROOT / "serving/server/tests/conftest.py")


@pytest.fixture(scope="session")
def playing():
    """Return a module: that of the engines which tests play by hand."""
    return load(ROOT / "tests/conftest.py")


@pytest.fixture(scope="session")
def config(serving, tmp_path_factory):
    return make_config(serving.TABLES, base_dir=tmp_path_factory.mktemp("client"), origin="a test")


@pytest.fixture
def serve(serving, config):
    """Return a function that makes a server over simulated instances."""

    def make(**settings):
        return serving.Served(serving.make_app(partial(Runtime.from_config, config), **settings))

    return make


@pytest.fixture
def serve_by_hand(serving, playing):
    """Return a function that makes a server over engines that are played by hand."""

    def make(*engines, **settings):
        def make_runtime(observers):
            slots = tuple(Slot("observer", "server", each) for each in observers)
            return Runtime(Assembly(playing.Hands([*engines]), Strategies(Policies(), slots, None), None))

        return serving.Served(serving.make_app(make_runtime, **settings))

    return make


@pytest.fixture
def connect():
    """Return a function that makes a client of a server, which gives up soon."""
    clients = []

    def make(served, **settings):
        url = getattr(served, "url", served)
        clients.append(Client(url, **{"patience_s": 0.0, "silence_s": 60.0, **settings}))
        return clients[-1]

    yield make
    for client in clients:
        client.close()
