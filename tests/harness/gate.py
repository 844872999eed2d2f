"""With ``--gate`` a run leaves out the tests that ``rest.toml`` names: only ``make test-all`` runs them.

It also draws the same examples in each run: those of Hypothesis do not fail it by chance.
"""

import tomllib
from pathlib import Path

from hypothesis import settings

REST = tomllib.loads(Path(__file__).with_name("rest.toml").read_text("utf-8"))
FILES, TESTS = REST["files"], REST["tests"]
FOLDERS = tuple(name for name in FILES if name.endswith("/"))


def pytest_addoption(parser):
    """Add the option."""
    parser.getgroup("gate").addoption(
        "--gate", action="store_true", help="without the tests that only make test-all runs"
    )


def pytest_configure(config):
    """Let Hypothesis draw afresh without ``--gate`` alone; it never judges by time."""
    settings.register_profile("seer", deadline=None, derandomize=config.getoption("--gate"))
    settings.load_profile("seer")


def pytest_ignore_collect(collection_path, config):
    """Leave whole files out unread: some want environments that the gate does without."""
    if config.getoption("--gate") and collection_path.is_relative_to(config.rootpath):
        file = collection_path.relative_to(config.rootpath).as_posix()
        if file in FILES or f"{file}/".startswith(FOLDERS):
            return True
    return None


def pytest_collection_modifyitems(config, items):
    """Leave the tests out that are named one by one."""
    if config.getoption("--gate"):
        rest = [item for item in items if is_of_the_rest(item.nodeid)]
        config.hook.pytest_deselected(items=rest)
        items[:] = [item for item in items if not is_of_the_rest(item.nodeid)]


def is_of_the_rest(nodeid):
    """Return whether a test is one of those, or in a class of those."""
    file, *names = nodeid.split("[")[0].split("::")
    return not TESTS.get(file, {}).keys().isdisjoint(names)
