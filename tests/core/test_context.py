import pytest

from seer_core.errors import PromptError
from seer_core.model.events import GroupSpec
from seer_core.scheduling.buffer import RequestBuffer
from seer_core.scheduling.context import ContextManager


@pytest.fixture
def contexts():
    return ContextManager()


def opened(contexts, name="g", n=3):
    """Open a group and return its context and requests."""
    context = contexts.open(GroupSpec(name, 10, n, 100, tuple(range(n))))
    return context, RequestBuffer().add_group(context)


def ended(contexts, request, tokens):
    request.generated_tokens = tokens
    contexts.record_finished(request)
    contexts.close(request)


def test_a_new_context_repeats_its_specification(contexts):
    context, _ = opened(contexts)
    assert (context.id, context.size, context.prompt_tokens, context.max_tokens) == ("g", 3, 10, 100)
    assert (context.known_lengths, context.left, context.finished) == ((0, 1, 2), 3, 0)


def test_contexts_are_numbered_in_order_of_arrival(contexts):
    assert [opened(contexts, name)[0].seq for name in "abc"] == [0, 1, 2]


def test_nothing_learnt_means_long(contexts):
    context, _ = opened(contexts)
    assert context.estimate_tokens == 100


def test_the_estimate_is_the_longest_finished_response(contexts):
    context, requests = opened(contexts)
    estimates = []
    for request, tokens in zip(requests, (20, 50, 30), strict=True):
        ended(contexts, request, tokens)
        estimates.append(context.estimate_tokens)
    assert estimates == [20, 50, 50]


def test_an_empty_response_is_learnt_too(contexts):
    context, requests = opened(contexts)
    ended(contexts, requests[0], 0)
    assert context.estimate_tokens == 0


def test_a_request_that_failed_is_over_and_its_length_is_not_counted(contexts):
    context, requests = opened(contexts)
    requests[0].generated_tokens = 90
    contexts.close(requests[0])
    assert (context.left, context.finished, context.estimate_tokens) == (2, 0, 100)


def test_a_context_is_forgotten_with_its_last_request(contexts):
    first, requests = opened(contexts, "g", 2)
    second, _ = opened(contexts, "h")
    ended(contexts, requests[0], 5)
    assert list(contexts) == [first, second]
    ended(contexts, requests[1], 5)
    assert list(contexts) == [second]
    assert len(contexts) == 1


def test_an_id_is_unique_among_groups_in_flight_only(contexts):
    context, (request,) = opened(contexts, "g", 1)
    with pytest.raises(PromptError, match="'g' is already in flight"):
        opened(contexts, "g")
    ended(contexts, request, 5)
    again, _ = opened(contexts, "g")
    assert again is not context
    assert again.estimate_tokens == 100


def joined(contexts, name, family="f"):
    """Open a group of a family, of one response, and return it."""
    context = contexts.open(GroupSpec(name, 10, 1, 100, family=family))
    return context, RequestBuffer().add_group(context)[0]


def test_groups_of_a_family_learn_from_each_other_s_responses(contexts):
    (first, one), (second, two) = joined(contexts, "a"), joined(contexts, "b")
    stranger, _ = joined(contexts, "c", family="other")
    assert (first.informed, one.probe) == (False, True)
    ended(contexts, one, 30)
    assert (second.finished, second.estimate_tokens, second.informed) == (1, 30, False)
    assert (stranger.finished, stranger.estimate_tokens) == (0, 100)
    late, request = joined(contexts, "d")
    assert (late.estimate_tokens, late.informed, request.probe) == (30, True, False)
    ended(contexts, two, 50)
    assert (late.finished, late.estimate_tokens) == (2, 50)


def test_a_family_is_remembered_while_none_of_its_groups_is_under_way(contexts):
    for number, tokens in enumerate((40, 20)):
        ended(contexts, joined(contexts, f"g{number}")[1], tokens)
    assert len(contexts) == 0
    assert joined(contexts, "later")[0].estimate_tokens == 40


def test_the_family_to_which_no_group_has_come_for_longest_is_forgotten(contexts, monkeypatch):
    monkeypatch.setattr("seer_core.scheduling.context.FAMILIES", 2)
    for family, tokens in (("old", 40), ("kept", 20), ("new", 10)):
        ended(contexts, joined(contexts, family, family)[1], tokens)
    estimates = {family: joined(contexts, f"{family} again", family)[0] for family in ("kept", "new", "old")}
    assert {name: each.estimate_tokens for name, each in estimates.items()} == {
        "kept": 20,
        "new": 10,
        "old": 100,
    }


def test_however_many_families_are_under_way_a_group_learns_from_its_own(contexts, monkeypatch):
    monkeypatch.setattr("seer_core.scheduling.context.FAMILIES", 1)
    first, request = joined(contexts, "a", "one")
    second, _ = joined(contexts, "b", "two")
    third, _ = joined(contexts, "c", "one")
    ended(contexts, request, 20)
    assert (third.estimate_tokens, second.estimate_tokens) == (20, 100)
    later, _ = joined(contexts, "d", "one")
    assert (first.finished, later.finished, later.informed) == (1, 1, True)
