import pytest

from seer_core.errors import TransitionError
from seer_core.model import GroupContext, RequestState
from seer_core.scheduling.buffer import HISTORY, RequestBuffer


@pytest.fixture
def buffer():
    return RequestBuffer()


def add(buffer, name="g", size=1, seq=0):
    return buffer.add_group(GroupContext(name, seq, size, 10, 100, left=size))


def test_a_group_becomes_waiting_requests_named_by_index(buffer):
    requests = add(buffer, size=3)
    assert [request.id for request in requests] == ["g/0", "g/1", "g/2"]
    assert {request.state for request in requests} == {RequestState.WAITING}
    assert list(buffer) == requests
    assert buffer.get("g/1") is requests[1]
    assert (len(buffer), buffer.waiting, buffer.running) == (3, 3, 0)


def test_sequence_numbers_go_on_over_groups(buffer):
    assert [request.seq for request in add(buffer, "g", 2) + add(buffer, "h", 2)] == [0, 1, 2, 3]


def test_a_chunk_takes_a_request_through_running_and_back(buffer):
    (request,) = add(buffer)
    buffer.run(request, "a", 40, 50)
    assert (request.state, request.instance, request.chunk_tokens) == (RequestState.RUNNING, "a", 40)
    assert request.chunk_kv_tokens == 50
    assert (buffer.waiting, buffer.running, buffer.on_instance["a"]) == (0, 1, {request: None})
    buffer.absorb(request, 40)
    assert (request.state, request.generated_tokens, request.chunks) == (RequestState.WAITING, 40, 1)
    assert (request.context_tokens, request.remaining_tokens) == (50, 60)
    assert (buffer.waiting, buffer.running, buffer.on_instance["a"]) == (1, 0, {})


def test_a_chunk_given_back_leaves_no_trace_in_the_counts(buffer):
    (request,) = add(buffer)
    buffer.run(request, "a", 40, 50)
    buffer.give_back(request)
    assert (request.state, request.generated_tokens, request.chunks) == (RequestState.WAITING, 0, 0)
    assert (buffer.waiting, buffer.running) == (1, 0)


def test_only_a_move_between_two_instances_is_a_migration(buffer):
    (request,) = add(buffer)
    moves = []
    for name in ("a", "a", "b", "a"):
        moves.append(buffer.run(request, name, 1, 11))
        buffer.absorb(request, 1)
    assert moves == [False, False, True, True]
    assert request.migrations == 2


def test_a_finished_request_is_forgotten(buffer):
    (request,) = add(buffer)
    buffer.finish(request)
    assert request.state is RequestState.FINISHED
    assert (len(buffer), buffer.waiting, buffer.get("g/0")) == (0, 0, None)


def test_losing_an_instance_returns_its_requests_in_order_of_dispatch(buffer):
    first, second, third = add(buffer, size=3)
    for request, name in ((second, "a"), (first, "a"), (third, "b")):
        buffer.run(request, name, 10, 20)
    assert buffer.lose_instance("a") == [second, first]
    assert [request.instance for request in (first, second, third)] == [None, None, "b"]
    assert (buffer.waiting, buffer.running) == (2, 1)


def test_losing_an_instance_reaches_the_requests_that_wait_elsewhere(buffer):
    (request,) = add(buffer)
    buffer.run(request, "a", 10, 20)
    buffer.absorb(request, 10)
    assert buffer.lose_instance("a") == []
    assert request.instance is None


def test_losing_an_instance_that_never_ran_anything_returns_nothing(buffer):
    assert buffer.lose_instance("a") == []


def run(buffer, request):
    buffer.run(request, "a", 10, 20)


def absorb(buffer, request):
    buffer.absorb(request, 1)


def give_back(buffer, request):
    buffer.give_back(request)


def finish(buffer, request):
    buffer.finish(request)


@pytest.mark.parametrize(
    ("before", "step", "message"),
    [
        ([], absorb, "cannot absorb: it is waiting, not running"),
        ([], give_back, "cannot give back: it is waiting, not running"),
        ([run], run, "cannot run on a: it is running, not waiting"),
        ([run], finish, "cannot finish: it is running, not waiting"),
        ([finish], finish, "cannot finish: it is finished, not waiting"),
        ([finish], run, "cannot run on a: it is finished, not waiting"),
    ],
)
def test_an_illegal_step_is_named(buffer, before, step, message):
    (request,) = add(buffer)
    for earlier in before:
        earlier(buffer, request)
    if step is absorb:
        request.chunk_tokens = 1
    with pytest.raises(TransitionError, match=f"request 'g/0' {message}"):
        step(buffer, request)


def test_the_story_has_the_last_steps_of_that_request_alone(buffer):
    request, other = add(buffer, size=2)
    run(buffer, request)
    run(buffer, other)
    absorb(buffer, request)
    assert buffer.story(request) == (
        "1 of 100 tokens in 1 chunks, last on a; its last transitions: run on a, absorb"
    )


def test_the_history_is_bounded(buffer):
    request, other = add(buffer, size=2)
    run(buffer, other)
    for _ in range(HISTORY):
        run(buffer, request)
        give_back(buffer, request)
    assert buffer.story(other).endswith("its last transitions: none")
    assert buffer.story(request).count("run on a") == 6
