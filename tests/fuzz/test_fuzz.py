"""The fuzzers: an input that is changed at random is taken, or refused in one sentence."""

import itertools
from contextlib import closing
from time import monotonic

import pytest

from . import fuzzer
from .targets import TARGETS, Target, Workspace

INPUTS, SLOW_INPUTS = 100, 4


@pytest.fixture(scope="module")
def workspace(tmp_path_factory):
    with closing(Workspace(tmp_path_factory.mktemp("fuzz") / "workspace")) as opened:
        yield opened


def numbers(target, seconds):
    """Yield the numbers of inputs: a few, or with --fuzz-seconds as many as there is time for."""
    if not seconds:
        yield from range(SLOW_INPUTS if target.slow else INPUTS)
        return
    deadline = monotonic() + seconds
    yield from itertools.takewhile(lambda _: monotonic() < deadline, itertools.count())


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_changed_inputs_are_taken_or_refused_in_one_sentence(workspace, target, pytestconfig, tmp_path):
    findings = []

    def found(number, data, kind, story):
        saved = tmp_path / f"{target.name}-{number}.bin"
        saved.write_bytes(data)
        findings.append((number, kind, story, saved))

    option = pytestconfig.getoption
    tried = numbers(target, option("--fuzz-seconds"))
    tally = fuzzer.fuzz(target, workspace, option("--fuzz-seed"), tried, found)
    assert findings == []
    assert tally.taken, "not even the good input was taken"
    assert tally.taken + tally.refused == tally.inputs


def raising(error):
    def attempt(workspace, data):
        raise error

    return Target("broken", lambda workspace: [b"good"], attempt)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (KeyError("secret"), "KeyError at test_fuzz.py"),
        (RecursionError("deep"), "RecursionError"),
        (fuzzer.HangError("slow"), "HangError"),
        (fuzzer.SeerError("a \x1b[2J b"), "control characters"),
        (fuzzer.SeerError("x" * 3000), "many lines or characters"),
        (fuzzer.SeerError(""), "an empty message"),
    ],
)
def test_the_fuzzer_finds_what_no_user_should_see(workspace, error, kind):
    kinds = []
    tally = fuzzer.fuzz(raising(error), workspace, 0, range(3), lambda *finding: kinds.append(finding[2]))
    assert tally.findings.total() == 3
    assert len(kinds) == 1
    assert kind in kinds[0]


def test_the_same_seed_and_number_make_the_same_input(workspace):
    def inputs(seed):
        seen = []
        target = Target("set", TARGETS[1].good, lambda workspace, data: seen.append(data))
        fuzzer.fuzz(target, workspace, seed, range(40), lambda *finding: None)
        return seen

    assert inputs(3) == inputs(3)
    assert inputs(3) != inputs(4)
