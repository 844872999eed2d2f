"""Equal instances of one machine, one of which restarts and slows the others meanwhile: all go on working."""

import random
from heapq import heappop, heappush
from itertools import count
from math import log

import pytest
from seer_divided_rollout import Chunks, KvAware
from seer_divided_rollout.placer import FORGET_CHOICES

from seer_core.model import GroupContext, InstanceInfo, InstanceStatus, Request
from seer_core.model.events import (
    ChunkFinished,
    Complete,
    Dispatch,
    GroupSpec,
    GroupsSubmitted,
    InstanceLost,
    InstanceStarted,
)
from seer_core.scheduling.scheduler import Policies, Scheduler, Slot

KV, GROUPS, SIZE, TOKENS, CHUNK = 16_352, 8, 4, 150, 30
STARTS_S, RUNS_S, UNTIL_S = 12.0, 40.0, 200.0
NOISE = 0.2


class SharedMachine:
    """Rollout after rollout on equal instances in virtual time; each has KV and places for all requests."""

    def __init__(self, instances, slowdown, seed):
        self.slowdown, self.rng = slowdown, random.Random(seed)
        self.placer = KvAware(0.25, 0.75)
        self.scheduler = Scheduler(
            Policies(Slot("splitter", "test", Chunks(CHUNK)), placer=Slot("placer", "test", self.placer))
        )
        self.names = [f"i{number}" for number in range(instances)]
        self.now, self.events, self.numbers = 0.0, [], count()
        self.lives, self.running, self.idle = {}, {}, {}
        self.starting, self.left, self.rollouts, self.longest_idle = None, 0, 0, 0

    def after(self, seconds, action, *args):
        heappush(self.events, (self.now + seconds, next(self.numbers), action, args))

    def run(self, until_s=UNTIL_S):
        for name in self.names:
            self.start(name)
        self.after(0.0, self.roll_out)
        self.after(RUNS_S / 2, self.restart)
        while self.now < until_s:
            self.now, _, action, args = heappop(self.events)
            action(*args)
        return self

    def handle(self, event):
        commands = self.scheduler.handle(event, self.now)
        sent = [command for command in commands if isinstance(command, Dispatch)]
        for chunk in sent:
            self.running[chunk.instance_id] += 1
        for chunk in sent:
            self.send(chunk)
        over = sum(isinstance(command, Complete) for command in commands)
        self.left -= over
        if over and not self.left:
            self.after(0.05, self.roll_out)

    def roll_out(self):
        self.left, self.rollouts = GROUPS * SIZE, self.rollouts + 1
        names = (f"{self.rollouts}-{number}" for number in range(GROUPS))
        self.handle(GroupsSubmitted(tuple(GroupSpec(name, 4, SIZE, TOKENS) for name in names)))

    def start(self, name):
        self.starting, self.running[name], self.idle[name] = None, 0, 0
        self.lives[name] = next(self.numbers)
        figures = {"prefill_s_per_token": 2e-4, "step_s": 0.006, "shares_prompts": True, "overcommits": True}
        self.handle(InstanceStarted(InstanceInfo(name, KV, 32, GROUPS * SIZE, 1024, **figures)))

    def restart(self):
        self.starting = name = self.rng.choice(self.names)
        del self.idle[name], self.lives[name]
        self.handle(InstanceLost(name, "killed"))
        self.after(STARTS_S, self.start, name)
        self.after(STARTS_S + RUNS_S, self.restart)

    def send(self, chunk):
        name = chunk.instance_id
        for other in self.idle:
            self.idle[other] = 0 if other == name else self.idle[other] + 1
            self.longest_idle = max(self.longest_idle, self.idle[other])
        step_s = (0.006 + 0.0008 * self.running[name]) * (self.slowdown if self.starting else 1.0)
        seconds = chunk.max_tokens * step_s * self.rng.lognormvariate(0, NOISE)
        self.after(seconds, self.end, chunk, self.lives[name])

    def end(self, chunk, life):
        name, tokens = chunk.instance_id, chunk.max_tokens
        if self.lives.get(name) == life:
            self.running[name] -= 1
            moved = 31 if chunk.migrated else 0
            self.handle(ChunkFinished(chunk.request_id, name, tokens, False, tokens, prefilled_tokens=moved))


@pytest.mark.parametrize("slowdown", [1.5, 2.0, 3.0])
@pytest.mark.parametrize("instances", [2, 4])
def test_no_equal_instance_stays_idle_when_one_has_restarted(instances, slowdown):
    for seed in range(3):
        machine = SharedMachine(instances, slowdown, seed).run()
        assert machine.longest_idle < FORGET_CHOICES, seed
        assert all(placed.halvings == 0 for placed in machine.placer._instances.values()), seed


@pytest.mark.parametrize("aparts", [(-1, 0), (0, 1), (-2, 0, 0, 1), (-1, -1, 0, 0)])
def test_no_instance_stays_idle_however_fast_another_is_held_to_be(aparts):
    placer, instances = KvAware(0.25, 0.75), []
    for number, apart in enumerate(aparts):
        instances.append(InstanceStatus(InstanceInfo(f"i{number}", KV, 32, 32, 1024), number))
        placer.instance_changed(instances[-1])
        pace = placer.pace_of(instances[-1])
        pace.apart, pace.slowness = apart * log(2), 2.0**apart
        placer.pace_changed(instances[-1])
    idle = dict.fromkeys(instances, 0)
    for number in range(8 * FORGET_CHOICES):
        chosen = placer.place(Request(GroupContext("g", number, 1, 4, TOKENS), 0), CHUNK, instances).instance
        placer.instance_changed(chosen)
        idle = {each: 0 if each is chosen else idle[each] + 1 for each in instances}
        assert max(idle.values()) < 2 * FORGET_CHOICES


def a_fast_one_and_a_newcomer(placer):
    """Return two instances of a placer: one that has been fast, and one that starts beside it."""
    instances = []
    for number, name in enumerate(("fast", "newcomer")):
        instances.append(InstanceStatus(InstanceInfo(name, KV, 32, 32, 1024), number))
        placer.instance_changed(instances[-1])
        if name == "fast":
            pace = placer.pace_of(instances[0])
            pace.apart, pace.slowness = -log(2), 0.5
            placer.pace_changed(instances[0])
    return instances


def test_an_instance_that_starts_beside_a_fast_one_works_from_its_first_second():
    placer = KvAware(0.25, 0.75)
    instances = a_fast_one_and_a_newcomer(placer)
    chosen = []
    for number in range(4):
        request = Request(GroupContext("g", number, 1, 4, TOKENS), 0)
        placement = placer.place(request, CHUNK, instances)
        placer.instance_changed(placement.instance)
        chosen.append(placement.instance.id)
    assert chosen == ["fast", "newcomer"] * 2


def test_without_a_weight_for_speed_an_instance_that_starts_beside_a_fast_one_is_in_its_heap():
    placer = KvAware(0.25, 0.75, speed_weight=0.0)
    instances = a_fast_one_and_a_newcomer(placer)
    assert [placer.speed(None, each, None) for each in instances] == [0, 0]
    assert len(placer._heaps) == 1
