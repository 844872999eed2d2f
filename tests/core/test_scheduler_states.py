"""The drawing of a request's states, docs/pictures/scheduler-states.svg, beside what the code does."""

import inspect
from collections import defaultdict
from pathlib import Path
from xml.etree import ElementTree

from seer_core.errors import TransitionError
from seer_core.model import GroupContext, InstanceInfo, RequestState
from seer_core.model.events import (
    ChunkFailed,
    ChunkFinished,
    Dispatch,
    EnvironmentAnswered,
    EnvironmentFailed,
    GroupSpec,
    GroupsSubmitted,
    InstanceDegraded,
    InstanceFailed,
    InstanceLeaving,
    InstanceLimited,
    InstanceLost,
    InstanceReported,
    InstanceStarted,
    InstanceStopped,
    InstanceWaiting,
    RequestsAborted,
    ResumedResponse,
    RolloutPaused,
    RolloutResumed,
)
from seer_core.scheduling.buffer import RequestBuffer
from seer_core.scheduling.scheduler import CORE, Policies, Scheduler, Slot

DRAWING = Path(__file__).parents[2] / "docs/pictures/scheduler-states.svg"
SVG = "{http://www.w3.org/2000/svg}"
INFO = InstanceInfo("a", 1024, 16, 8, 1024)
LEFT = (ResumedResponse(5, acting=True), ResumedResponse(5, "stop"), ResumedResponse(5))
SPECS = (GroupSpec("t", 10, 3, 100, resumed=LEFT, turns=True), GroupSpec("g", 10, 4, 100))
"""One with an environment, which works on its first request while the last runs, and one of which two run."""
ARGUMENTS = {"instance_id": "a", "chunk_tokens": 40, "kv_tokens": 64, "tokens": 1}
EVENTS = [
    GroupsSubmitted((GroupSpec("h", 10, 2, 100, resumed=(ResumedResponse(5, "stop"), ResumedResponse(3))),)),
    GroupsSubmitted((GroupSpec("h", 10, 1, 100, resumed=(ResumedResponse(5, acting=True),), turns=True),)),
    InstanceStarted(InstanceInfo("c", 1024, 16, 8, 1024)),
    InstanceLeaving("a", "drained"),
    InstanceLimited("a", 1),
    InstanceStopped("a"),
    InstanceLost("a", "killed"),
    InstanceFailed("c", "killed"),
    InstanceWaiting("c", "1 GPU"),
    InstanceReported("a", 1, 0, 0.5),
    InstanceDegraded("a", "kv_pool", "no server"),
    ChunkFinished("g/0", "a", 40, stopped=True),
    ChunkFinished("g/0", "a", 40, stopped=False),
    ChunkFinished("t/2", "a", 40, stopped=True),
    ChunkFailed("g/0", "a", "no memory"),
    EnvironmentAnswered("t/0", 3, done=False),
    EnvironmentAnswered("t/0", 3, done=True),
    EnvironmentFailed("t/0", "no network"),
    RequestsAborted(("g/0", "g/2", "t/0")),
    RolloutPaused(),
    RolloutResumed(),
]


def edges():
    """Yield each arrow of the drawing: state before, state after, method, events."""
    for edge in ElementTree.parse(DRAWING).getroot().findall(f"{SVG}g[@class='edge']"):
        words = {
            kind: [span.text for span in edge.iter(f"{SVG}tspan") if span.get("class") == kind]
            for kind in ("method", "event")
        }
        (method,) = words["method"]
        yield edge.get("data-from"), edge.get("data-to"), method, words["event"]


def request_in(state):
    """Return a buffer, and a request that it has brought to this state."""
    buffer = RequestBuffer()
    (request,) = buffer.add_group(GroupContext("g", 0, 1, 10, 100, left=1))
    if state is RequestState.RUNNING:
        buffer.run(request, "a", 40, 64)
    if state is RequestState.ACTING:
        buffer.act(request)
    if state is RequestState.FINISHED:
        buffer.finish(request)
    assert request.state is state
    return buffer, request


def transitions_of_the_buffer():
    """Call every public method of the buffer that takes a request, or an instance, in every state."""
    (request,) = RequestBuffer().add_group(GroupContext("g", 0, 1, 10, 100, left=1))
    found = {(None, request.state.value, "add_group")}
    for name, method in inspect.getmembers(RequestBuffer, inspect.isfunction):
        names = [each for each in inspect.signature(method).parameters if each != "self"]
        if name.startswith("_") or not {"request", "instance_id"} & {*names}:
            continue
        for before in RequestState:
            buffer, request = request_in(before)
            try:
                method(buffer, *(request if each == "request" else ARGUMENTS[each] for each in names))
            except TransitionError:
                continue
            if request.state is not before:
                found.add((before.value, request.state.value, name))
    return found


class Gate:
    """A placer with room for so many more chunks, on the instance that started first."""

    room = 3

    def place(self, request, chunk_tokens, instances):
        self.room -= 1
        return instances[0] if self.room >= 0 else None


def methods_called(event, max_failures, monkeypatch):
    """Return the buffer's methods that change a state when this event comes while requests run and wait."""
    gate = Gate()
    scheduler = Scheduler(Policies(placer=Slot("placer", CORE, gate)), max_failures)
    for each in (InstanceStarted(INFO), InstanceStarted(InstanceInfo("b", 1024, 16, 8, 1024))):
        scheduler.handle(each, 0.0)
    commands = scheduler.handle(GroupsSubmitted(SPECS), 0.0)
    assert [each.request_id for each in commands if type(each) is Dispatch] == ["t/2", "g/0", "g/1"]
    called, inside = set(), []
    for name in {method for _, _, method, _ in edges()}:
        method = getattr(scheduler.buffer, name)

        def spy(*arguments, _name=name, _method=method, **more):
            if not inside:  # a method that another one calls is that one's doing
                called.add(_name)
            inside.append(_name)
            try:
                return _method(*arguments, **more)
            finally:
                inside.pop()

        monkeypatch.setattr(scheduler.buffer, name, spy)
    gate.room = 1
    scheduler.handle(event, 1.0)
    return called


def test_the_drawing_has_the_states_of_a_request():
    drawn = [g.get("id") for g in ElementTree.parse(DRAWING).getroot().findall(f"{SVG}g[@class='state']")]
    assert drawn == [state.value for state in RequestState]


def test_the_drawing_has_the_transitions_that_the_buffer_allows_and_no_other():
    assert {edge[:3] for edge in edges()} == transitions_of_the_buffer()


def test_the_drawing_names_the_events_of_each_transition(monkeypatch):
    assert {type(event) for event in EVENTS} == set(Scheduler()._handlers)
    found = defaultdict(set)
    for event in EVENTS:
        for max_failures in (0, 3):
            for method in methods_called(event, max_failures, monkeypatch):
                found[method].add(type(event).__name__)
    if found["run"] == {type(event).__name__ for event in EVENTS} - {"RolloutPaused"}:
        found["run"] = {"any event"}
    assert {method: set(events) for _, _, method, events in edges()} == found
