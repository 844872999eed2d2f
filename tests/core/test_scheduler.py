from __future__ import annotations

import copy

import attrs
import pytest
from seer_session.guard import guarded_policies

from seer_core.errors import ConfigError, PluginError, PromptError, StalledError, TransitionError
from seer_core.model import InstanceInfo, InstanceStatus, Request
from seer_core.model.events import (
    Abort,
    ChunkFailed,
    ChunkFinished,
    Complete,
    Dispatch,
    EndChunk,
    GroupSpec,
    GroupsSubmitted,
    InstanceLost,
    InstanceReported,
    InstanceStarted,
    RequestsAborted,
)
from seer_core.ports.policy import Placement
from seer_core.scheduling.defaults import FirstComeFirstServed, LeastLoaded, WholeRequests
from seer_core.scheduling.scheduler import Policies, Scheduler, Slot


class Pieces:
    """Splitter of a fixed size, for want of a plug-in."""

    def __init__(self, tokens):
        self.tokens = tokens

    def split(self, request):
        return min(self.tokens, request.remaining_tokens)


def policies(**strategies):
    """The defaults, with some slots filled by a plug-in called 'mine'."""
    slots = {name: Slot(name, "mine", strategy) for name, strategy in strategies.items()}
    return attrs.evolve(Policies(), **slots)


def sent(commands):
    return [(command.request_id, command.instance_id) for command in commands if type(command) is Dispatch]


# With no plug-in.


def test_requests_are_served_in_order_of_arrival(make_rig):
    rig = make_rig()
    rig.start("a", slots=1)
    rig.submit(GroupSpec("g", 10, 2, 100), GroupSpec("h", 10, 1, 100))
    order = []
    while rig.in_flight:
        order += rig.in_flight
        rig.finish(order[-1])
    assert order == ["g/0", "g/1", "h/0"]


def test_a_request_runs_whole(rig):
    rig.start("a")
    (dispatch,) = rig.group("g", max_tokens=77, prompt=5)
    assert dispatch == Dispatch("g/0", "a", 77, 82, migrated=False)


def test_a_response_that_engines_cannot_go_on_with_is_not_divided(make_rig):
    rig = make_rig(policies(splitter=Pieces(10)))
    rig.start("a")
    commands = rig.submit(GroupSpec("g", 5, 1, 77, whole=True), GroupSpec("h", 5, 1, 77))
    assert [command.max_tokens for command in commands] == [77, 10]


def test_a_request_that_stopped_early_completes_with_reason_stop(rig):
    rig.start("a")
    rig.group("g")
    assert rig.finish("g/0", 3, stopped=True) == [Complete("g/0", "stop")]


def test_a_request_that_used_all_its_tokens_completes_with_reason_length(rig):
    rig.start("a")
    rig.group("g")
    assert rig.finish("g/0") == [Complete("g/0", "length")]


def test_a_stop_on_the_very_last_token_is_a_stop(rig):
    rig.start("a")
    rig.group("g")
    assert rig.finish("g/0", 100, stopped=True) == [Complete("g/0", "stop")]


def test_an_empty_response_is_a_response(rig):
    rig.start("a")
    rig.group("g")
    assert rig.finish("g/0", 0, stopped=True) == [Complete("g/0", "stop")]


def test_a_chunk_that_the_engine_cut_short_goes_on(rig):
    rig.start("a")
    rig.group("g")
    assert rig.finish("g/0", 30) == [Dispatch("g/0", "a", 70, 110, migrated=False)]


def test_the_least_loaded_instance_is_chosen_and_ties_go_to_the_oldest(rig):
    rig.start("a")
    rig.start("b")
    assert sent(rig.group("g", n=3)) == [("g/0", "a"), ("g/1", "b"), ("g/2", "a")]


def test_an_instance_gets_no_more_requests_than_it_has_slots(rig):
    rig.start("a", slots=2)
    rig.group("g", n=3)
    assert list(rig.in_flight) == ["g/0", "g/1"]


def test_a_full_instance_does_not_hide_one_with_a_free_slot(rig):
    rig.start("a", slots=1)
    rig.start("b", slots=2)
    assert sent(rig.group("g", n=3)) == [("g/0", "a"), ("g/1", "b"), ("g/2", "b")]


def test_nothing_is_dispatched_before_an_instance_has_started(rig):
    assert rig.group("g") == []
    assert sent(rig.start("a")) == [("g/0", "a")]


def test_all_groups_of_one_event_are_known_before_any_request_runs():
    seen = []

    class Watching(FirstComeFirstServed):
        def peek(self):
            seen.append(len(self))
            return super().peek()

    scheduler = Scheduler(policies(prioritizer=Watching()))
    scheduler.handle(InstanceStarted(InstanceInfo("a", 1000, 1, 1, 1000)), 0.0)
    seen.clear()
    scheduler.handle(GroupsSubmitted((GroupSpec("g", 10, 2, 100), GroupSpec("h", 10, 3, 100))), 0.0)
    assert seen[0] == 5


# Chunks and their accounts.


def test_a_chunk_is_the_smaller_of_the_piece_and_what_is_left(make_rig):
    rig = make_rig(policies(splitter=Pieces(40)))
    rig.start("a")
    sizes = [rig.group("g", max_tokens=100)[0].max_tokens]
    for _ in range(2):
        sizes.append(rig.finish("g/0")[-1].max_tokens)
    assert sizes == [40, 40, 20]
    assert rig.finish("g/0") == [Complete("g/0", "length")]


def test_a_request_between_chunks_keeps_its_first_place(make_rig):
    rig = make_rig(policies(splitter=Pieces(40)))
    rig.start("a", slots=1)
    rig.group("g", n=2)
    assert sent(rig.finish("g/0")) == [("g/0", "a")]


def test_a_reservation_is_the_whole_chunk_in_whole_blocks(rig):
    rig.start("a", block=16, kv=160)
    (dispatch,) = rig.group("g", max_tokens=20, prompt=13)
    assert dispatch.kv_tokens == 48
    assert rig.scheduler.instances["a"].free_kv_tokens == 112


def test_siblings_reserve_their_prompt_once_where_it_is_shared(rig):
    rig.start("a", block=16, kv=320, shares_prompts=True)
    status = rig.scheduler.instances["a"]
    # Of 33 tokens 32 in two blocks are shared; each has the last one and 20 more in two blocks of its own.
    dispatches = rig.group("g", n=3, max_tokens=20, prompt=33)
    assert [dispatch.kv_tokens for dispatch in dispatches] == [64] * 3
    free = [status.free_kv_tokens]
    for index, end in enumerate((rig.finish, rig.fail, rig.abort)):
        end(f"g/{index}")
        free.append(status.free_kv_tokens)
    assert free == [192, 224, 224, 256]
    rig.finish_all()
    assert status.free_kv_tokens == 320


def test_siblings_reserve_their_prompt_each_where_it_is_not_shared(rig):
    rig.start("a", block=16, kv=320)
    rig.group("g", n=3, max_tokens=20, prompt=33)
    assert rig.scheduler.instances["a"].free_kv_tokens == 320 - 3 * 64


def test_a_lost_instance_takes_its_prompts_with_it(rig):
    rig.start("a", block=16, kv=320, shares_prompts=True)
    rig.group("g", n=3, max_tokens=20, prompt=33)
    rig.lose("a")
    assert all(request.group.in_flight == {} for request in rig.scheduler.buffer)
    rig.start("a", block=16, kv=320, shares_prompts=True)
    assert rig.scheduler.instances["a"].free_kv_tokens == 192


def test_reservations_balance_to_zero(make_rig):
    rig = make_rig(policies(splitter=Pieces(7)))
    rig.start("a", block=16, kv=512)
    rig.start("b", block=4, kv=512)
    rig.group("g", n=5, max_tokens=33)
    rig.finish_all()
    assert [(status.running, status.reserved_kv_tokens) for status in rig.scheduler.instances.values()] == [
        (0, 0),
        (0, 0),
    ]
    assert len(rig.scheduler.buffer) == len(rig.scheduler.contexts) == 0


def test_a_request_that_moves_says_so(make_rig):
    class Alternate:
        def instance_changed(self, instance): ...
        def instance_lost(self, instance): ...
        def place(self, request, chunk_tokens, instances):
            return instances[request.chunks % 2]

    rig = make_rig(policies(splitter=Pieces(10), placer=Alternate()))
    rig.start("a")
    rig.start("b")
    assert rig.group("g")[0].migrated is False
    (dispatch,) = rig.finish("g/0")
    assert (dispatch.instance_id, dispatch.migrated) == ("b", True)


def test_telemetry_is_kept_and_changes_nothing_by_itself(rig):
    rig.start("a")
    rig.group("g")
    assert rig.handle(InstanceReported("a", 1, 2, 0.5)) == []
    status = rig.scheduler.instances["a"]
    assert (status.reported_running, status.reported_waiting, status.reported_kv_usage) == (1, 2, 0.5)


# Faults.


def test_a_lost_instance_gives_its_chunks_back_at_their_last_finished_one(make_rig):
    rig = make_rig(policies(splitter=Pieces(40)))
    rig.start("a")
    rig.group("g")
    rig.finish("g/0")
    assert rig.lose("a") == []
    assert rig.scheduler.waiting == 1
    (dispatch,) = rig.start("b")
    assert dispatch == Dispatch("g/0", "b", 40, 90, migrated=False)


def test_others_take_over_at_once(rig):
    rig.start("a")
    rig.start("b")
    rig.group("g", n=4)
    assert sent(rig.lose("a")) == [("g/0", "b"), ("g/2", "b")]
    assert rig.scheduler.instances["b"].running == 4


def test_a_lost_instance_may_come_back_with_empty_accounts(rig):
    rig.start("a")
    rig.group("g")
    rig.lose("a")
    rig.start("a")
    assert rig.scheduler.instances["a"].running == 1
    rig.finish("g/0")
    assert rig.scheduler.instances["a"].reserved_kv_tokens == 0


def test_no_request_believes_that_its_kv_survived_its_instance(make_rig):
    rig = make_rig(policies(splitter=Pieces(10)))
    rig.start("a", slots=1)
    rig.group("g", n=2)
    rig.finish("g/0")
    rig.start("b", slots=1)
    waits = rig.scheduler.buffer.get("g/0")
    rig.lose("a")
    assert all(request.instance in (None, "b") for request in rig.scheduler.buffer)
    assert waits.generated_tokens == 10


def test_a_failed_chunk_is_tried_again_from_where_it_began(make_rig):
    rig = make_rig(policies(splitter=Pieces(40)))
    rig.start("a")
    rig.group("g")
    rig.finish("g/0")
    assert rig.fail("g/0") == [Dispatch("g/0", "a", 40, 90, migrated=False)]


def test_one_failure_too_many_completes_with_reason_error(make_rig):
    rig = make_rig(max_failures=2)
    rig.start("a")
    rig.group("g")
    assert [type(rig.fail("g/0")[0]) for _ in range(2)] == [Dispatch, Dispatch]
    assert rig.fail("g/0") == [Complete("g/0", "error")]
    assert len(rig.scheduler.buffer) == 0


def test_losing_instances_is_no_failure_of_the_request(make_rig):
    rig = make_rig(max_failures=0)
    rig.group("g")
    for name in "abc":
        rig.start(name)
        rig.lose(name)
    rig.start("d")
    assert rig.finish("g/0") == [Complete("g/0", "length")]


def test_only_responses_that_ended_by_themselves_count_for_the_length(make_rig):
    rig = make_rig(max_failures=0)
    rig.start("a")
    rig.group("g", n=4)
    (context,) = rig.scheduler.contexts
    rig.fail("g/0")
    rig.abort("g/1")
    assert (context.finished, context.left, context.estimate_tokens) == (0, 2, 100)
    rig.finish("g/2", 7, stopped=True)
    assert (context.finished, context.left, context.estimate_tokens) == (1, 1, 7)


# Aborts.


def test_aborting_a_waiting_request_completes_it(rig):
    rig.start("a", slots=1)
    rig.group("g", n=3)
    assert rig.abort("g/1") == [Complete("g/1", "aborted")]
    assert sent(rig.finish("g/0")) == [("g/2", "a")]


def test_aborting_a_running_request_stops_its_chunk_and_frees_its_place(rig):
    rig.start("a", slots=1)
    rig.group("g", n=2)
    assert rig.abort("g/0") == [
        Abort("g/0", "a"),
        Complete("g/0", "aborted"),
        Dispatch("g/1", "a", 100, 110, migrated=False),
    ]


def test_aborting_what_is_over_or_was_never_there_does_nothing(rig):
    rig.start("a")
    rig.group("g")
    rig.finish("g/0")
    assert rig.abort("g/0") == []
    assert rig.abort("unknown/7") == []


# Events that do not fit.


def test_an_answer_for_an_unknown_request_is_illegal(rig):
    rig.start("a")
    with pytest.raises(TransitionError, match=r"'a' answered for request 'x/0', which does not run there"):
        rig.handle(ChunkFinished("x/0", "a", 1, stopped=True))


def test_an_answer_from_the_wrong_instance_shows_the_request_s_story(rig):
    rig.start("a")
    rig.start("b")
    rig.group("g")
    with pytest.raises(TransitionError, match=r"'b' .* 'g/0'.*0 of 100 tokens in 0 chunks.*run on a"):
        rig.handle(ChunkFinished("g/0", "b", 1, stopped=True))


def test_an_answer_for_a_waiting_request_is_illegal(rig):
    rig.start("a", slots=1)
    rig.group("g", n=2)
    with pytest.raises(TransitionError, match=r"its last transitions: none"):
        rig.handle(ChunkFailed("g/1", "a", "out of order"))


def test_an_answer_after_completion_is_illegal(rig):
    rig.start("a")
    rig.group("g")
    rig.finish("g/0")
    with pytest.raises(TransitionError, match="does not run there"):
        rig.handle(ChunkFinished("g/0", "a", 1, stopped=True))


@pytest.mark.parametrize("tokens", [-1, 41])
def test_more_or_fewer_tokens_than_asked_for_are_illegal(make_rig, tokens):
    rig = make_rig(policies(splitter=Pieces(40)))
    rig.start("a")
    rig.group("g")
    with pytest.raises(TransitionError, match=rf"'g/0' got {tokens} tokens for a chunk of 40; its engine"):
        rig.handle(ChunkFinished("g/0", "a", tokens, stopped=False))


def test_a_chunk_without_a_token_that_did_not_stop_is_illegal(rig):
    rig.start("a")
    rig.group("g")
    with pytest.raises(TransitionError, match=r"'a' finished a chunk of request 'g/0' without a token"):
        rig.handle(ChunkFinished("g/0", "a", 0, stopped=False))


@pytest.mark.parametrize(
    "event",
    [
        ChunkFinished("g/0", "a", 0, stopped=False),
        ChunkFinished("g/0", "a", 101, stopped=False),
        ChunkFinished("g/0", "b", 1, stopped=False),
        ChunkFailed("g/1", "a", "early"),
        InstanceLost("c", "unknown"),
        InstanceReported("c", 0, 0, 0.0),
        InstanceStarted(InstanceInfo("a", 1, 1, 1, 1)),
    ],
)
def test_an_illegal_event_changes_nothing(rig, event):
    rig.start("a", slots=1)
    rig.start("b", slots=1)
    rig.group("g", n=3)
    with pytest.raises(TransitionError):
        rig.handle(event)
    rig.check()
    rig.finish_all()
    assert len(rig.completed) == 3


def test_an_instance_cannot_start_twice(rig):
    rig.start("a")
    with pytest.raises(TransitionError, match="'a' started while it was alive"):
        rig.start("a")


@pytest.mark.parametrize("event", [InstanceLost("a", "x"), InstanceReported("a", 0, 0, 0.0)])
def test_an_instance_that_has_not_started_cannot_speak(rig, event):
    with pytest.raises(TransitionError, match="'a' spoke, but it has not started"):
        rig.handle(event)


def test_a_group_id_in_flight_cannot_be_used_again(rig):
    rig.group("g")
    with pytest.raises(PromptError, match="'g' is already in flight"):
        rig.group("g")


def test_a_group_id_that_is_over_can_be_used_again(rig):
    rig.start("a")
    rig.group("g")
    rig.finish("g/0")
    rig.completed.clear()
    assert sent(rig.group("g")) == [("g/0", "a")]


def test_an_object_that_is_no_event_is_no_plug_in_s_error(rig):
    with pytest.raises(KeyError):
        rig.scheduler.handle("ChunkFinished", 0.0)


# Stalls.


class Never(LeastLoaded):
    def place(self, request, chunk_tokens, instances):
        return None


def test_a_stall_names_the_plug_in_the_request_and_the_sizes(make_rig):
    rig = make_rig(policies(placer=Never()))
    rig.start("a", kv=50, block=16)
    with pytest.raises(StalledError) as error:
        rig.group("g", n=2, max_tokens=90, prompt=13)
    for fact in ("2 requests wait", "'mine'", "'g/0'", "90 tokens after 13", "a has 50 of 50 for 112"):
        assert fact in str(error.value)


def test_without_a_living_instance_nothing_is_stalled(make_rig):
    rig = make_rig(policies(placer=Never()))
    assert rig.group("g") == []


def test_while_anything_runs_nothing_is_stalled(make_rig):
    class OneAtATime(LeastLoaded):
        def place(self, request, chunk_tokens, instances):
            return None if instances[0].running else instances[0]

    rig = make_rig(policies(placer=OneAtATime()))
    rig.start("a")
    rig.group("g", n=3)
    rig.finish_all()
    assert list(rig.completed) == ["g/0", "g/1", "g/2"]


def test_a_queue_that_offers_nothing_while_nothing_runs_is_blamed(make_rig):
    class Shy(FirstComeFirstServed):
        def peek(self):
            return None

    rig = make_rig(policies(prioritizer=Shy()))
    rig.start("a")
    with pytest.raises(PluginError, match=r"'mine', slot 'prioritizer': offers none of 2 waiting requests"):
        rig.group("g", n=2)


# Plug-ins that misbehave.


def broken(base, method, answer):
    """Return a strategy whose method answers or raises what it is given."""

    def reply(self, *arguments):
        if isinstance(answer, Exception):
            raise answer
        return answer

    return type("Broken", (base,), {method: reply})()


@pytest.mark.parametrize(
    ("slot", "base", "method", "about"),
    [
        ("splitter", WholeRequests, "split", "'g/0'"),
        ("prioritizer", FirstComeFirstServed, "push", "'g/0'"),
        ("prioritizer", FirstComeFirstServed, "take", "'g/0'"),
        ("prioritizer", FirstComeFirstServed, "group_changed", "'g/0'"),
        ("prioritizer", FirstComeFirstServed, "peek", ""),
        ("prioritizer", FirstComeFirstServed, "__len__", ""),
        ("placer", LeastLoaded, "place", "'g/0'"),
        ("placer", LeastLoaded, "instance_changed", ""),
        ("placer", LeastLoaded, "instance_lost", ""),
    ],
)
def test_a_plug_in_that_raises_is_named_with_slot_and_request(make_rig, slot, base, method, about):
    rig = make_rig(policies(**{slot: broken(base, method, ZeroDivisionError("oh"))}))

    def live():
        rig.start("a")
        rig.group("g")
        rig.finish("g/0")
        rig.lose("a")

    with pytest.raises(PluginError) as error:
        live()
    assert f"plug-in 'mine', slot {slot!r}" in str(error.value)
    assert "raised ZeroDivisionError: oh" in str(error.value)
    assert "-p no:mine" in str(error.value)
    assert (f"for request {about}" if about else "slot") in str(error.value)
    assert about or "for request" not in str(error.value)
    assert isinstance(error.value.__cause__, ZeroDivisionError)


def test_a_splitter_is_notified_of_instances_before_anything_runs_there(make_rig):
    seen = []

    class Watching(WholeRequests):
        def instance_started(self, instance):
            seen.append(("started", instance.id, instance.running))

        def instance_lost(self, instance):
            seen.append(("lost", instance.id))

    rig = make_rig(policies(splitter=Watching()))
    rig.group("g")
    rig.start("a")
    rig.start("b")
    rig.lose("a")
    assert seen == [("started", "a", 0), ("started", "b", 0), ("lost", "a")]


def test_a_splitter_that_raises_at_a_new_instance_is_named(make_rig):
    class Broken(Pieces):
        def instance_started(self, instance):
            raise ZeroDivisionError("oh")

        def instance_lost(self, instance):
            pass

    with pytest.raises(PluginError, match="plug-in 'mine', slot 'splitter': raised ZeroDivisionError: oh"):
        make_rig(policies(splitter=Broken(10))).start("a")


def test_a_plug_in_s_own_seer_error_is_passed_on(make_rig):
    rig = make_rig(policies(placer=broken(LeastLoaded, "instance_changed", ConfigError("too small"))))
    with pytest.raises(ConfigError, match="too small"):
        rig.start("a")


@pytest.mark.parametrize("answer", [0, -1, 101, 1.0, True, None, "40"])
def test_a_splitter_may_only_answer_a_legal_size(make_rig, answer):
    rig = make_rig(policies(splitter=broken(WholeRequests, "split", answer)))
    rig.start("a")
    with pytest.raises(PluginError, match=r"'mine', slot 'splitter' for request 'g/0'.*1 to 100 tokens"):
        rig.group("g")


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ("a", "answered 'a', an id; return one of `instances` itself"),
        (0, "answered 0, which is no living instance"),
        (InstanceStatus(InstanceInfo("a", 1000, 1, 8, 1000), 0), "answered a copy of instance 'a', or one"),
    ],
    ids=["id", "index", "copy"],
)
def test_a_placer_may_only_answer_a_living_instance(make_rig, answer, words):
    rig = make_rig(policies(placer=broken(LeastLoaded, "place", answer)))
    rig.start("a")
    with pytest.raises(PluginError, match=f"'mine', slot 'placer' for request 'g/0': {words}"):
        rig.group("g")


@pytest.mark.parametrize(
    ("answer", "words"), [(150.5, "150.5, which is a float"), (True, "a bool"), ("4", "a str")]
)
def test_a_size_that_is_no_whole_number_is_named_by_its_type(make_rig, answer, words):
    rig = make_rig(policies(splitter=broken(WholeRequests, "split", answer)))
    rig.start("a")
    with pytest.raises(PluginError, match=words):
        rig.group("g")


def test_numpy_s_whole_numbers_are_sizes(make_rig):
    numpy = pytest.importorskip("numpy")
    rig = make_rig(policies(splitter=broken(WholeRequests, "split", numpy.int64(32))))
    rig.start("a")
    [dispatch] = rig.group("g")
    assert (dispatch.max_tokens, type(dispatch.max_tokens)) == (32, int)


def test_what_a_strategy_raises_is_shown_on_one_line_with_the_place_where_it_was_raised(make_rig):
    class Wordy(WholeRequests):
        def split(self, request):
            return self.helper()

        def helper(self):
            raise ValueError("first\n  second")

    rig = make_rig(policies(splitter=Wordy()))
    rig.start("a")
    line = Wordy.helper.__code__.co_firstlineno + 1
    with pytest.raises(
        PluginError, match=rf"raised ValueError: first second at \S*test_scheduler.py:{line}; "
    ):
        rig.group("g")


class Meddler(FirstComeFirstServed):
    """It changes a request while it only looks."""

    def peek(self):
        request = super().peek()
        if request is not None:
            request.generated_tokens += 1
        return request


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda request, instance: request.group.in_flight.update(a=0), "in_flight of group 'g' by update"),
        (lambda request, instance: request.group.labels.clear(), "labels of group 'g' by clear"),
        (lambda request, instance: instance.info.labels.pop("x", 0), "info.labels of instance 'a' by pop"),
    ],
)
def test_in_debug_mappings_cannot_be_changed_either(change, what):
    class Marker(LeastLoaded):
        def place(self, request, chunk_tokens, instances):
            change(request, instances[0])
            return super().place(request, chunk_tokens, instances)

    scheduler = Scheduler(guarded_policies(policies(placer=Marker())))
    scheduler.handle(InstanceStarted(InstanceInfo("a", 1000, 1, 8, 1000)), 0.0)
    with pytest.raises(PluginError, match=rf"place\(\) changed what it was given: {what}\("):
        scheduler.handle(GroupsSubmitted((GroupSpec("g", 10, 2, 100),)), 0.0)


def test_read_only_mappings_are_copied_as_plain_ones():
    seen = []

    class Keeper(LeastLoaded):
        def place(self, request, chunk_tokens, instances):
            copied = copy.deepcopy(request.group)
            copied.labels["mine"] = "yes"
            seen.append((dict(request.group.labels), copied.labels))
            return super().place(request, chunk_tokens, instances)

    scheduler = Scheduler(guarded_policies(policies(placer=Keeper())))
    scheduler.handle(InstanceStarted(InstanceInfo("a", 1000, 1, 8, 1000)), 0.0)
    scheduler.handle(GroupsSubmitted((GroupSpec("g", 10, 1, 100, labels={"tenant": "b"}),)), 0.0)
    assert seen == [({"tenant": "b"}, {"tenant": "b", "mine": "yes"})]


def test_a_placer_that_accepts_no_idle_instance_with_room_is_the_reason(make_rig):
    rig = make_rig(policies(placer=broken(LeastLoaded, "place", None)))
    rig.start("a")
    with pytest.raises(StalledError, match=r"'mine' places no chunk.*a placer has to accept some instance"):
        rig.group("g")


def test_in_debug_a_strategy_that_changes_what_it_was_given_is_named_with_the_line():
    scheduler = Scheduler(guarded_policies(policies(prioritizer=Meddler())))
    scheduler.handle(InstanceStarted(InstanceInfo("a", 1000, 1, 8, 1000)), 0.0)
    with pytest.raises(PluginError) as caught:
        scheduler.handle(GroupsSubmitted((GroupSpec("g", 10, 2, 100),)), 0.0)
    line = Meddler.peek.__code__.co_firstlineno + 3
    assert "plug-in 'mine', slot 'prioritizer': peek() changed what it was given" in str(caught.value)
    assert "generated_tokens of request 'g/0' from 0 to 1" in str(caught.value)
    assert f"test_scheduler.py:{line};" in str(caught.value)


def test_in_debug_copies_are_their_maker_s_and_may_be_changed(make_rig):
    class Dreamer(LeastLoaded):
        def place(self, request, chunk_tokens, instances):
            for one in (attrs.evolve(request), copy.copy(request), copy.deepcopy(request)):
                one.generated_tokens += 5
                assert request.generated_tokens == 0
            copy.deepcopy(request).group.left = 0
            copy.copy(instances[0]).running = 7
            return super().place(request, chunk_tokens, instances)

    rig = make_rig(policies(placer=Dreamer()))
    rig.start("a")
    assert len(rig.group("g")) == 1


def test_without_a_guard_nothing_is_watched():
    given = policies(prioritizer=FirstComeFirstServed())
    scheduler = Scheduler(given)
    assert scheduler.policies is given
    scheduler.handle(GroupsSubmitted((GroupSpec("g", 10, 1, 100),)), 0.0)
    assert type(given.prioritizer.strategy.peek()) is Request


def test_the_trace_keeps_the_placer_s_reason_if_it_gives_one(make_rig):
    class Talkative(LeastLoaded):
        def place(self, request, chunk_tokens, instances):
            return Placement(instances[0], "habit")

    rig = make_rig(policies(placer=Talkative()))
    rig.start("a")
    assert rig.group("g") == [Dispatch("g/0", "a", 100, 110, migrated=False, why="habit")]


class Reserving(LeastLoaded):
    def __init__(self, reserved):
        self.reserved = reserved

    def place(self, request, chunk_tokens, instances):
        return Placement(instances[0], "", self.reserved(chunk_tokens))


def test_a_placer_reserves_less_than_a_chunk_and_gets_back_what_it_reserved(make_rig):
    rig = make_rig(policies(placer=Reserving(lambda tokens: min(tokens, 30)), splitter=Pieces(40)))
    rig.start("a", block=16, kv=160)
    [dispatch] = rig.group("g")
    assert (dispatch.max_tokens, dispatch.reserved_tokens, dispatch.kv_tokens) == (40, 30, 48)
    assert rig.scheduler.instances["a"].free_kv_tokens == 112
    [dispatch] = rig.finish("g/0", 1)  # it ended early
    assert dispatch.kv_tokens == 48
    rig.finish_all()
    assert rig.scheduler.instances["a"].free_kv_tokens == 160
    assert rig.completed == {"g/0": "length"}


def test_a_placer_ends_chunks_once_nothing_more_is_placed(make_rig):
    class Ending(LeastLoaded):
        ends = ()

        def place(self, request, chunk_tokens, instances):
            self.ends = [request]
            return super().place(request, chunk_tokens, instances)

        def to_end(self):
            return self.ends

    placer = Ending()
    rig = make_rig(policies(placer=placer))
    rig.start("a")
    *_, dispatch, end = rig.group("g", n=2)
    assert (dispatch.request_id, end) == ("g/1", EndChunk("g/1", "a", "goes_on"))
    [again, _] = rig.finish("g/1", 40)
    assert again.max_tokens == 60
    with pytest.raises(PluginError, match=r"'mine', slot 'placer'.*ends .* is no running request"):
        rig.finish("g/1", 60)


def test_a_placer_that_fails_when_asked_which_are_to_end_is_named(make_rig):
    class Failing(LeastLoaded):
        def to_end(self):
            raise ValueError("lost count")

    rig = make_rig(policies(placer=Failing()))
    with pytest.raises(PluginError, match=r"'mine', slot 'placer'.*raised ValueError: lost count"):
        rig.start("a")


@pytest.mark.parametrize("tokens", [0, 101, True, 2.0])
def test_what_is_reserved_of_a_chunk_is_a_part_of_it(make_rig, tokens):
    rig = make_rig(policies(placer=Reserving(lambda _: tokens)))
    rig.start("a")
    with pytest.raises(PluginError, match=f"reserves {tokens} of a chunk's 100 tokens; .* are 1 to 100"):
        rig.group("g")


def test_a_reason_is_a_word(make_rig):
    class Odd(LeastLoaded):
        def place(self, request, chunk_tokens, instances):
            return Placement(instances[0], 7)

    rig = make_rig(policies(placer=Odd()))
    rig.start("a")
    with pytest.raises(PluginError, match=r"'mine', slot 'placer' for request 'g/0': gives 7 for a reason"):
        rig.group("g")


def test_a_placer_may_not_answer_a_lost_instance(make_rig):
    class Faithful(LeastLoaded):
        first = None

        def place(self, request, chunk_tokens, instances):
            self.first = self.first or instances[0]
            return self.first

    rig = make_rig(policies(placer=Faithful()))
    rig.start("a")
    rig.start("b")
    rig.group("g")
    with pytest.raises(PluginError, match="answered instance 'a', which is no longer alive"):
        rig.lose("a")


@pytest.mark.parametrize("answer", ["g/0", 0, False])
def test_a_prioritizer_may_only_offer_requests(make_rig, answer):
    rig = make_rig(policies(prioritizer=broken(FirstComeFirstServed, "peek", answer)))
    with pytest.raises(PluginError, match=r"'mine', slot 'prioritizer': offered .* no request"):
        rig.start("a")


def test_a_prioritizer_that_keeps_what_was_taken_offers_a_running_request(make_rig):
    class Keeper(FirstComeFirstServed):
        kept = None

        def push(self, request):
            super().push(request)
            self.kept = request

        def peek(self):
            return self.kept

    rig = make_rig(policies(prioritizer=Keeper()))
    rig.start("a")
    with pytest.raises(PluginError, match=r"'prioritizer' for request 'g/0': offered a request that does"):
        rig.group("g")


def test_a_prioritizer_that_offers_a_finished_request_is_caught(make_rig):
    class Nostalgic(FirstComeFirstServed):
        first = None

        def push(self, request):
            self.first = self.first or request
            super().push(request)

        def peek(self):
            return super().peek() or self.first

    rig = make_rig(policies(prioritizer=Nostalgic()))
    rig.group("g")
    with pytest.raises(PluginError, match=r"'prioritizer' for request 'g/0': offered a request that does"):
        rig.start("a")


def test_a_prioritizer_that_loses_a_request_is_caught(make_rig):
    class Leaky(FirstComeFirstServed):
        def push(self, request):
            if request.index != 1:
                super().push(request)

    rig = make_rig(policies(prioritizer=Leaky()))
    with pytest.raises(PluginError, match="holds 2 requests where 3 wait; it lost or kept one"):
        rig.group("g", n=3)


def test_a_prioritizer_that_duplicates_a_request_is_caught(make_rig):
    class Echo:
        def __init__(self):
            self.queue = []

        def push(self, request):
            self.queue += [request, request]

        def peek(self):
            return self.queue[0] if self.queue else None

        def take(self, request):
            self.queue.remove(request)

        def group_changed(self, group, request): ...

        def __len__(self):
            return len(self.queue)

    rig = make_rig(policies(prioritizer=Echo()))
    with pytest.raises(PluginError, match="holds 2 requests where 1 wait"):
        rig.group("g")


def test_an_error_names_no_request_of_an_earlier_event(make_rig):
    class Picky(LeastLoaded):
        def instance_changed(self, instance):
            if instance.id == "b":
                raise ValueError("b")

    rig = make_rig(policies(placer=Picky()))
    rig.start("a")
    rig.group("g")
    with pytest.raises(PluginError) as error:
        rig.start("b")
    assert "for request" not in str(error.value)


def test_an_abort_that_the_queue_rejects_names_the_request(make_rig):
    rig = make_rig(policies(prioritizer=broken(FirstComeFirstServed, "take", KeyError("gone"))))
    rig.group("g")
    with pytest.raises(PluginError, match=r"slot 'prioritizer' for request 'g/0': raised KeyError"):
        rig.handle(RequestsAborted(("g/0",)))


class AtHome(LeastLoaded):
    """A placer that keeps requests where their KV is."""

    def place(self, request, chunk_tokens, instances):
        at_home = [each for each in instances if each.id == request.instance and each.free_slots]
        return super().place(request, chunk_tokens, at_home or instances)


def turn(name, home):
    return GroupSpec(name, 10, 1, 100, family="f", home=home)


def test_a_placer_sees_where_the_kv_of_a_request_s_trajectory_is(make_rig):
    rig = make_rig(policies(placer=AtHome()))
    rig.start("a")
    rig.start("b")
    assert rig.submit(turn("first", "b")) == [Dispatch("first/0", "b", 100, 110, migrated=False)]
    rig.finish("first/0", 20, stopped=True)
    assert rig.submit(turn("moved", "gone")) == [Dispatch("moved/0", "a", 100, 110, migrated=False)]
    assert rig.scheduler.buffer.get_sent("first/0") is None


def test_a_request_that_leaves_the_home_of_its_trajectory_has_moved(rig):
    rig.start("a")
    rig.start("b")
    assert rig.submit(turn("g", "b")) == [Dispatch("g/0", "a", 100, 110, migrated=True)]


def test_a_home_that_is_lost_before_the_first_chunk_is_none(rig):
    rig.start("a")
    rig.pause()
    rig.submit(turn("g", "a"))
    rig.lose("a")
    rig.start("b")
    assert rig.resume() == [Dispatch("g/0", "b", 100, 110, migrated=False)]


class OneSlot(LeastLoaded):
    """Placer that has no room while anything runs, and counts how often it is asked."""

    def __init__(self):
        self.asked = 0
        self.instances = ()

    def has_room(self):
        return not any(instance.running for instance in self.instances)

    def place(self, request, chunk_tokens, instances):
        self.asked += 1
        self.instances = instances
        return super().place(request, chunk_tokens, instances) if self.has_room() else None


def test_a_placer_without_room_is_not_asked_about_a_further_chunk(make_rig):
    placer = OneSlot()
    rig = make_rig(policies(placer=placer))
    rig.start("a")
    rig.group("g", 3)
    assert list(rig.in_flight) == ["g/0"]
    rig.finish_all()
    assert placer.asked == 3


def test_an_error_of_a_placer_that_is_asked_for_room_names_it(make_rig):
    class Broken(LeastLoaded):
        def has_room(self):
            raise KeyError("room")

    rig = make_rig(policies(placer=Broken()))
    rig.start("a")
    with pytest.raises(PluginError, match=r"'mine', slot 'placer'.*KeyError"):
        rig.group("g", 2)
