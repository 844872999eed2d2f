"""How fast instances are beside each other, measured from chunks at any loads."""

import random

import pytest
from seer_divided_rollout.pace import SMALL_FLEET, MeasuredPace, PaceMeter

from seer_core.model import GroupContext, InstanceInfo, InstanceStatus, Request
from seer_core.model.events import ChunkFinished

KV = 100_000


class Instances:
    """Instances whose steps take a constant time, and more with their requests and their KV."""

    def __init__(self, *speeds, noise=0.0):
        self.meter, self.now, self.rng, self.noise = PaceMeter(), 0.0, random.Random(0), noise
        self.speeds = dict(enumerate(speeds))
        self.paces = [MeasuredPace() for _ in speeds]
        self.instances = [self.start(number) for number in self.speeds]
        self.requests = 0

    def start(self, number):
        return InstanceStatus(InstanceInfo(f"{number}", KV, 1, 64, KV), number)

    def step_s(self, number, running, kv_tokens):
        noise = self.rng.uniform(1 - self.noise, 1 + self.noise)
        return noise * (0.01 + 0.001 * running + 1e-7 * kv_tokens) / self.speeds[number]

    def run(self, number, running, kv_tokens, tokens=100, **found):
        """Run a batch of so many requests, each for so many tokens."""
        instance, request = self.instances[number], None
        sent = []
        for _ in range(running):
            self.requests += 1
            request = Request(GroupContext("g", 0, 1, 1, 1000), self.requests)
            instance.running += 1
            instance.reserved_kv_tokens += kv_tokens // running
            if self.paces[number].is_ready:
                self.meter.send(self.paces[number], instance, request, self.now)
                sent.append(request)
        self.now += tokens * self.step_s(number, running, kv_tokens)
        for request in sent:
            event = ChunkFinished(request.id, instance.id, tokens, False, tokens, **found)
            self.meter.end(instance, request, self.now, event)
        instance.running = instance.reserved_kv_tokens = 0

    def slownesses(self):
        return [pace.slowness for pace in self.paces]


@pytest.mark.parametrize("speed", [0.5, 0.1, 2.0])
def test_an_instance_of_another_speed_is_found_at_like_loads(speed):
    found = Instances(1.0, speed, 1.0)
    for load in (4, 5, 6, 4, 3, 5):
        for number in range(3):
            found.run(number, load, 1000 * load)
    assert found.slownesses() == pytest.approx([1.0, 1 / speed, 1.0], rel=0.1)


def test_an_instance_of_half_the_speed_is_found_at_a_smaller_load():
    found = Instances(1.0, 0.5, 1.0)
    for load in (16, 20, 12, 18, 10, 14):
        for number in range(3):
            found.run(number, load // 2 if number == 1 else load, 1000 * load)
    assert found.slownesses() == pytest.approx([1.0, 2.0, 1.0], rel=0.25)


@pytest.mark.parametrize("noise", [0.0, 0.2])
def test_no_load_makes_an_instance_slow(noise):
    found = Instances(1.0, 1.0, 1.0, noise=noise)
    for turn in range(200):
        for number in range(3):
            load = (1, 4, 16)[(number + turn // 20) % 3]
            found.run(number, load, load * (500 + 100 * turn))
            assert found.slownesses() == [1.0, 1.0, 1.0]


def test_the_first_chunks_of_different_loads_make_no_instance_slow():
    found = Instances(1.0, 1.0)
    for _ in range(8):
        found.run(0, 1, 1000)
        found.run(1, 60, 60_000)
    assert found.slownesses() == [1.0, 1.0]


def test_an_instance_is_slow_from_some_time_on_and_until_some_time():
    found = Instances(1.0, 1.0, 1.0)
    for speed, slowness in ((1.0, 1.0), (0.25, 4.0), (1.0, 1.0)):
        found.speeds[1] = speed
        for _ in range(20):
            for number in range(3):
                found.run(number, 4, 4000)
        assert found.slownesses() == pytest.approx([1.0, slowness, 1.0], rel=0.25)


def test_chunks_that_say_little_about_steps_are_not_measured():
    found = Instances(1.0, 0.1)
    for more in (
        {"prefilled_tokens": 50},
        {"pool_tokens": 50},
        {"tokens": 4},
        {"kv_tokens": 2 * KV},  # some wait in its own queue
        {"running": 65},
    ):
        for number in (0, 1):
            for _ in range(8):
                found.run(number, **{"running": 2, "kv_tokens": 1000} | more)
    assert found.slownesses() == [1.0, 1.0]
    assert [pace.token_s for pace in found.paces] == [0.0, 0.0]


def test_a_chunk_that_brought_nothing_is_not_measured_and_others_are_measured_in_its_place():
    found = Instances(1.0, 1.0)
    meter, (instance, lost), (pace, gone) = found.meter, found.instances, found.paces
    for number in range(9):
        request = Request(GroupContext("g", 0, 1, 1, 1000), number)
        meter.send(pace, instance, request, 0.0)
        meter.end(instance, request, 9.0, None)
    assert pace.token_s == 0.0
    assert (meter.timed, pace.timed, pace.is_ready) == ({}, 0, True)
    meter.send(gone, lost, request, 9.0)
    meter.lose(gone)
    assert meter.timed == {}


def test_an_instance_that_starts_again_is_measured_anew():
    found = Instances(1.0, 0.5)
    for _ in range(8):
        found.run(0, 4, 4000)
        found.run(1, 4, 4000)
    first, second = found.slownesses()
    assert second / first == pytest.approx(2.0, rel=0.1)
    found.meter.lose(found.paces[1])
    found.speeds[1] = found.speeds[0] = 1.0
    found.instances[1], found.paces[1] = found.start(1), MeasuredPace()
    for _ in range(20):
        found.run(0, 4, 4000)
        found.run(1, 4, 4000)
    first, second = found.slownesses()
    assert first / second == pytest.approx(1.0, rel=0.2)


@pytest.mark.parametrize("others", [1, 3])
def test_times_from_before_a_start_are_not_compared_with_later_ones(others):
    found = Instances(*[1 / 3] * others, 1.0)
    newcomer = found.paces.pop()
    for _ in range(8):  # while the last one starts, all others take three times as long
        for number in range(others):
            found.run(number, 4, 4000)
    found.meter.fleet_changed(others + 1)
    found.paces.append(newcomer)
    found.speeds = dict.fromkeys(found.speeds, 1.0)
    for _ in range(8):
        for number in reversed(range(others + 1)):
            found.run(number, 4, 4000)
            assert found.slownesses() == [1.0] * (others + 1)


def test_chunks_that_were_in_flight_at_a_start_are_not_measured():
    found = Instances(1.0)
    (pace,), (instance,) = found.paces, found.instances
    request = Request(GroupContext("g", 0, 1, 1, 1000), 0)
    instance.running = 1
    found.meter.send(pace, instance, request, 0.0)
    found.meter.fleet_changed(2)
    found.meter.end(instance, request, 9.0, ChunkFinished(request.id, instance.id, 100, False, 100))
    assert (pace.token_s, pace.timed, found.meter.timed) == (0.0, 0, {})


def test_a_start_leaves_a_slow_instance_slow_until_it_is_measured_again():
    found = Instances(1.0, 0.25)
    for turn in range(16):
        if turn == 8:
            found.meter.fleet_changed(3)
        for number in (0, 1):
            found.run(number, 4, 4000)
        first, second = found.slownesses()
        assert turn < 4 or second / first == pytest.approx(4.0, rel=0.25)


def test_a_large_fleet_is_measured_however_often_instances_start():
    found = Instances(*[1.0] * SMALL_FLEET, 0.25)
    for _ in range(8):
        for number in range(SMALL_FLEET + 1):
            found.meter.fleet_changed(SMALL_FLEET + 2)
            found.run(number, 4, 4000)
    assert found.slownesses() == pytest.approx([1.0] * SMALL_FLEET + [4.0], rel=0.25)


def test_an_instance_of_which_nothing_is_known_counts_as_fast_as_the_fastest():
    meter = PaceMeter()
    fast, slow = MeasuredPace(slowness=0.5, apart=-0.7), MeasuredPace(slowness=4.0, apart=1.4)
    assert meter.newcomer([]).slowness == meter.newcomer([slow]).slowness == 1.0
    assert meter.newcomer([slow, fast]).slowness == pytest.approx(0.5, rel=0.01)


def test_the_time_of_a_token_is_that_of_the_last_chunks():
    found = Instances(1.0)
    for _ in range(30):
        found.run(0, 4, 4000)
    assert found.paces[0].token_s == pytest.approx(0.0144)
    assert found.paces[0].slowness == 1.0
