"""`scripts/gate-runs` records how a run went, and shows all in a table."""

import importlib.machinery
import importlib.util
from pathlib import Path

ROOT = Path(__file__).parents[2]
LOADER = importlib.machinery.SourceFileLoader("gate_runs", str(ROOT / "scripts" / "gate-runs"))
gate_runs = importlib.util.module_from_spec(importlib.util.spec_from_loader("gate_runs", LOADER))
LOADER.exec_module(gate_runs)

OUTPUT = """
ruff: 3 passed in 0.1s
FAILED tests/a/test_x.py::test_flaky - assert 0
ERROR tests/test_y.py::test_broken[1] - OSError
==== 1 failed, 8102 passed, 2 skipped, 193 deselected, 1 error in 801.00s (0:13:21) ====
a second run, one by one, of 2 tests that have failed
flaky: tests/a/test_x.py::test_flaky
failed again: tests/test_y.py::test_broken[1]
"""


def test_counts_are_those_of_the_last_summary_and_a_flaky_test_has_not_failed():
    assert gate_runs.counts_of(OUTPUT) == {
        "minutes_of_tests": 13.3,
        "passed": 8102,
        "failed": 1,
        "errors": 1,
        "skipped": 2,
        "flaky": ["tests/a/test_x.py::test_flaky"],
        "failures": ["tests/test_y.py::test_broken[1]"],
    }
    assert gate_runs.counts_of("make: *** [check] Error 1")["passed"] == 0


def test_runs_of_one_commit_and_kind_are_a_line_of_the_table():
    run = {
        "commit": "abc",
        "busy": True,
        "seed": None,
        "status": 0,
        "minutes": 15.2,
        **gate_runs.counts_of(OUTPUT),
    }
    shuffled = run | {"seed": 7, "flaky": [], "status": 1}
    *_, first, second = gate_runs.table([run, run | {"minutes": 14.0}, shuffled])
    assert first == (
        "| abc | 2 | written | a busy core | 14.0 to 15.2, 13.3 | 8102, 2 | 0 | `test_x.py::test_flaky` |\n"
    )
    assert "| abc | 1 | random |" in second
    assert second.endswith("| 1 | none |\n")


def test_the_page_has_the_table_of_the_records():
    before = gate_runs.PAGE.read_text("utf-8")
    records = gate_runs.RECORDS.read_text("utf-8").splitlines() if gate_runs.RECORDS.exists() else []
    shown = "".join(gate_runs.table([gate_runs.json.loads(line) for line in records]))
    assert f"{gate_runs.BEGIN}\n{shown}\n{gate_runs.END}" in before
