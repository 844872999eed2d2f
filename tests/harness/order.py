"""The order of tests: the longest files begin; ``--order random`` shuffles files, and tests in each."""

import random
import tomllib
from hashlib import sha256
from pathlib import Path

import pytest

CLUSTERS = ("backends/ray/", "tests/soak/test_cluster_campaign.py")
"""Where tests start clusters."""

SECONDS = tomllib.loads(Path(__file__).with_name("seconds.toml").read_text("utf-8"))
"""What files have cost that take several seconds; ``scripts/test-costs --store`` writes it anew.

They begin first, or one process would be left with one of them at the end.
"""

LONG_S = 15
"""Files that have cost so much also begin first in a random order."""

ENGINES = {
    "backends/vllm/": "vllm",
    "backends/remote/tests/test_remote_vllm.py": "vllm",
    "backends/remote/tests/test_remote_trl_client.py": "vllm",  # TRL's client imports it
    "tests/integration/test_real_": "vllm",
    "tests/integration/test_mixed_fleet.py": "vllm",
    "backends/sglang/": "sglang",
    "backends/paced/": "paced",
}
"""Files that share instances, or what has imported their engine, by the engine: one process has them."""

_SEED = pytest.StashKey[int]()


def pytest_addoption(parser):
    """Add the options of the order."""
    group = parser.getgroup("order")
    group.addoption(
        "--order",
        choices=("written", "random"),
        default="written",
        help="of files, and of tests in each file",
    )
    group.addoption("--order-seed", type=int, metavar="SEED", help="which random order; implies it")


def pytest_configure(config):
    """Draw the seed of a random order; all processes of a run have the same."""
    seed = config.getoption("--order-seed")
    if hasattr(config, "workerinput"):
        seed = config.workerinput.get("order_seed")
    elif seed is None and config.getoption("--order") == "random":
        seed = random.SystemRandom().randrange(10**6)
    if seed is not None:
        config.stash[_SEED] = seed


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node):
    """Send the seed to a worker of xdist."""
    node.workerinput["order_seed"] = node.config.stash.get(_SEED, None)


def pytest_report_header(config):
    """Name the seed that repeats this order."""
    seed = config.stash.get(_SEED, None)
    return None if seed is None else f"order: random, again with --order-seed={seed}"


def pytest_terminal_summary(terminalreporter, config):
    """Name the seed again where failures are read, and where ``-q`` has left out the header."""
    if _SEED in config.stash:
        terminalreporter.line(pytest_report_header(config))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """Shuffle tests if that is asked for, and put the longest files first.

    The tests of a file and those of a class stay together, and pytest groups them by their parametrized
    fixtures after the shuffle, so that what a file shares is made once.
    """
    seed = config.stash.get(_SEED, None)
    if seed is not None:
        items.sort(key=lambda item: _draws(seed, item.nodeid))
    result = yield
    items.sort(key=lambda item: -_seconds(item.nodeid.split("::")[0], is_random=seed is not None))
    return result


def _draws(seed, nodeid):
    """Return a random number for the file, the class if there is one, and the test."""
    names = nodeid.partition("[")[0].split("::")
    prefixes = ["::".join(names[: count + 1]) for count in range(len(names) - 1)]
    return [sha256(f"{seed} {name}".encode()).digest() for name in (*prefixes, nodeid)]


def _engine(scope):
    return next((engine for start, engine in ENGINES.items() if scope.startswith(start)), None)


def _seconds(file, is_random):
    """Return how long a file takes, as far as its place in the order goes by that."""
    seconds = float("inf") if file.startswith(CLUSTERS) else SECONDS.get(file, 0)
    return min(seconds, LONG_S) // LONG_S if is_random else seconds


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Let one of several processes run all tests on clusters, so that each is started once, one at a time.

    All files of an engine go to the process that has begun with them, until it is the only work that is left.
    The groups of xdist itself do nothing under pytest 9.2.
    """
    from xdist.scheduler import LoadFileScheduling

    config.option.loadscopereorder = False  # by number of tests, which says nothing about their length

    class ByFileOrCluster(LoadFileScheduling):
        def _split_scope(self, nodeid):
            return "cluster" if nodeid.startswith(CLUSTERS) else super()._split_scope(nodeid)

        def _assign_work_unit(self, node):
            begun = {_engine(scope): each for each, scopes in self.assigned_work.items() for scope in scopes}
            begun.pop(None, None)

            def rank(scope):
                process = begun.get(_engine(scope))
                return 1 if process is None else 0 if process is node else 2

            self.workqueue.move_to_end(min(self.workqueue, key=rank), last=False)
            super()._assign_work_unit(node)

    return ByFileOrCluster(config, log) if config.getvalue("dist") == "loadfile" else None
