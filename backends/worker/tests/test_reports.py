"""When a worker reports its load, on a clock that the tests move."""

from importlib import import_module
from pathlib import Path

import attrs
import pytest
from seer_worker.process.worker import REPORT_INTERVAL_S, Worker
from seer_worker.wire import AbortChunk, Degraded, Finished, Start, Submit, Telemetry

from seer_core.model import Sampling
from seer_core.ports.engine import ChunkJob

STEPS = 5
"""Steps that take as long as there is between two reports."""


@attrs.define(eq=False)
class Rig:
    """A worker of a toy, and what it has sent by step."""

    worker: Worker
    sent: list

    def step(self):
        """Make a step; return the loads that it reported, and how many chunks it ended."""
        self.sent.clear()
        self.worker.step()
        loads = [each.running for each in self.sent if isinstance(each, Telemetry)]
        return loads, sum(isinstance(each, Finished) for each in self.sent)

    def submit(self, *lengths):
        for number, tokens in enumerate(lengths):
            name = f"j{number}"
            job = ChunkJob(name, name, "g", [1, 2, 3], 3, tokens, Sampling(), 5, 0)
            self.worker.handle(Submit(job))


@pytest.fixture
def rig(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    sent, now_s = [], 0.0

    def clock():
        nonlocal now_s
        now_s += 0.501 * REPORT_INTERVAL_S / STEPS  # asked before a step and after it
        return now_s

    start = Start("", "toy", {}, str(tmp_path))
    toy = import_module("toys").Toy(start)
    return Rig(Worker(lambda *messages: sent.extend(messages), toy, start, clock), sent)


def test_load_is_reported_while_busy_and_once_more_when_idle(rig):
    rig.submit(*[2 * STEPS + 1] * 8)
    reports = [rig.step() for _ in range(2 * STEPS + 1)]
    quiet = [([], 0)] * (STEPS - 1)
    assert reports == [([8], 0), *quiet, ([8], 0), *quiet, ([0], 8)]
    assert not rig.worker.busy


def test_a_worker_that_falls_idle_reports_that_before_the_next_report_is_due(rig):
    rig.submit(2, 3)
    assert [rig.step() for _ in range(3)] == [([2], 0), ([], 1), ([0], 1)]


def test_a_worker_that_falls_idle_by_an_abort_reports_that_and_what_has_failed(rig):
    rig.submit(9, 9)
    assert rig.step() == ([2], 0)
    rig.worker.adapter.reports.append(Degraded("drafting", "no idea"))
    rig.sent.clear()
    rig.worker.handle(AbortChunk("j0"))
    assert not rig.sent
    rig.worker.handle(AbortChunk("j1"))
    assert [type(each) for each in rig.sent] == [Degraded, Telemetry]
    assert rig.sent[1].running == 0


def test_the_next_report_of_a_busy_worker_comes_no_sooner_than_the_interval_after_an_idle_one(rig):
    rig.submit(1)
    assert rig.step() == ([0], 1)
    rig.submit(2 * STEPS)
    assert [rig.step()[0] for _ in range(STEPS)] == [[]] * (STEPS - 1) + [[1]]
