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
    contracts = "".join(path.read_text() for path in (ROOT / "backends/tests").glob("*.py"))
    for file, tests in TESTS.items():
        text = (ROOT / file).read_text() + contracts
        assert [name for name in tests if f"def {name}(" not in text] == []


def test_files_folders_and_tests_with_their_parameters_are_left_out_and_no_others():
    assert is_of_the_rest("tests/soak/test_faults.py::test_x[1]")
    assert is_of_the_rest("tests/test_packages.py::test_x")
    assert is_of_the_rest(
        "backends/vllm/tests/test_vllm_tensor_parallel.py::Ranks::test_a_head_that_both_ranks_have_is_stored_once"
    )
    assert not is_of_the_rest("tests/cli/test_resume.py::test_x")
    assert not is_of_the_rest("backends/vllm/tests/test_vllm_tensor_parallel.py::Ranks::test_x[tests/soak/]")


def test_the_option_leaves_them_out_and_counts_them(run_tests, tmp_path):
    (tmp_path / "rest.toml").write_text('[files]\n"test_left_out.py" = "test_other.py"\n[tests]\n')
    text = Path(ROOT, "tests/harness/gate.py").read_text()
    files = {"small_gate": text, "test_left_out": "def test_x(): pass", "test_other": "def test_y(): pass"}
    run = run_tests([], "-p", "small_gate", "--gate", **files)
    assert "1 passed, 1 deselected" in run.output
    assert "2 passed" in run_tests([], "-p", "small_gate", **files).output
