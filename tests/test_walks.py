"""The page of walks lists the files through which things pass, as far as a simulated rollout shows it."""

import importlib.util
import subprocess
import sys
from importlib.machinery import SourceFileLoader
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "scripts" / "walks"


@pytest.fixture(scope="module")
def walks():
    loader = SourceFileLoader("walks", str(SCRIPT))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader("walks", loader))
    before, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    loader.exec_module(module)
    sys.dont_write_bytecode = before
    return module


@pytest.fixture(scope="module")
def listed(walks):
    return walks.listed(walks.PAGE.read_text("utf-8"))


def test_each_listed_file_exists(listed):
    paths = {path for files in listed.values() for path in files}
    assert {path for path in paths if not (ROOT / path).is_file()} == set()


def test_the_numbers_of_the_page_are_those_of_its_lists(walks, listed):
    headings = [line for line in walks.PAGE.read_text("utf-8").splitlines() if line.startswith("## ")]
    for heading, files in zip(headings, listed.values(), strict=False):
        assert heading.endswith(f": {len(files)} files")


def test_the_page_lists_what_a_simulated_rollout_and_update_pass():
    done = subprocess.run([sys.executable, SCRIPT, "sim", "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_walk_of_which_nothing_was_seen_is_a_difference(walks, listed):
    """As where a function that begins it has another name by now."""
    nothing = {walk: {} for walk in walks.WALKS}
    assert walks.differences("sim", nothing, listed) == [
        "prompt: nothing was seen of it; do the functions that begin it have other names?",
        "weights: nothing was seen of it; do the functions that begin it have other names?",
    ]
    assert len(walks.differences("vllm", nothing, listed)) == 3
    assert walks.differences("vllm", {"draft": {}}, listed)[0].startswith("draft: nothing was seen of it")
