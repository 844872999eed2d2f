"""Sticky sessions: a response goes to the emptiest instance once, and stays there."""

import pytest
from seer_baselines.sticky_sessions import StickySessions

from seer_core.model import GroupContext, InstanceInfo, InstanceStatus, Request


@pytest.fixture
def instances():
    return [InstanceStatus(InstanceInfo(f"i{seq}", 160, 16, 4, 160), seq) for seq in range(3)]


@pytest.fixture
def request_of_two():
    group = GroupContext("g", 0, 2, 10, 100, left=2)
    return Request(group, 0)


def test_a_new_response_goes_to_the_instance_with_the_fewest_requests(instances, request_of_two):
    instances[0].running, instances[1].running, instances[2].running = 3, 1, 2
    assert StickySessions().place(request_of_two, 16, instances) is instances[1]


def test_a_response_stays_although_others_are_emptier(instances, request_of_two):
    request_of_two.instance = "i2"
    instances[2].running = 200
    instances[2].reserved_kv_tokens = 5000
    assert StickySessions().place(request_of_two, 16, instances) is instances[2]


def test_a_response_whose_instance_is_gone_goes_to_another(instances, request_of_two):
    request_of_two.instance = "i2"
    instances[0].running = 1
    assert StickySessions().place(request_of_two, 16, instances[:2]) is instances[1]
