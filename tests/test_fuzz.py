"""The fuzzers, for a moment each: what is changed at random is taken, or refused in one sentence."""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))
import fuzz  # noqa: E402
from fuzz_targets import TARGETS, Desk, Target  # noqa: E402

sys.path.pop(0)

INPUTS, SLOW_INPUTS = 100, 4


@pytest.fixture(scope="module")
def desk(tmp_path_factory):
    return Desk(tmp_path_factory.mktemp("fuzz") / "desk")


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_changed_inputs_are_taken_or_refused_in_one_sentence(desk, target):
    findings = []

    def found(number, data, kind, story):
        findings.append((number, kind, story, data[:200]))

    tally = fuzz.fuzz(target, desk, 11, range(SLOW_INPUTS if target.slow else INPUTS), found)
    assert findings == []
    assert tally.taken, "not even the good input was taken"
    assert tally.taken + tally.refused == tally.inputs


def raising(error):
    def attempt(desk, data):
        raise error

    return Target("broken", lambda desk: [b"good"], attempt)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (KeyError("secret"), "KeyError at test_fuzz.py"),
        (RecursionError("deep"), "RecursionError"),
        (fuzz.HangError("slow"), "HangError"),
        (fuzz.SeerError("a \x1b[2J b"), "control characters"),
        (fuzz.SeerError("x" * 3000), "many lines or characters"),
        (fuzz.SeerError(""), "an empty message"),
    ],
)
def test_the_fuzzer_finds_what_no_user_should_see(desk, error, kind):
    kinds = []
    tally = fuzz.fuzz(raising(error), desk, 0, range(3), lambda *finding: kinds.append(finding[2]))
    assert tally.findings.total() == 3
    assert len(kinds) == 1
    assert kind in kinds[0]


def test_the_same_seed_and_number_make_the_same_input(desk):
    def inputs(seed):
        seen = []
        target = Target("set", TARGETS[1].good, lambda desk, data: seen.append(data))
        fuzz.fuzz(target, desk, seed, range(40), lambda *finding: None)
        return seen

    assert inputs(3) == inputs(3)
    assert inputs(3) != inputs(4)
