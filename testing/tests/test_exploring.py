"""Contracts with fresh randomness: what fails is found, and the command that is printed finds it again."""

import subprocess
import sys

FRAGILE = """
from seer_core.scheduling.defaults import FirstComeFirstServed
from seer_testing import PrioritizerContract
from seer_testing.support import seeded_random


class TestFragile(PrioritizerContract):
    def make(self):
        return FirstComeFirstServed()

    def test_it_is_drawn(self):
        drawn = seeded_random().random()
        assert drawn < {limit}, f"drew {{drawn}}"
"""


def explored(tmp_path, limit, *arguments):
    path = tmp_path / "test_fragile.py"
    path.write_text(FRAGILE.format(limit=limit))
    command = [sys.executable, "-m", "seer_testing", *arguments, "-p", "no:cacheprovider", str(path)]
    return subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)


def test_a_run_for_longer_draws_afresh_in_every_round(tmp_path):
    done = explored(tmp_path, 1.0, "--seconds", "4", "-k", "drawn or rollouts")
    assert done.returncode == 0, done.stdout + done.stderr
    *rounds, last = done.stdout.splitlines()
    assert len({line.partition(":")[0] for line in rounds}) == len(rounds) >= 1
    assert all("2 passed" in line for line in rounds)
    assert last.startswith(f"{len(rounds)} rounds, seeds ")


def test_a_failure_is_printed_with_the_command_that_repeats_it(tmp_path):
    done = explored(tmp_path, 0.0, "--seed", "7", "-k", "drawn")
    assert done.returncode == 1
    *_, again = done.stdout.splitlines()
    assert again.startswith("again: SEER_CONTRACT_SEED=7 python -m pytest -x -q --hypothesis-seed=7 ")
    told = again.removeprefix("again: ").replace(" python ", f" {sys.executable} ", 1)
    repeated = subprocess.run(told, shell=True, capture_output=True, text=True, cwd=tmp_path)
    assert repeated.returncode == 1
    [drew] = {line for line in done.stdout.splitlines() if line.startswith("E       AssertionError: drew")}
    assert drew in repeated.stdout


def test_seeds_differ_in_what_they_draw_and_no_seed_draws_always_the_same(tmp_path, monkeypatch):
    from seer_testing.support import VARIABLE, is_exploring, seeded_random

    monkeypatch.delenv(VARIABLE, raising=False)
    assert not is_exploring()
    assert seeded_random().random() == seeded_random().random()
    drawn = set()
    for seed in ("1", "2"):
        monkeypatch.setenv(VARIABLE, seed)
        assert is_exploring()
        drawn.add(seeded_random().random())
    assert len(drawn) == 2
