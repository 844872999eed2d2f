"""The gate leaves out what its tables name, and these name what is there."""

import re
from pathlib import Path

from tests.harness.gate import FILES, TESTS, is_of_the_rest

ROOT = Path(__file__).parents[2]


def test_what_is_left_out_is_there_and_so_are_the_files_that_cover_it():
    names = {path.name for path in ROOT.glob("*/**/test_*.py")}
    assert [name for name in (*FILES, *TESTS) if not (ROOT / name).exists()] == []
    reasons = [*FILES.values(), *(reason for tests in TESTS.values() for reason in tests.values())]
    named = {name for reason in reasons for name in re.findall(r"test_\w+\.py", reason)}
    assert named - names == set()


def test_each_test_that_is_left_out_is_in_its_file_or_in_a_contract_of_it():
    contracts = "".join(
        path.read_text()
        for folder in ("backends/tests", "testing/seer_testing")
        for path in (ROOT / folder).glob("*.py")
    )
    for file, tests in TESTS.items():
        text = (ROOT / file).read_text() + contracts
        assert [name for name in tests if f"def {name}(" not in text and f"class {name}(" not in text] == []


def test_tests_with_all_their_parameters_are_left_out_and_no_others():
    file = "backends/vllm/tests/test_vllm_tensor_parallel.py"
    assert is_of_the_rest(f"{file}::Ranks::test_a_head_that_both_ranks_have_is_stored_once[a::b]")
    assert not is_of_the_rest(f"{file}::Ranks::test_x")
    assert is_of_the_rest("backends/remote/tests/test_remote_vllm.py::TestVllmServers::test_x")
    assert not is_of_the_rest("tests/test_x.py::test_a_head_that_both_ranks_have_is_stored_once")


def test_files_and_folders_are_not_even_read(run_tests, tmp_path):
    table = '[files]\n"test_left_out.py" = "x"\n"folder/" = "x"\n[tests."test_other.py"]\ntest_b = "x"\n'
    (tmp_path / "rest.toml").write_text(table)
    (tmp_path / "folder").mkdir()
    for name in ("folder/test_in_folder.py", "test_left_out.py"):
        (tmp_path / name).write_text("raise AssertionError('it is read')")
    text = Path(ROOT, "tests/harness/gate.py").read_text()
    files = {"small_gate": text, "test_other": "def test_a(): pass\ndef test_b(): pass"}
    assert "1 passed, 1 deselected" in run_tests([], "-p", "small_gate", "--gate", **files).output
    assert "2 errors" in run_tests([], "-p", "small_gate", **files).output


DRAWS = """
from hypothesis import given, settings, strategies as st
drawn = []

@settings(max_examples=20)
@given(st.integers())
def test_it(number):
    drawn.append(number)

def test_what_was_drawn():
    print("drew", drawn)
"""


def test_examples_are_the_same_in_each_run_of_the_gate_and_others_elsewhere(run_tests, tmp_path):
    (tmp_path / "rest.toml").write_text("[files]\n[tests]\n")
    files = {"small_gate": Path(ROOT, "tests/harness/gate.py").read_text(), "test_draws": DRAWS}

    def drawn(*options):
        run = run_tests([], "-p", "small_gate", "-s", *options, **files)
        return re.search(r"drew (.*)", run.output)[1]

    assert drawn("--gate") == drawn("--gate")
    assert drawn() != drawn()
