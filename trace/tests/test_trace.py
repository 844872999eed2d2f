import random

import pytest
from seer_context_sched import ContextAware
from seer_divided_rollout import Chunks, KvAware
from seer_host.contract_checks import flaw_of
from seer_testing.harness import SchedulerHarness
from seer_trace.records import TraceRecord, TraceWriter, read_trace, replay

from seer_core.errors import OutputError, SeerError
from seer_core.model import InstanceInfo
from seer_core.model.events import (
    Abort,
    AskEnvironment,
    ChunkFailed,
    ChunkFinished,
    Complete,
    Dispatch,
    EnvironmentAnswered,
    EnvironmentFailed,
    GroupSpec,
    GroupsSubmitted,
    InstanceDegraded,
    InstanceFailed,
    InstanceLimited,
    InstanceLost,
    InstanceReported,
    InstanceStarted,
    InstanceStopped,
    RequestsAborted,
)
from seer_core.ports.policy import Observer
from seer_core.scheduling.scheduler import Policies, Scheduler, Slot


def make_scheduler(chunk_tokens=16, stay=0.25):
    return Scheduler(
        Policies(
            Slot("splitter", "divided_rollout", Chunks(chunk_tokens)),
            Slot("prioritizer", "context_sched", ContextAware()),
            Slot("placer", "divided_rollout", KvAware(stay)),
        )
    )


@pytest.fixture
def trace(tmp_path):
    """The trace of a random rollout in which everything happens."""
    path = tmp_path / "trace.jsonl"
    writer = TraceWriter(path)
    rig = SchedulerHarness(make_scheduler().policies, max_failures=0)
    now = 0.0

    def handle(event, _now, decide=rig.scheduler.handle):
        nonlocal now
        now += 0.1
        commands = decide(event, now)
        writer.observe(now, event, commands)
        return commands

    rig.scheduler.handle = handle
    rng = random.Random(0)
    for name in "abc":
        rig.start(name, kv=256, block=16, slots=4)
    rig.submit(*(GroupSpec(f"g{k}", 10, 4, rng.randint(1, 100), (1, 2, 3, 4)) for k in range(10)))
    rig.group("t", n=4, turns=True)
    for step in range(60):
        request_id = rng.choice(list(rig.in_flight))
        rig.finish(request_id, stopped=rng.random() < 0.2)
        if step % 20 == 10:
            rig.lose("a")
            rig.abort(next(iter(rig.in_flight)))
            rig.fail(next(iter(rig.in_flight)))
            rig.start("a", kv=512, block=16, slots=4)
            rig.start("d", kv=512, block=16, slots=4)
            rig.lose("d")
            rig.handle(InstanceFailed("d", "a test took it"))
            rig.handle(InstanceReported("b", 1, 0, 0.25))
            rig.handle(InstanceDegraded("b", "drafting", "no server", "b.log"))
            rig.handle(InstanceLimited("b", 1 + step % 3, "a test"))
    while any(request_id.startswith("t/") for request_id in rig.generated.keys() - rig.completed.keys()):
        asked = [request_id for request_id in rig.in_flight if request_id.startswith("t/")]
        request_id = asked[0] if asked else next(iter(rig.in_flight))
        rig.finish(request_id, stopped=bool(asked))
        for request_id in sorted(rig.acting):
            if len(rig.completed) % 2:
                rig.fail_environment(request_id)
            else:
                rig.answer(request_id, 0, done=True)
    rig.finish_all()
    rig.stop("a")
    writer.close()
    return path


def test_a_trace_replays_to_identical_commands(trace):
    assert replay(trace, make_scheduler_without_retries()) == len(trace.read_text().splitlines())


def make_scheduler_without_retries(**settings):
    return Scheduler(make_scheduler(**settings).policies, max_failures=0)


def test_everything_happens_in_that_trace(trace):
    records = list(read_trace(trace))
    assert {type(record.event) for record in records} == {
        GroupsSubmitted,
        InstanceStarted,
        InstanceStopped,
        InstanceLost,
        InstanceFailed,
        InstanceReported,
        InstanceDegraded,
        InstanceLimited,
        ChunkFinished,
        ChunkFailed,
        EnvironmentAnswered,
        EnvironmentFailed,
        RequestsAborted,
    }
    commands = {type(command) for record in records for command in record.commands}
    assert commands == {Dispatch, Complete, AskEnvironment, Abort}
    assert [record.now for record in records] == sorted(record.now for record in records)


@pytest.mark.parametrize("changed", [{"chunk_tokens": 15}, {"stay": 0.0}])
def test_a_changed_policy_is_detected(trace, changed):
    with pytest.raises(SeerError, match=r"replay differs at record \d+, \w+ at \d+\.\d+ s: recorded"):
        replay(trace, make_scheduler_without_retries(**changed))


def test_the_first_difference_is_shown_with_both_decisions(tmp_path):
    path = tmp_path / "trace.jsonl"
    writer = TraceWriter(path)
    event = InstanceStarted(InstanceInfo("a", 100, 1, 1, 100))
    writer.observe(1.5, event, [Complete("g/0", "stop")])
    writer.close()
    with pytest.raises(SeerError) as error:
        replay(path, Scheduler())
    assert str(error.value) == (
        "replay differs at record 1, InstanceStarted at 1.500000 s:"
        " recorded [Complete(request_id='g/0', finish_reason='stop')], now []"
    )


def test_a_record_survives_the_file_as_it_was(tmp_path):
    path = tmp_path / "trace.jsonl"
    event = GroupsSubmitted((GroupSpec("ü", 3, 2, 5, (1, 2)), GroupSpec("h", 3, 2, 5)))
    commands = [Dispatch("ü/0", "a", 5, 16, migrated=False), Abort("h/0", "a")]
    writer = TraceWriter(path)
    assert flaw_of(writer, Observer) is None
    writer.observe(0.1 + 0.2, event, commands)
    writer.close()
    assert list(read_trace(path)) == [TraceRecord(0.1 + 0.2, event, commands)]


def test_a_closed_trace_that_is_shown_events_says_when_to_close_it(tmp_path):
    path = tmp_path / "trace.jsonl"
    writer = TraceWriter(path)
    writer.close()
    with pytest.raises(OutputError, match=r"the trace .*trace\.jsonl is closed, .*; close it when"):
        writer.observe(0.0, RequestsAborted(()), [])


@pytest.mark.parametrize(
    "line", ["no json", '{"now":1.0}', '{"now":1.0,"event":{"type":"X"},"commands":[]}', ""]
)
def test_a_line_that_is_no_record_is_named(trace, line):
    lines = trace.read_text().splitlines()
    trace.write_text("\n".join([lines[0], line, *lines[1:]]))
    with pytest.raises(SeerError, match=r"trace\.jsonl:2: not a trace record"):
        list(read_trace(trace))


def test_an_empty_trace_replays_to_nothing(tmp_path):
    path = tmp_path / "trace.jsonl"
    TraceWriter(path).close()
    assert replay(path, Scheduler()) == 0
