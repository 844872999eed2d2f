"""The tail goes apart, the rest is packed; the balancer is sticky until an instance is full."""

import pytest
from seer_rivals.kv_aware_sticky import KvAwareSticky
from seer_rivals.tail_isolation import TailIsolation

from seer_core.model import GroupContext, InstanceInfo, InstanceStatus, Request


def left(request):
    return request.group.known_lengths[request.index] - request.generated_tokens


@pytest.fixture
def instances():
    return [InstanceStatus(InstanceInfo(f"i{seq}", 160, 16, 4, 160), seq) for seq in range(3)]


def requests(*lengths, seq=0, prompt=10):
    group = GroupContext(f"g{seq}", seq, len(lengths), prompt, 100, tuple(lengths), left=len(lengths))
    group.first_seq = seq * 100
    return [Request(group, k) for k in range(len(lengths))]


@pytest.fixture
def isolation(instances):
    strategy = TailIsolation(left, 1, 0.5)
    for instance in instances:
        strategy.instance_changed(instance)
    return strategy


def test_the_longest_go_to_the_first_instance_and_others_to_the_rest(isolation, instances):
    longest, long, short, shorter = requests(50, 40, 20, 10)
    for each in (longest, long, short, shorter):
        isolation.push(each)
    assert isolation.peek() is longest
    assert isolation.place(longest, 16, instances) is instances[0]
    # Its context is 60 tokens at its end, of 80 that the tail may fill: the next does not fit beside it.
    assert isolation.place(long, 16, instances) is instances[1]
    instances[1].running, instances[1].reserved_kv_tokens = 1, 32
    assert isolation.place(short, 16, instances) is instances[2]


def test_the_next_longest_follows_when_one_of_the_tail_is_over(isolation, instances):
    longest, long, *rest = requests(50, 40, 20, 10)
    for each in (longest, long, *rest):
        isolation.push(each)
    assert isolation.place(longest, 16, instances) is instances[0]
    isolation.take(longest)
    isolation.group_changed(longest.group, longest)
    assert isolation.place(long, 16, instances) is instances[0]


def test_the_tail_is_apart_only_while_others_wait(isolation, instances):
    [last] = requests(50)
    isolation.push(last)
    instances[0].running, instances[0].reserved_kv_tokens = 1, 48
    assert isolation.place(last, 16, instances) is instances[1]


def test_a_chunk_that_fits_nowhere_waits(isolation, instances):
    everyone = requests(50, 40, 20, 10)
    for each in everyone:
        isolation.push(each)
    for instance in instances:
        instance.running, instance.reserved_kv_tokens = 2, 160
    assert isolation.place(everyone[0], 16, instances) is None


def test_the_only_instance_takes_all(instances):
    strategy = TailIsolation(left, 1, 0.5)
    strategy.instance_changed(instances[0])
    first, second = requests(50, 40)
    strategy.push(first)
    strategy.push(second)
    assert strategy.place(first, 16, instances[:1]) is instances[0]


def test_a_request_follows_its_group_s_prompt_until_the_instance_is_full(instances):
    balancer = KvAwareSticky(0.9)
    first, second = requests(5, 5)
    assert balancer.place(first, 16, instances) is instances[0]
    first.group.in_flight["i1"] = 1
    assert balancer.place(second, 16, instances) is instances[1]
    instances[1].reported_kv_usage = 0.95
    instances[0].reported_kv_usage = 0.5
    assert balancer.place(second, 16, instances) is instances[2]


def test_a_request_between_chunks_stays_where_its_kv_is(instances):
    balancer = KvAwareSticky(0.9)
    [one] = requests(5)
    one.instance = "i2"
    one.group.in_flight["i1"] = 3
    assert balancer.place(one, 16, instances) is instances[2]
    instances[2].running = 4
    instances[0].reported_kv_usage = 0.1
    assert balancer.place(one, 16, instances) is instances[1]
