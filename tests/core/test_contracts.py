"""Contracts: near misses, wrong arguments and missing members are named; what authors may do passes."""

from typing import Protocol

import pytest
from seer_host.contract_checks import flaw_of

from seer_core.ports.contracts import implemented, optional
from seer_core.ports.policy import Observer, Placer, Prioritizer, Splitter
from seer_core.scheduling.defaults import FirstComeFirstServed, LeastLoaded, WholeRequests


class Watching:
    def observe(self, now, event, commands):
        pass


def having(name, method, base=Watching):
    """Return an object of a class with one method more."""
    return type("Mine", (base,), {name: method})()


def test_a_method_that_is_required_is_missed():
    assert flaw_of(object(), Observer) == "it lacks observe"
    assert flaw_of(object(), Observer) == "it lacks observe"
    assert flaw_of(object(), Prioritizer) == "it lacks __len__, peek, push, take"


def test_a_required_method_that_is_only_inherited_from_the_protocol_is_missed():
    class Mistyped(Placer):
        def plase(self, request, chunk_tokens, instances):
            return instances[0]

    assert flaw_of(Mistyped(), Placer) == "it lacks place; is 'plase' meant for 'place'?"
    assert flaw_of(Mistyped, Placer) == "it lacks place; is 'plase' meant for 'place'?"


def test_a_required_method_under_another_name_is_shown():
    flaw = flaw_of(having("observes", Watching.observe, object), Observer)
    assert flaw == "it lacks observe; is 'observes' meant for 'observe'?"


@pytest.mark.parametrize(
    ("name", "method", "meant"),
    [
        ("complete", lambda self, now, completion: None, "completed"),
        ("on_completed", lambda self, now, completion: None, "completed"),
        ("streaming", lambda self, now, request_id: None, "streamed"),
        ("pool_report", lambda self, now, stats: None, "pool_reported"),
        ("starts", lambda self: None, "start"),
    ],
)
def test_a_near_miss_of_an_optional_method_is_refused(name, method, meant):
    assert flaw_of(having(name, method), Observer) == (
        f"its method {name!r} would never be called; rename it to {meant!r}, or begin its name with an"
        " underscore if that is not meant"
    )


@pytest.mark.parametrize(
    ("base", "protocol", "name", "meant"),
    [
        (WholeRequests, Splitter, "explains", "explain"),
        (WholeRequests, Splitter, "instance_start", "instance_started"),
        (FirstComeFirstServed, Prioritizer, "group_change", "group_changed"),
        (FirstComeFirstServed, Prioritizer, "ticks", "tick"),
        (LeastLoaded, Placer, "on_tick", "tick"),
        (LeastLoaded, Placer, "instances_changed", "instance_changed"),
    ],
)
def test_deriving_from_the_protocol_does_not_hide_a_near_miss(base, protocol, name, meant):
    flaw = flaw_of(having(name, lambda self, *given: None, base), protocol)
    assert flaw.startswith(f"its method {name!r} would never be called; rename it to {meant!r}")


@pytest.mark.parametrize(
    "name", ["state", "store", "status", "report", "reset", "summary", "chunks", "_complete"]
)
def test_helpers_with_names_of_their_own_pass(name):
    assert flaw_of(having(name, lambda self: None), Observer) is None


def test_a_near_miss_beside_the_method_itself_is_a_helper():
    class Mine(Watching):
        def completed(self, now, completion):
            self.complete(completion)

        def complete(self, completion):
            pass

    assert flaw_of(Mine(), Observer) is None


@pytest.mark.parametrize(
    ("name", "method", "given"),
    [
        ("completed", lambda self, completion: None, "now, completion"),
        ("completed", lambda self, now, completion, more: None, "now, completion"),
        ("start", lambda self, runtime: None, "no argument"),
        ("observe", lambda self, event: None, "now, event, commands"),
    ],
)
def test_a_method_with_other_arguments_is_refused(name, method, given):
    flaw = flaw_of(having(name, method), Observer)
    assert flaw.startswith(f"its method {name!r} cannot be called with {given}: ")


def test_arguments_of_other_names_defaults_and_stars_pass():
    class Mine(LeastLoaded):
        def place(self, chunk, /, length, living, why="", *more, **others):
            return super().place(chunk, length, living)

        def tick(self, *given):
            pass

    assert flaw_of(Mine(), Placer) is None


def test_an_async_method_that_is_never_awaited_is_refused():
    class Mine(LeastLoaded):
        async def tick(self, now):
            pass

    assert flaw_of(Mine(), Placer) == (
        "its method 'tick' is async, and would never be awaited; make it a plain one"
    )


def test_what_is_no_method_is_refused():
    class Mine(Watching):
        completed = 3

    assert flaw_of(Mine(), Observer) == "its 'completed' is no method"


class Store(Protocol):
    """A contract with an attribute, of which classes are checked."""

    size: int

    def find(self, key: bytes) -> int: ...

    @optional
    def note(self) -> int:
        """Return nothing."""
        return 0


def test_a_class_is_checked_without_what_only_its_objects_have():
    class Mine:
        def __init__(self):
            self.size = 1

        def find(self, key):
            return 1

    class Narrow(Mine):
        def find(self):
            return 1

    class Static(Mine):
        @staticmethod
        def find(key):
            return 1

    assert flaw_of(Mine, Store) is None
    assert flaw_of(Mine(), Store) is None
    assert flaw_of(Static, Store) is None
    assert flaw_of(Narrow, Store).startswith("its method 'find' cannot be called with key: ")
    assert flaw_of(int, Store) == "it lacks find"


def test_implemented_is_what_the_author_wrote():
    class Mine(LeastLoaded):
        def tick(self, now):
            return now

    assert implemented(Mine(), "tick")(3) == 3
    assert implemented(Mine(), "group_over") is None
    assert implemented(object(), "tick") is None
