from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from seer_baselines.oracle_longest_first import OracleLongestFirst, seer_make_prioritizer
from seer_host.contract_checks import flaw_of

from seer_core.errors import PromptError
from seer_core.model import GroupContext, Request
from seer_core.model.events import GroupSpec, GroupsSubmitted
from seer_core.ports.policy import Prioritizer
from seer_core.scheduling.scheduler import Policies, Scheduler, Slot


def requests(*lengths, seq=0):
    group = GroupContext(f"g{seq}", seq, len(lengths), 10, 100, tuple(lengths), left=len(lengths))
    group.first_seq = seq * 100
    return [Request(group, k) for k in range(len(lengths))]


def drain(queue):
    order = []
    while (request := queue.peek()) is not None:
        queue.take(request)
        order.append(request)
    assert len(queue) == 0
    return order


def test_it_is_a_prioritizer_and_the_hook_makes_one():
    assert isinstance(seer_make_prioritizer(SimpleNamespace(), SimpleNamespace()), OracleLongestFirst)
    assert flaw_of(OracleLongestFirst(), Prioritizer) is None


@given(st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=4), max_size=6))
def test_requests_go_by_true_length_then_by_arrival(groups):
    queue = OracleLongestFirst()
    everyone = [request for seq, lengths in enumerate(groups) for request in requests(*lengths, seq=seq)]
    for request in everyone:
        queue.push(request)
    expected = sorted(everyone, key=lambda one: (-one.group.known_lengths[one.index], one.seq))
    assert drain(queue) == expected


def test_a_request_between_chunks_keeps_its_place():
    queue = OracleLongestFirst()
    long, short = requests(50, 20)
    queue.push(long)
    queue.push(short)
    queue.take(long)
    long.generated_tokens = 45
    queue.push(long)
    assert drain(queue) == [long, short]


def test_a_request_taken_from_the_middle_is_gone():
    queue = OracleLongestFirst()
    first, middle, last = requests(3, 2, 1)
    for request in (first, middle, last):
        queue.push(request)
    queue.take(middle)
    assert len(queue) == 2
    assert drain(queue) == [first, last]


def test_what_is_learnt_changes_nothing():
    queue = OracleLongestFirst()
    first, second = requests(3, 2)
    queue.push(first)
    queue.push(second)
    first.group.finished, first.group.longest_finished_tokens = 1, 99
    queue.group_changed(first.group, first)
    assert drain(queue) == [first, second]


@pytest.mark.parametrize("lengths", [None, (5,)], ids=["none", "too few"])
def test_missing_lengths_are_an_error_that_names_the_group_and_the_remedy(lengths):
    prioritizer = Slot("prioritizer", "oracle_longest_first", OracleLongestFirst())
    scheduler = Scheduler(Policies(prioritizer=prioritizer))
    with pytest.raises(
        PromptError, match=r"'oracle_longest_first' needs the true lengths of group 'g'.*compare"
    ):
        scheduler.handle(GroupsSubmitted((GroupSpec("g", 10, 2, 100, lengths),)), 0.0)
