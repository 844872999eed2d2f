from __future__ import annotations

import random
from math import log2
from types import SimpleNamespace

import hypothesis.strategies as st
import msgspec
import pytest
import seer_divided_rollout
from hypothesis import given, settings
from seer_divided_rollout import KvAware, Settings
from seer_divided_rollout.clients import other_clients
from seer_divided_rollout.placer import FORGET_CHOICES
from seer_host.contract_checks import flaw_of

from seer_core.errors import ConfigError
from seer_core.model import GroupContext, InstanceInfo, InstanceStatus, Request
from seer_core.ports.policy import Placer

CHUNK = 16


class Reference:
    """The placer's promise, by looking at every instance each time."""

    def __init__(self, stay_kv_fraction, growth_headroom, pace_of):
        self.stay_kv_fraction = stay_kv_fraction
        self.growth_headroom = growth_headroom
        self.pace_of = pace_of
        self.chosen = {}
        self.choices = 0

    def place(self, request, chunk_tokens, instances):
        self.uneven = len({self.halvings(instance) for instance in instances}) > 1
        free = [instance for instance in instances if instance.free_slots > 0]
        if not free:
            return None
        home = next((status for status in instances if status.id == request.instance), None)
        emptiest = self.emptiest(request, chunk_tokens, free, home)
        best = self.joined(request, chunk_tokens, free, emptiest, home)
        if (
            home in free
            and self.fits(home, request, chunk_tokens)
            and self.stays(request, chunk_tokens, home, best)
        ):
            best = home
        elif not self.admits(best, home, request, chunk_tokens):
            return None
        self.choices += 1
        self.chosen[best] = self.choices
        return best

    def emptiest(self, request, chunk_tokens, free, home):
        ranked = sorted(
            free, key=lambda status: (-status.free_kv_tokens, self.chosen.get(status, 0), status.seq)
        )
        first = {(status.info.kv_domain, self.halvings(status)): status for status in reversed(ranked)}
        of_each = [status for status in ranked if status in first.values()]
        if len(first) == 1 or (home is None and not self.uneven):
            return ranked[0]
        admitting = [each for each in of_each if self.admits(each, home, request, chunk_tokens)]
        return max(
            admitting or ranked[:1],
            key=lambda each: each.free_kv_tokens - self.near(each, home) - self.slow_tokens(each),
        )

    def stays(self, request, chunk_tokens, home, best):
        apart = self.room(best, request) - self.room(home, request)
        if apart > self.near(best, home):
            return apart - self.near(best, home) <= self.slow_tokens(best) - self.slow_tokens(home)
        if apart - self.near(best, home) <= self.slow_tokens(best) - self.slow_tokens(home):
            return True
        left = max(request.group.estimate_tokens - request.generated_tokens, chunk_tokens)
        here, there = self.pace_of(home), self.pace_of(best)
        saved_s = left * here.token_s * (1 - there.slowness / here.slowness)
        share = self.move_cost(best, home)
        return saved_s <= 2 * share * best.info.prefill_s_per_token * request.context_tokens

    def slow_tokens(self, status):
        return self.halvings(status) * status.info.kv_capacity_tokens if self.uneven else 0

    def halvings(self, status):
        return round(log2(self.pace_of(status).slowness))

    def near(self, status, home):
        if home is None:
            return 0
        return self.stay_kv_fraction * self.move_cost(status, home) * home.info.kv_capacity_tokens

    @staticmethod
    def move_cost(status, home):
        return status.info.move_cost if status.info.kv_domain == home.info.kv_domain else 1.0

    def joined(self, request, chunk_tokens, free, emptiest, home):
        group = request.group
        saved = (group.prompt_tokens - 1) // emptiest.info.block_tokens * emptiest.info.block_tokens
        if not saved or not emptiest.info.shares_prompts:
            return emptiest
        siblings = [
            status
            for status in free
            if status.id in group.in_flight
            and status is not home
            and self.halvings(status) <= self.halvings(emptiest)
            and (home is None or status.info.kv_domain in (home.info.kv_domain, emptiest.info.kv_domain))
            and self.admits(status, home, request, chunk_tokens)
        ]
        if not siblings:
            return emptiest
        oldest_first = list(group.in_flight)
        best = min(siblings, key=lambda status: (-self.room(status, request), oldest_first.index(status.id)))
        apart = self.room(emptiest, request) - self.room(best, request)
        near = min(saved * group.left, self.stay_kv_fraction * emptiest.info.kv_capacity_tokens)
        return best if apart <= near or not self.admits(emptiest, home, request, chunk_tokens) else emptiest

    def admits(self, status, home, request, chunk_tokens):
        if status is home:
            return self.fits(status, request, chunk_tokens)
        spare = self.growth_headroom * status.info.move_cost * chunk_tokens * status.running
        if request.group.in_flight and status.id not in request.group.in_flight:
            spare += 2 * status.prompt_kv_tokens(request.group)
        return status.footprint(request, chunk_tokens) + spare <= status.free_kv_tokens

    @staticmethod
    def room(status, request):
        return status.free_kv_tokens + status.shared_kv_tokens(request.group)

    @staticmethod
    def fits(status, request, chunk_tokens):
        return status.footprint(request, chunk_tokens) <= status.free_kv_tokens


class Pool:
    """Instances with chunks on them; does the scheduler's books for a placer."""

    def __init__(self, placer, fetch_s=None, shares_prompts=False):
        self.placer = placer
        self.fetch_s = fetch_s
        self.shares_prompts = shares_prompts
        self.instances = []
        self.chunks = []
        self.seen = 0

    def start(self, name, kv=256, block=1, slots=8, kind="", reach="", ends_early=False, overcommits=False):
        info = InstanceInfo(
            name,
            kv,
            block,
            slots,
            kv,
            prefill_s_per_token=1.0,
            fetch_s_per_token=self.fetch_s,
            shares_prompts=self.shares_prompts,
            kv_kind=kind,
            kv_reach=reach,
            ends_early=ends_early,
            overcommits=overcommits,
        )
        instance = InstanceStatus(info, self.seen)
        self.seen += 1
        self.placer.instance_changed(instance)
        self.instances.append(instance)
        return instance

    def lose(self, instance):
        self.instances.remove(instance)
        self.placer.instance_lost(instance)
        for request, _, _ in [chunk for chunk in self.chunks if chunk[1] is instance]:
            request.group.in_flight.pop(instance.id, None)
        self.chunks = [chunk for chunk in self.chunks if chunk[1] is not instance]

    def load(self, instance, running, kv):
        instance.running += running
        instance.reserved_kv_tokens += kv
        self.placer.instance_changed(instance)

    def slow(self, instance, slowness, token_s=1.0):
        pace = self.placer.pace_of(instance)
        pace.slowness, pace.token_s = slowness, token_s
        self.placer.pace_changed(instance)

    def group(self, prompt=10, size=1):
        return GroupContext("g", 0, size, prompt, 1000, left=size)

    def request(self, prompt=10, home=None, group=None):
        return Request(group or self.group(prompt), 0, instance=home)

    def place(self, request, tokens=CHUNK):
        choice = self.placer.place(request, tokens, self.instances)
        instance, self.why = (choice, None) if choice is None else (choice.instance, choice.why)
        if instance is not None:
            group = request.group
            added = instance.footprint(request, tokens)
            self.chunks.append((request, instance, added + instance.shared_kv_tokens(group)))
            request.instance = instance.id
            group.in_flight[instance.id] = group.in_flight.get(instance.id, 0) + 1
            self.load(instance, 1, added)
        return instance

    def end(self, chunk):
        self.chunks.remove(chunk)
        request, instance, footprint = chunk
        in_flight = request.group.in_flight
        in_flight[instance.id] -= 1
        if not in_flight[instance.id]:
            del in_flight[instance.id]
        self.load(instance, -1, instance.shared_kv_tokens(request.group) - footprint)


@pytest.fixture
def pool():
    return Pool(KvAware(0.25))


def test_it_is_a_placer():
    assert flaw_of(KvAware(0.0), Placer) is None


def test_without_instances_nothing_is_placed(pool):
    assert pool.place(pool.request()) is None


def test_a_new_request_goes_where_most_kv_is_free(pool):
    a, b = pool.start("a"), pool.start("b")
    pool.load(a, 1, 20)
    assert pool.place(pool.request()) is b


def test_ties_rotate(pool):
    a, b, c = (pool.start(name) for name in "abc")
    chosen = []
    for _ in range(7):
        chosen.append(pool.place(pool.request()))
        pool.end(pool.chunks[-1])
    assert chosen == [a, b, c, a, b, c, a]


def test_what_does_not_fit_whole_is_not_placed(pool):
    a = pool.start("a", kv=64)
    pool.load(a, 1, 40)
    assert pool.place(pool.request(prompt=9)) is None
    assert pool.place(pool.request(prompt=8)) is a


def test_whole_blocks_count(pool):
    a = pool.start("a", kv=64, block=16)
    pool.load(a, 1, 32)
    assert pool.place(pool.request(prompt=17)) is None
    assert pool.place(pool.request(prompt=16)) is a


def test_an_instance_without_a_free_slot_is_passed_over_however_empty(pool):
    a, b = pool.start("a", kv=1000, slots=1), pool.start("b")
    pool.load(a, 1, 1)
    assert pool.place(pool.request(home="a")) is b
    pool.load(b, 8, 1)
    assert pool.place(pool.request()) is None


def test_a_request_stays_home_while_loads_are_close(pool):
    a, b = pool.start("a"), pool.start("b")
    pool.load(a, 1, 64)
    assert pool.place(pool.request(home="a")) is a
    assert b.running == 0


def test_a_request_leaves_home_when_loads_are_apart(pool):
    a, b = pool.start("a"), pool.start("b")
    pool.load(a, 1, 65)
    assert pool.place(pool.request(home="a")) is b


def test_a_request_leaves_a_home_that_is_full(pool):
    pool = Pool(KvAware(1.0))
    a, b = pool.start("a"), pool.start("b")
    pool.load(a, 1, 256 - CHUNK)
    assert pool.place(pool.request(home="a")) is b


def test_fraction_0_leaves_home_for_any_gain():
    pool = Pool(KvAware(0.0))
    a, b = pool.start("a"), pool.start("b")
    pool.load(a, 1, 1)
    assert pool.place(pool.request(home="a")) is b
    pool.load(b, 0, 1 - b.reserved_kv_tokens)
    assert pool.place(pool.request(home="b")) is b


def test_a_lost_instance_is_never_chosen_again(pool):
    a, b = pool.start("a", kv=1000), pool.start("b")
    pool.lose(a)
    assert pool.place(pool.request(home="a")) is b
    pool.lose(b)
    assert pool.place(pool.request()) is None


def test_an_instance_that_comes_back_under_its_name_is_a_new_one(pool):
    old = pool.start("a")
    pool.place(pool.request())
    pool.lose(old)
    new = pool.start("a")
    assert pool.place(pool.request(home="a")) is new


@settings(max_examples=150, deadline=None)
@given(
    stay=st.sampled_from([0.0, 0.1, 0.25, 1.0]),
    headroom=st.sampled_from([0.0, 0.5, 1.0]),
    fetch_s=st.sampled_from([None, 0.0, 0.5]),
    block=st.sampled_from([1, 16]),
    shares=st.booleans(),
    slow=st.booleans(),
    data=st.data(),
)
def test_choices_equal_those_of_a_look_at_every_instance(stay, headroom, fetch_s, block, shares, slow, data):
    pool = Pool(KvAware(stay, headroom), fetch_s, shares)
    reference = Reference(stay, headroom, pool.placer.pace_of)
    groups = [pool.group(data.draw(st.integers(1, 40)), size) for size in (1, 2, 6)]
    homes = st.sampled_from([None, "a", "b", "c", "d"])
    for _ in range(data.draw(st.integers(5, 60))):
        steps = ["place", "place", "place"]
        free = sorted(set("abcd") - {instance.id for instance in pool.instances})
        steps += ["start"] * bool(free) + ["lose"] * bool(pool.instances) + ["end"] * 2 * bool(pool.chunks)
        steps += ["slow"] * bool(slow and pool.instances)
        step = data.draw(st.sampled_from(steps))
        if step == "start":
            kv, slots = data.draw(st.sampled_from([32, 64, 256])), data.draw(st.integers(1, 4))
            pool.start(free[0], kv, block, slots, data.draw(st.sampled_from(["", "", "other"])))
        elif step == "lose":
            pool.lose(data.draw(st.sampled_from(pool.instances)))
        elif step == "slow":
            instance = data.draw(st.sampled_from(pool.instances))
            slowness = data.draw(st.sampled_from([0.5, 1.0, 1.3, 2.0, 10.0]))
            pool.slow(instance, slowness, data.draw(st.sampled_from([0.01, 1.0])))
        elif step == "end":
            pool.end(data.draw(st.sampled_from(pool.chunks)))
        else:
            group = data.draw(st.sampled_from(groups) | st.none())
            request = pool.request(data.draw(st.integers(1, 40)), data.draw(homes), group)
            tokens = data.draw(st.integers(1, CHUNK))
            expected = reference.place(request, tokens, pool.instances)
            assert pool.place(request, tokens) is expected
        for instance in pool.instances:
            assert 0 <= instance.reserved_kv_tokens <= instance.info.kv_capacity_tokens
            assert 0 <= instance.running <= instance.info.max_running


def test_a_newcomer_leaves_room_for_the_next_chunk_of_those_in_flight():
    pool = Pool(KvAware(0.25, 1.0))
    pool.start("a", kv=7 * CHUNK, block=CHUNK)
    assert pool.place(pool.request()) is not None
    assert pool.place(pool.request()) is not None
    assert pool.place(pool.request()) is None
    assert pool.place(pool.request(home="a")) is not None


def test_where_kv_is_shared_a_newcomer_leaves_as_much_less_room_as_its_move_costs_less():
    pool = Pool(KvAware(0.25, 1.0), fetch_s=0.5)
    pool.start("a", kv=7 * CHUNK, block=CHUNK)
    for _ in range(2):
        assert pool.place(pool.request()) is not None
    assert pool.place(pool.request()) is not None
    free = Pool(KvAware(0.25, 1.0), fetch_s=0.0)
    free.start("a", kv=6 * CHUNK, block=CHUNK)
    for _ in range(3):
        assert free.place(free.request()) is not None


def test_where_kv_is_shared_a_request_leaves_home_as_much_sooner_as_its_move_costs_less():
    pool = Pool(KvAware(0.25), fetch_s=0.5)
    a, b = pool.start("a"), pool.start("b")
    pool.load(a, 1, 32)
    assert pool.place(pool.request(home="a")) is a
    pool.load(a, 0, 33 - a.reserved_kv_tokens)
    assert pool.place(pool.request(home="a")) is b


def test_a_move_to_another_kind_is_priced_as_the_prefill_that_it_is():
    pool = Pool(KvAware(0.25), fetch_s=0.0)
    a, b, c = pool.start("a", kind="x"), pool.start("b", kind="x"), pool.start("c", kind="y")
    pool.load(a, 1, 40)
    pool.load(b, 1, 41)
    assert pool.place(pool.request(home="a")) is a  # where all is free a move does not pay
    pool.end(pool.chunks[-1])
    pool.load(a, 0, 2)
    assert pool.place(pool.request(home="a")) is b
    pool.end(pool.chunks[-1])
    pool.load(b, 0, 24)
    pool.load(a, 0, 23)
    assert pool.place(pool.request(home="a")) is c
    pool.end(pool.chunks[-1])
    pool.load(a, 0, 256 - a.reserved_kv_tokens)
    pool.load(b, 0, 256 - b.reserved_kv_tokens)
    assert pool.place(pool.request(home="a")) is c
    assert pool.why == "full"


def test_a_move_to_another_node_costs_a_prefill_where_the_pool_does_not_span_nodes():
    for reaches, then in ((("n1", "n1", "n2"), "b"), (("", "", ""), "c")):
        pool = Pool(KvAware(0.25), fetch_s=0.0)
        for name, reach in zip("abc", reaches, strict=True):
            pool.start(name, reach=reach)
        a, b, c = pool.instances
        pool.load(a, 1, 42)
        pool.load(b, 1, 41)
        assert pool.place(pool.request(home="a")).id == then
        pool.end(pool.chunks[-1])
        pool.load(b, 0, 24)
        pool.load(a, 0, 24)
        assert pool.place(pool.request(home="a")) is c


def test_a_request_leaves_a_slow_home_for_a_faster_instance_with_as_much_in_use(pool):
    a, b = pool.start("a"), pool.start("b")
    pool.load(b, 1, 64)
    pool.slow(a, 2.0)
    assert pool.place(pool.request(home="a")) is b
    assert pool.why == "slow"
    pool.end(pool.chunks[-1])
    pool.load(b, 0, 256 - b.reserved_kv_tokens)
    assert pool.place(pool.request(home="a")) is a, "the faster one is full"


def test_a_request_stays_where_less_than_twice_as_much_is_saved_as_its_move_costs(pool):
    a, b = pool.start("a"), pool.start("b")
    pool.load(a, 1, 0)
    group = pool.group(prompt=100)
    group.finished, group.longest_finished_tokens = 1, 30  # a second for each token of context, and for 30
    for token_s, instance, why in ((13.0, a, "home"), (14.0, b, "slow")):
        pool.slow(a, 2.0, token_s)
        assert pool.place(pool.request(home="a", group=group)) is instance
        assert pool.why == why
        pool.end(pool.chunks[-1])


def test_a_new_request_goes_to_a_slow_instance_only_where_no_faster_one_lets_it_in(pool):
    a, b = pool.start("a"), pool.start("b")
    pool.slow(a, 10.0)
    pool.load(b, 1, 200)
    assert pool.place(pool.request()) is b
    pool.load(b, 0, 256 - b.reserved_kv_tokens)
    assert pool.place(pool.request()) is a


def test_no_request_leaves_a_fast_home_for_a_slow_instance_however_empty(pool):
    a, b = pool.start("a"), pool.start("b")
    pool.slow(b, 2.0)
    pool.load(a, 1, 256 - 10 - CHUNK)
    assert pool.place(pool.request(home="a")) is a


@pytest.mark.parametrize("slowness", [0.75, 1.0, 1.4])
def test_small_differences_of_speed_change_no_choice(pool, slowness):
    a, b = pool.start("a"), pool.start("b")
    pool.slow(a, slowness)
    pool.load(b, 1, 1)
    assert pool.place(pool.request()) is a
    assert pool.place(pool.request(home="b")) is b


def test_an_instance_that_is_no_longer_slow_is_like_the_others(pool):
    a, b = pool.start("a"), pool.start("b")
    pool.load(b, 1, 40)
    pool.slow(a, 4.0)
    assert pool.place(pool.request()) is b
    pool.slow(a, 1.0)
    assert pool.place(pool.request()) is a


def test_a_scorer_adds_a_reason_to_the_choice():
    def prefers_b(request, instance, home):
        return 50.0 if instance.id == "b" else 0.0

    pool = Pool(KvAware(0.25, scorers=[(prefers_b, 2.0)]))
    a, b, c = pool.start("a"), pool.start("b"), pool.start("c")
    pool.load(b, 1, 90)
    assert pool.place(pool.request()) is b
    assert pool.place(pool.request()) is a
    pool.load(b, 0, -b.reserved_kv_tokens)
    assert pool.place(pool.request(home="c")) is b
    assert pool.why == "apart"
    assert c.running == 0


def test_every_choice_says_why(pool):
    a = pool.start("a")

    def why(home=None):
        assert pool.place(pool.request(home=home)) is not None
        pool.end(pool.chunks[-1])
        return pool.why

    assert [why(), why("a")] == ["only", "only"]
    b = pool.start("b")
    assert [why(), why("a"), why("gone")] == ["new", "home", "lost"]
    pool.load(a, 1, 65)
    assert why("a") == "apart"
    pool.load(a, 0, 256 - a.reserved_kv_tokens)
    assert why("a") == "full"
    pool.lose(b)
    pool.load(a, 0, -256)
    assert why("b") == "only"


@pytest.fixture
def sharing():
    return Pool(KvAware(0.25), shares_prompts=True)


def test_a_prompt_takes_room_once_where_siblings_share_it(sharing):
    a = sharing.start("a", kv=100 + 3 * CHUNK, block=1)
    group = sharing.group(prompt=101, size=4)
    # 100 tokens of the prompt for all; its last one, and a chunk, for each.
    for _ in range(2):
        assert sharing.place(sharing.request(group=group), CHUNK - 1) is a
    assert sharing.place(sharing.request(prompt=101), CHUNK - 1) is None
    assert sharing.place(sharing.request(group=group), CHUNK - 1) is a
    assert (a.free_kv_tokens, sharing.place(sharing.request(group=group), 1)) == (0, None)
    while sharing.chunks:
        sharing.end(sharing.chunks[0])
        assert a.free_kv_tokens == (3 - len(sharing.chunks)) * CHUNK + 100 * (not sharing.chunks)


def test_siblings_join_where_their_prompt_is(sharing):
    a, b = sharing.start("a", kv=1024), sharing.start("b", kv=1024)
    group = sharing.group(prompt=101, size=8)
    assert [sharing.place(sharing.request(group=group)) for _ in range(6)] == [a] * 6
    assert sharing.place(sharing.request(prompt=101)) is b


def test_siblings_part_where_loads_are_too_far_apart(sharing):
    a, b = sharing.start("a", kv=1024), sharing.start("b", kv=1024)
    group = sharing.group(prompt=101, size=8)
    assert sharing.place(sharing.request(group=group)) is a
    sharing.load(a, 1, 256 - CHUNK - 1)
    assert sharing.place(sharing.request(group=group)) is a
    assert sharing.place(sharing.request(group=group)) is b


def test_a_short_prompt_keeps_siblings_together_no_longer_than_it_is_worth(sharing):
    a, b = sharing.start("a", kv=1024), sharing.start("b", kv=1024)
    group = sharing.group(prompt=5, size=8)
    placed = [sharing.place(sharing.request(group=group)) for _ in range(4)]
    assert placed == [a, a, b, b]


def test_a_second_copy_of_a_prompt_needs_room_for_more(sharing):
    a, b = sharing.start("a", kv=256), sharing.start("b", kv=4 * 101)
    sharing.load(b, 1, 150)
    group = sharing.group(prompt=101, size=4)
    assert sharing.place(sharing.request(group=group)) is a
    sharing.load(a, 1, a.free_kv_tokens)
    assert sharing.place(sharing.request(group=group)) is None
    assert sharing.place(sharing.request(prompt=101)) is b
    sharing.end(sharing.chunks[-1])
    sharing.load(b, -1, -150)
    assert sharing.place(sharing.request(group=group)) is b


def test_a_request_leaves_home_for_siblings_that_hold_its_prompt(sharing):
    a, b = sharing.start("a", kv=400), sharing.start("b", kv=400)
    group = sharing.group(prompt=151, size=4)
    assert sharing.place(sharing.request(group=group)) is a
    sharing.load(b, 1, 150)
    assert sharing.place(sharing.request(home="b")) is b
    sharing.end(sharing.chunks[-1])
    assert sharing.place(sharing.request(home="b", group=group)) is a
    assert sharing.why == "apart"


def test_no_more_than_some_instances_of_siblings_are_looked_at(sharing):
    looked = []
    for number in range(40):
        sharing.start(f"i{number}", kv=1024)
    group = sharing.group(prompt=101, size=80)
    group.in_flight = {f"i{number}": 1 for number in range(40)}
    admits = sharing.placer._admits
    sharing.placer._admits = lambda *asked: looked.append(asked) or admits(*asked)
    assert sharing.place(sharing.request(group=group)) is not None
    assert len(looked) <= 10


def test_the_heap_stays_bounded(pool):
    rng = random.Random(0)
    for name in "abcdefgh":
        pool.start(name, slots=3)
    for _ in range(5000):
        if pool.place(pool.request(home=rng.choice("abcdefgh"))) is None or rng.random() < 0.4:
            pool.end(rng.choice(pool.chunks))
        assert len(pool.placer._heaps[("", ""), 0]) <= 64 + 4 * len(pool.instances)


def test_nothing_is_kept_of_lost_instances(pool):
    for number in range(1000):
        pool.lose(pool.start(f"i{number}"))
    assert not pool.placer._heaps
    assert not pool.placer._instances
    assert not pool.placer._by_id


def test_the_hook_passes_its_settings_on():
    placer = seer_divided_rollout.seer_make_placer(
        Settings(stay_kv_fraction=0.5, growth_headroom=2.0), SimpleNamespace()
    )
    assert (placer.stay_kv_fraction, placer.growth_headroom) == (0.5, 2.0)


@pytest.fixture
def offering(tmp_path, monkeypatch):
    """Another distribution, which offers the scorer ``prefers_b``."""
    (tmp_path / "of_others.py").write_text(
        "def prefers_b(request, instance, home):\n    return 100.0 if instance.id == 'b' else 0.0\n"
    )
    (tmp_path / "of_others-1.dist-info").mkdir()
    (tmp_path / "of_others-1.dist-info/METADATA").write_text("Metadata-Version: 2.1\nName: of-others\n")
    (tmp_path / "of_others-1.dist-info/entry_points.txt").write_text(
        "[seer.scorers]\nprefers_b = of_others:prefers_b\n"
    )
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.parametrize(("weight", "chosen"), [(0.5, "a"), (1.0, "b"), (0.0, "a")])
def test_settings_weigh_a_scorer_of_another_distribution(offering, weight, chosen):
    pool = Pool(seer_divided_rollout.seer_make_placer(Settings(scorers={"prefers_b": weight}), None))
    for name, used in (("a", 10), ("b", 90)):
        pool.load(pool.start(name), 1, used)
    assert pool.place(pool.request()).id == chosen


def test_without_weight_speed_decides_nothing():
    pool = Pool(seer_divided_rollout.seer_make_placer(Settings(scorers={"speed": 0}), None))
    a, b = pool.start("a"), pool.start("b")
    pool.load(b, 0, 20)
    pool.slow(a, 4.0)
    assert pool.place(pool.request()) is a


def test_a_scorer_that_nothing_offers_is_refused():
    with pytest.raises(ConfigError, match="no installed distribution offers 'sped'; known: "):
        seer_divided_rollout.seer_make_placer(Settings(scorers={"sped": 1}), None)


@pytest.mark.parametrize(
    "table", [{"chunk_tokens": 0}, {"stay_kv_fraction": 1.5}, {"stay_kv_fraction": -0.1}]
)
def test_settings_out_of_range_are_rejected(table):
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(table, Settings)


@pytest.mark.parametrize("how", ["ends_early", "overcommits"])
def test_half_of_a_chunk_is_reserved_where_chunks_end_early_or_kv_is_overcommitted(pool, how):
    a = pool.start("a", kv=10 + CHUNK // 2, **{how: True})
    b = pool.start("b", kv=10 + CHUNK // 2)
    choice = pool.placer.place(pool.request(), CHUNK, pool.instances)
    assert (choice.instance, choice.reserved_tokens) == (a, CHUNK // 2)
    pool.load(a, 1, a.info.kv_capacity_tokens)
    assert pool.placer.place(pool.request(), CHUNK, pool.instances) is None
    choice = pool.placer.place(pool.request(), CHUNK // 2, pool.instances)
    assert (choice.instance, choice.reserved_tokens) == (b, None)


def test_a_slow_instance_that_stood_idle_for_long_is_measured_anew_with_the_next_new_request(pool):
    a, b = pool.start("a"), pool.start("b")
    pool.slow(b, 4.0)
    home = pool.request()
    for _ in range(FORGET_CHOICES):
        assert pool.place(home) is a
        pool.end(pool.chunks[-1])
    assert pool.place(home) is a
    assert pool.place(pool.request()) is b
    assert pool.placer.pace_of(b).slowness == 1.0


def test_a_slow_instance_that_works_stays_slow(pool):
    a, b = pool.start("a"), pool.start("b")
    pool.slow(b, 4.0)
    pool.load(b, 1, 10)
    for _ in range(FORGET_CHOICES + 1):
        assert pool.place(pool.request()) is a
        pool.end(pool.chunks[-1])


@pytest.mark.parametrize(
    ("share", "tokens", "reserved"), [(0.5, 1, 1), (0.5, 7, 4), (0.1, 64, 7), (1.0, 64, None)]
)
def test_a_chunk_has_a_reserved_token_at_least(share, tokens, reserved):
    pool = Pool(KvAware(0.25, 0.0, share))
    pool.start("a", ends_early=True)
    assert pool.placer.place(pool.request(), tokens, pool.instances).reserved_tokens == reserved


def test_kv_of_other_clients_counts_against_an_instance():
    info = InstanceInfo("a", 1600, 16, 8, 1600)
    instance = InstanceStatus(info, 0, running=2, reserved_kv_tokens=400)
    request = Request(GroupContext("g", 0, 1, 10, 100), 0)
    assert other_clients(request, instance, None) == 0
    instance.reported_running, instance.reported_kv_usage = 2, 0.25
    assert other_clients(request, instance, None) == 0
    instance.reported_running, instance.reported_kv_usage = 8, 0.5
    assert other_clients(request, instance, None) == -600  # six of eight use 600 of 800 tokens
    instance.reported_waiting = 8
    assert other_clients(request, instance, None) == -1400
