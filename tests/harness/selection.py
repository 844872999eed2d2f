"""Which tests run: those marked ``long`` only when they are asked for, and campaigns for as long as asked."""


def pytest_addoption(parser):
    """Add the options of tests that may go on for as long as asked."""
    group = parser.getgroup("soak and fuzz")
    group.addoption(
        "--soak-minutes",
        type=float,
        default=0.0,
        help="tests/soak: checks in full, and campaigns of faults for so many minutes",
    )
    group.addoption("--soak-seed", type=int, default=0, help="tests/soak: of the campaign of faults")
    group.addoption(
        "--soak-set", action="append", default=[], metavar="KEY=VALUE", help="tests/soak: as for seer run"
    )
    group.addoption("--long", action="store_true", help="also the tests marked `long`")
    group.addoption("--fuzz-seconds", type=float, default=0.0, help="tests/fuzz: for each target")
    group.addoption("--fuzz-seed", type=int, default=11, help="tests/fuzz: of the changes")


def pytest_collection_modifyitems(config, items):
    """Leave the tests marked ``long`` out, unless they are asked for."""
    if not (config.getoption("--long") or config.getoption("--soak-minutes")):
        left_out = [item for item in items if item.get_closest_marker("long")]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not item.get_closest_marker("long")]
