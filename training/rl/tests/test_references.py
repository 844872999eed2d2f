"""Functions that a config names, in files and packages."""

import math

import pytest
from seer_rl.references import resolve

from seer_core.errors import ConfigError


def test_a_function_of_a_file_may_import_the_file_s_neighbours(tmp_path):
    (tmp_path / "neighbour_of_reward.py").write_text("VALUE = 3\n")
    (tmp_path / "reward.py").write_text(
        "from neighbour_of_reward import VALUE\ndef reward():\n    return VALUE\n"
    )
    assert resolve("[train].reward", "reward.py:reward", tmp_path)() == 3


def test_files_of_one_name_in_two_directories_do_not_meet(tmp_path):
    found = []
    for value in (1, 2):
        folder = tmp_path / str(value)
        folder.mkdir()
        (folder / "same.py").write_text(f"def value():\n    return {value}\n")
        found.append(resolve("[train].reward", "same.py:value", folder)())
    assert found == [1, 2]


def test_a_function_of_a_package_is_imported_by_its_name(tmp_path):
    assert resolve("[train].reward", "math:sqrt", tmp_path) is math.sqrt


@pytest.mark.parametrize(
    ("reference", "match"),
    [
        ("reward", "'reward' names no function; write FILE.py:FUNCTION"),
        ("gone.py:reward", r"names the file .*gone\.py, which is not there"),
        ("math:squirt", "'math:squirt' cannot be imported: AttributeError"),
        ("no_such_package:f", "cannot be imported: ModuleNotFoundError"),
        ("math:pi", "'math:pi' is no function"),
    ],
)
def test_a_reference_that_leads_nowhere_is_refused_by_the_name_of_its_setting(tmp_path, reference, match):
    with pytest.raises(ConfigError, match=rf"\[train\]\.reward: .*{match}|{match}"):
        resolve("[train].reward", reference, tmp_path)
