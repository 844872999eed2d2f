"""Variables that the tests of a file have changed are as before in the next; no file imports an engine."""

from tests.harness.environment import IMPORTED

SETS = """
import os

os.environ["BY_IMPORT"] = "1"

def test_it():
    os.environ["BY_TEST"] = os.environ["KEPT"] = "1"
    del os.environ["LEFT"]

def test_the_next():
    assert os.environ["BY_TEST"] == "1"
"""
FINDS_NONE = """
import os

def test_it():
    assert "BY_TEST" not in os.environ
    assert [os.environ[name] for name in ("BY_IMPORT", "KEPT", "LEFT")] == ["1", "kept", "left"]
"""


def test_variables_that_tests_have_changed_are_as_before_in_the_next_file(run_tests, monkeypatch):
    monkeypatch.setenv("KEPT", "kept")
    monkeypatch.setenv("LEFT", "left")
    run = run_tests(["environment"], test_a=SETS, test_b=FINDS_NONE)
    assert run.status == 0, run.output
    assert "3 passed" in run.output


def test_no_engine_is_imported_while_tests_are_collected(request):
    assert request.config.stash[IMPORTED] == set()
