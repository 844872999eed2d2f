"""Splitters, prioritizers, placers and observers that break their contract in one way each."""

import re

import numpy
import pytest
from seer_testing import ObserverContract, PlacerContract, PrioritizerContract, SplitterContract

from seer_core.model import GroupContext, InstanceStatus, Request
from seer_core.model.events import InstanceLost
from seer_core.scheduling.defaults import LeastLoaded


def contract_of(base, make):
    """Return a contract whose strategies are made like that."""
    methods = {"make": lambda self: make(), "patience_s": 0.2}
    return type(f"{base.__name__} of {make.__name__}", (base,), methods)


# Splitters


class NoSplitter:
    pass


class Half:
    def split(self, request):
        return request.remaining_tokens / 2


class OfNumpy:
    def split(self, request):
        return numpy.int64(request.remaining_tokens)


class TestOfNumpy(SplitterContract):
    def make(self):
        return OfNumpy()


class Scribbler:
    def split(self, request):
        request.chunks += 1
        return 1


class Moody:
    """Every other one is of another mind."""

    made = 0

    def __init__(self):
        type(self).made += 1
        self.mood = self.made % 2

    def split(self, request):
        return 1 if self.mood else request.remaining_tokens


# Prioritizers


class Queue:
    """First come first served, in order until broken."""

    def __init__(self):
        self.waiting = []

    def push(self, request):
        self.waiting.append(request)

    def peek(self):
        return self.waiting[0] if self.waiting else None

    def take(self, request):
        self.waiting.remove(request)

    def group_changed(self, group, request):
        pass

    def __len__(self):
        return len(self.waiting)


class NoQueue:
    push = peek = take = print


class Inventor(Queue):
    def peek(self):
        group = GroupContext("unknown", 0, 1, 1, 1, left=1)
        return super().peek() or Request(group, 0)


class Keeper(Queue):
    def take(self, request):
        pass


class Fickle(Queue):
    def peek(self):
        self.waiting.append(self.waiting.pop(0)) if self.waiting else None
        return super().peek()


class Popper(Queue):
    def take(self, request):
        self.waiting.pop(0)


class Once(Queue):
    def __init__(self):
        super().__init__()
        self.seen = set()

    def push(self, request):
        if request.id not in self.seen:
            self.seen.add(request.id)
            super().push(request)


class Ghost(Queue):
    """It deletes a request that was taken out of turn late, and so offers it twice when it comes back."""

    def __init__(self):
        super().__init__()
        self.gone = set()

    def take(self, request):
        if self.waiting[0] is request:
            super().take(request)
        else:
            self.gone.add(request)

    def push(self, request):
        self.gone.discard(request)
        super().push(request)

    def peek(self):
        while self.waiting and self.waiting[0] in self.gone:
            self.waiting.pop(0)
        return super().peek()

    def __len__(self):
        return len(set(self.waiting) - self.gone)


class Upstart(Queue):
    """Last come first served, and no other."""

    def peek(self):
        return self.waiting[-1] if self.waiting else None

    def take(self, request):
        assert request is self.waiting.pop(), "not its turn"


class Marker(Queue):
    def group_changed(self, group, request):
        group.steps = 0
        group.drafted += 1


class MoodyQueue(Queue):
    made = 0

    def __init__(self):
        super().__init__()
        type(self).made += 1
        self.mood = -(self.made % 2)

    def peek(self):
        return self.waiting[self.mood] if self.waiting else None


class Hoarder(Queue):
    def __init__(self):
        super().__init__()
        self.all = []

    def push(self, request):
        self.all.append(request)
        super().push(request)


# Placers


class NoPlacer:
    instance_changed = print


class Never(LeastLoaded):
    def place(self, request, chunk_tokens, instances):
        return None


class Founder(LeastLoaded):
    def place(self, request, chunk_tokens, instances):
        return InstanceStatus(instances[0].info, 0)


class Labeller(LeastLoaded):
    def place(self, request, chunk_tokens, instances):
        request.group.labels["seen"] = "yes"
        return super().place(request, chunk_tokens, instances)


class Faithful(LeastLoaded):
    """It stays with its first instance, dead or alive."""

    first = None

    def instance_changed(self, instance):
        self.first = self.first or instance

    def place(self, request, chunk_tokens, instances):
        return self.first


class MoodyPlacer(LeastLoaded):
    made = 0

    def __init__(self):
        type(self).made += 1
        self.mood = -(self.made % 2)

    def place(self, request, chunk_tokens, instances):
        return instances[self.mood]


class Archivist(LeastLoaded):
    def __init__(self):
        self.groups = []

    def place(self, request, chunk_tokens, instances):
        self.groups.append(request.group)
        return super().place(request, chunk_tokens, instances)


# Observers


class NoObserver:
    pass


class Squeamish:
    def observe(self, now, event, commands):
        if isinstance(event, InstanceLost):
            raise AssertionError("cannot see that")


class Retoucher(Squeamish):
    def observe(self, now, event, commands):
        pass

    def completed(self, now, completion):
        completion.token_ids.append(7)


class Mayfly:
    """It has one life."""

    lives = 1

    async def start(self):
        assert self.lives, "out of lives"
        self.lives -= 1

    async def stop(self):
        pass

    def observe(self, now, event, commands):
        pass


class Censor:
    def observe(self, now, event, commands):
        commands.clear()


RANDOM = "test_random_rollouts_lose_nothing"
UNCHANGED = "test_what_it_is_given_is_not_changed"
ALIKE = "test_two_with_the_same_input_decide_the_same"
SIZE = "test_a_chunk_has_a_token_at_least_and_no_more_than_are_left"
ONCE = "test_every_request_is_offered_once"
ONE_OF = "test_it_answers_one_of_the_instances_or_none"

FAULTS = {
    SplitterContract: [
        (NoSplitter, "test_it_is_a_splitter", "it lacks split"),
        (Half, SIZE, "which is no int"),
        (Half, RANDOM, "plug-in 'Half', slot 'splitter' for request '.*': answered .*a chunk has 1 to"),
        (Scribbler, UNCHANGED, "split\\(\\) changed what it was given"),
        (Moody, ALIKE, ""),
    ],
    PrioritizerContract: [
        (NoQueue, "test_it_is_a_prioritizer", "it lacks __len__"),
        (Inventor, "test_an_empty_queue_offers_nothing", ""),
        (Inventor, ONCE, "offered 'unknown/0', which does not wait"),
        (
            Keeper,
            RANDOM,
            "'Keeper', slot 'prioritizer'.*: (offered a request that does not|holds .* kept one)",
        ),
        (Fickle, "test_peek_is_the_same_until_something_changes", "changed its mind"),
        (Popper, "test_a_request_that_was_not_offered_can_be_taken", ""),
        (Once, "test_a_request_may_come_back_as_often_as_it_has_chunks", "has length 0 when 1 wait"),
        (Ghost, "test_one_served_out_of_its_turn_comes_back", "has length 1 when 0 wait"),
        (
            Upstart,
            "test_no_request_waits_for_ever_while_others_arrive",
            "raised AssertionError: not its turn",
        ),
        (Marker, UNCHANGED, "group_changed\\(\\) changed"),
        (MoodyQueue, ALIKE, ""),
        (Hoarder, "test_what_is_over_is_forgotten", "holds 800 of 800 requests"),
    ],
    PlacerContract: [
        (NoPlacer, "test_it_is_a_placer", "it lacks place"),
        (Never, "test_an_idle_fleet_takes_a_chunk", "placed nothing on 1 idle"),
        (Never, RANDOM, "'Never' places no chunk"),
        (Founder, ONE_OF, "a copy of instance 'i0', or one from before its loss; return one of"),
        (Faithful, "test_a_lost_instance_is_not_chosen_again", "instance 'a', which is no longer alive"),
        (LeastLoaded, "test_a_busy_instance_gets_no_more_than_it_has_room_for", "KV tokens more than it has"),
        (
            Labeller,
            UNCHANGED,
            "place\\(\\) changed what it was given: labels of group 'g\\d+' by __setitem__",
        ),
        (MoodyPlacer, ALIKE, ""),
        (Archivist, "test_groups_that_are_over_are_forgotten", "holds 400 of 400 groups"),
    ],
    ObserverContract: [
        (NoObserver, "test_it_is_an_observer", "it lacks observe"),
        (Squeamish, "test_it_takes_every_kind_of_event", "cannot see that"),
        (
            Retoucher,
            "test_it_takes_completions_pieces_and_the_pool_s_figures",
            "completed\\(\\) changed what",
        ),
        (Mayfly, "test_it_starts_again_after_its_stop", "out of lives"),
        (Censor, "test_what_it_is_shown_is_not_changed", "observe\\(\\) changed"),
    ],
}
BROKEN = [
    (contract_of(contract, make), test, words)
    for contract, faults in FAULTS.items()
    for make, test, words in faults
]


@pytest.mark.parametrize(
    ("contract", "test", "words"),
    [pytest.param(*each, id=f"{each[0].__name__}-{each[1]}") for each in BROKEN],
)
def test_the_fault_is_found_and_named(contract, test, words, catches):
    assert re.search(words, catches(contract, test), re.DOTALL)


@pytest.mark.parametrize("contract", FAULTS)
def test_every_test_of_the_contract_finds_a_fault(contract, uncaught):
    assert not uncaught(contract, BROKEN)


@pytest.mark.parametrize("contract", FAULTS)
def test_a_contract_without_make_says_what_to_define(contract):
    with pytest.raises(NotImplementedError, match=r"define make\(\), which returns a new"):
        contract().make()
