from __future__ import annotations

import random
from types import SimpleNamespace

import hypothesis.strategies as st
import msgspec
import pytest
import seer_divided_rollout
from hypothesis import given, settings
from seer_divided_rollout import KvAware, Settings

from seer_core.errors import ConfigError
from seer_core.model import GroupContext, InstanceInfo, InstanceStatus, Request
from seer_core.policy import Placer

CHUNK = 16


class Reference:
    """The placer's promise, by looking at every instance each time."""

    def __init__(self, stay_kv_fraction, growth_headroom=0.0):
        self.stay_kv_fraction = stay_kv_fraction
        self.growth_headroom = growth_headroom
        self.chosen = {}
        self.choices = 0

    def place(self, request, chunk_tokens, instances):
        free = [instance for instance in instances if instance.free_slots > 0]
        if not free:
            return None
        best = min(free, key=lambda status: (-status.free_kv_tokens, self.chosen.get(status, 0), status.seq))
        cost = best.info.move_cost
        for home in free:
            gap = best.free_kv_tokens - home.free_kv_tokens
            if (
                home.id == request.instance
                and self.fits(home, request, chunk_tokens)
                and gap <= self.stay_kv_fraction * cost * home.info.kv_capacity_tokens
            ):
                best = home
        growth = 0 if best.id == request.instance else self.growth_headroom * cost * CHUNK * best.running
        if best.footprint(request, chunk_tokens) + growth > best.free_kv_tokens:
            return None
        self.choices += 1
        self.chosen[best] = self.choices
        return best

    @staticmethod
    def fits(status, request, chunk_tokens):
        return status.footprint(request, chunk_tokens) <= status.free_kv_tokens


class Pool:
    """Instances with chunks on them; does the scheduler's books for a placer."""

    def __init__(self, placer, fetch_s=None):
        self.placer = placer
        self.fetch_s = fetch_s
        self.instances = []
        self.chunks = []
        self.seen = 0
        self.requests = 0

    def start(self, name, kv=256, block=1, slots=8):
        instance = InstanceStatus(InstanceInfo(name, kv, block, slots, kv, 0, 1.0, self.fetch_s), self.seen)
        self.seen += 1
        self.placer.instance_changed(instance)
        self.instances.append(instance)
        return instance

    def lose(self, instance):
        self.instances.remove(instance)
        self.chunks = [chunk for chunk in self.chunks if chunk[1] is not instance]
        self.placer.instance_lost(instance)

    def load(self, instance, running, kv):
        instance.running += running
        instance.reserved_kv_tokens += kv
        self.placer.instance_changed(instance)

    def request(self, prompt=10, home=None):
        group = GroupContext("g", 0, 1, prompt, 1000)
        self.requests += 1
        return Request(f"g/{self.requests}", self.requests, 0, group, instance=home)

    def place(self, request, tokens=CHUNK):
        instance = self.placer.place(request, tokens, self.instances)
        if instance is not None:
            footprint = instance.footprint(request, tokens)
            request.instance = instance.id
            self.chunks.append((request, instance, footprint))
            self.load(instance, 1, footprint)
        return instance

    def end(self, chunk):
        self.chunks.remove(chunk)
        _, instance, footprint = chunk
        self.load(instance, -1, -footprint)


@pytest.fixture
def pool():
    return Pool(KvAware(CHUNK, 0.25))


def test_it_is_a_placer():
    assert isinstance(KvAware(1, 0.0), Placer)


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
    pool = Pool(KvAware(CHUNK, 1.0))
    a, b = pool.start("a"), pool.start("b")
    pool.load(a, 1, 256 - CHUNK)
    assert pool.place(pool.request(home="a")) is b


def test_fraction_0_leaves_home_for_any_gain():
    pool = Pool(KvAware(CHUNK, 0.0))
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


def test_a_chunk_larger_than_an_instance_s_kv_is_a_config_error():
    pool = Pool(KvAware(2048, 0.25))
    with pytest.raises(
        ConfigError, match=r"chunk_tokens is 2048, but the KV cache of instance 'a' holds 256"
    ):
        pool.start("a", kv=256)


def test_the_last_block_of_a_chunk_counts_too():
    Pool(KvAware(48, 0.25)).start("a", kv=48, block=16)
    with pytest.raises(ConfigError, match="chunk_tokens"):
        Pool(KvAware(49, 0.25)).start("a", kv=63, block=16)


@settings(max_examples=150, deadline=None)
@given(
    stay=st.sampled_from([0.0, 0.1, 0.25, 1.0]),
    headroom=st.sampled_from([0.0, 0.5, 1.0]),
    fetch_s=st.sampled_from([None, 0.0, 0.5]),
    block=st.sampled_from([1, 16]),
    data=st.data(),
)
def test_choices_equal_those_of_a_look_at_every_instance(stay, headroom, fetch_s, block, data):
    pool, reference = Pool(KvAware(CHUNK, stay, headroom), fetch_s), Reference(stay, headroom)
    homes = st.sampled_from([None, "a", "b", "c", "d"])
    for _ in range(data.draw(st.integers(5, 60))):
        steps = ["place", "place", "place"]
        free = sorted(set("abcd") - {instance.id for instance in pool.instances})
        steps += ["start"] * bool(free) + ["lose"] * bool(pool.instances) + ["end"] * 2 * bool(pool.chunks)
        step = data.draw(st.sampled_from(steps))
        if step == "start":
            pool.start(
                free[0], data.draw(st.sampled_from([32, 64, 256])), block, data.draw(st.integers(1, 4))
            )
        elif step == "lose":
            pool.lose(data.draw(st.sampled_from(pool.instances)))
        elif step == "end":
            pool.end(data.draw(st.sampled_from(pool.chunks)))
        else:
            request = pool.request(data.draw(st.integers(1, 40)), data.draw(homes))
            tokens = data.draw(st.integers(1, CHUNK))
            expected = reference.place(request, tokens, pool.instances)
            assert pool.place(request, tokens) is expected
        for instance in pool.instances:
            assert 0 <= instance.reserved_kv_tokens <= instance.info.kv_capacity_tokens
            assert 0 <= instance.running <= instance.info.max_running


def test_a_newcomer_leaves_room_for_the_next_chunk_of_those_in_flight():
    pool = Pool(KvAware(CHUNK, 0.25, 1.0))
    pool.start("a", kv=7 * CHUNK, block=CHUNK)
    assert pool.place(pool.request()) is not None
    assert pool.place(pool.request()) is not None
    assert pool.place(pool.request()) is None
    assert pool.place(pool.request(home="a")) is not None


def test_where_kv_is_shared_a_newcomer_leaves_as_much_less_room_as_its_move_costs_less():
    pool = Pool(KvAware(CHUNK, 0.25, 1.0), fetch_s=0.5)
    pool.start("a", kv=7 * CHUNK, block=CHUNK)
    for _ in range(2):
        assert pool.place(pool.request()) is not None
    assert pool.place(pool.request()) is not None
    free = Pool(KvAware(CHUNK, 0.25, 1.0), fetch_s=0.0)
    free.start("a", kv=6 * CHUNK, block=CHUNK)
    for _ in range(3):
        assert free.place(free.request()) is not None


def test_where_kv_is_shared_a_request_leaves_home_as_much_sooner_as_its_move_costs_less():
    pool = Pool(KvAware(CHUNK, 0.25), fetch_s=0.5)
    a, b = pool.start("a"), pool.start("b")
    pool.load(a, 1, 32)
    assert pool.place(pool.request(home="a")) is a
    pool.load(a, 0, 33 - a.reserved_kv_tokens)
    assert pool.place(pool.request(home="a")) is b


def test_every_choice_says_why(pool):
    a = pool.start("a")

    def why(home=None):
        assert pool.place(pool.request(home=home)) is not None
        pool.end(pool.chunks[-1])
        return pool.placer.why

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


def test_the_heap_stays_bounded(pool):
    rng = random.Random(0)
    for name in "abcdefgh":
        pool.start(name, slots=3)
    for _ in range(5000):
        if pool.place(pool.request(home=rng.choice("abcdefgh"))) is None or rng.random() < 0.4:
            pool.end(rng.choice(pool.chunks))
        assert len(pool.placer._heap) <= 64 + 4 * len(pool.instances)


def test_nothing_is_kept_of_lost_instances(pool):
    for number in range(1000):
        pool.lose(pool.start(f"i{number}"))
    assert len(pool.placer._heap) <= 65
    assert not pool.placer._instances
    assert not pool.placer._by_id


def test_the_hook_passes_its_settings_on():
    placer = seer_divided_rollout.seer_make_placer(
        Settings(chunk_tokens=7, stay_kv_fraction=0.5), SimpleNamespace()
    )
    assert (placer.chunk_tokens, placer.stay_kv_fraction) == (7, 0.5)


@pytest.mark.parametrize(
    "table", [{"chunk_tokens": 0}, {"stay_kv_fraction": 1.5}, {"stay_kv_fraction": -0.1}]
)
def test_settings_out_of_range_are_rejected(table):
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(table, Settings)
