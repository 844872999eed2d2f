"""Notifications beyond the Protocol of a slot: time, labels, instances, groups that are over."""

import attrs
import pytest

from seer_core.errors import PluginError
from seer_core.model import InstanceInfo, Sampling
from seer_core.model.events import GroupSpec, GroupsSubmitted, InstanceStarted
from seer_core.ports.policy import Placement
from seer_core.scheduling.defaults import FirstComeFirstServed, LeastLoaded, WholeRequests
from seer_core.scheduling.scheduler import Policies, Scheduler, Slot


def policies(**strategies):
    """The defaults, with some slots filled by a plug-in called 'mine'."""
    slots = {name: Slot(name, "mine", strategy) for name, strategy in strategies.items()}
    return attrs.evolve(Policies(), **slots)


class Ageing(FirstComeFirstServed):
    """Requests that have waited ten seconds go before all others, then those with the higher priority."""

    def __init__(self):
        super().__init__()
        self.now = 0.0
        self.queue = []

    def tick(self, now):
        self.now = now

    def push(self, request):
        self.queue.append(request)

    def peek(self):
        return min(self.queue, key=self.rank, default=None)

    def rank(self, request):
        group = request.group
        old = self.now - group.arrived_s >= 10
        return not old, -int(group.labels.get("priority", "0")), request.seq

    def take(self, request):
        self.queue.remove(request)

    def __len__(self):
        return len(self.queue)


def test_a_prioritizer_orders_by_label_and_by_age_in_seconds():
    scheduler = Scheduler(policies(prioritizer=Ageing()))
    plain, urgent = GroupSpec("plain", 10, 1, 100), GroupSpec("urgent", 10, 1, 100, labels={"priority": "9"})

    def first(now):
        scheduler.policies.prioritizer.strategy.tick(now)
        return scheduler.policies.prioritizer.strategy.peek().id

    scheduler.handle(GroupsSubmitted((plain,)), 1.0)
    scheduler.handle(GroupsSubmitted((urgent,)), 5.0)
    assert [first(5.0), first(11.0), first(15.0)] == ["urgent/0", "plain/0", "urgent/0"]
    (dispatch,) = scheduler.handle(InstanceStarted(InstanceInfo("a", 1000, 1, 1, 1000)), 11.0)
    assert dispatch.request_id == "plain/0"


def test_the_time_comes_before_anything_else_of_an_event_and_once(make_rig):
    notified = []

    class Both(FirstComeFirstServed, LeastLoaded):
        def tick(self, now):
            notified.append(now)

        def push(self, request):
            notified.append(request.id)
            super().push(request)

    both = Both()
    rig = make_rig(policies(prioritizer=both, placer=both))
    rig.group("g", n=2)
    assert notified == [rig.now, "g/0", "g/1"]


def test_a_group_shows_its_sampling_its_labels_and_when_it_arrived(make_rig):
    rig = make_rig()
    rig.submit(GroupSpec("g", 10, 1, 100, None, Sampling(0.5), {"tenant": "a"}))
    (group,) = rig.scheduler.contexts
    assert (group.sampling, group.labels, group.arrived_s) == (Sampling(0.5), {"tenant": "a"}, rig.now)


def test_group_changed_says_which_response_ended_and_how_long_it_is(make_rig):
    notified = []

    class Learning(FirstComeFirstServed):
        def group_changed(self, group, request):
            notified.append((group.id, request.index, request.generated_tokens, group.left))

    rig = make_rig(policies(prioritizer=Learning()))
    rig.start("a")
    rig.group("g", n=3)
    rig.finish("g/1", 7, stopped=True)
    rig.abort("g/0")
    rig.finish("g/2")
    assert notified == [("g", 1, 7, 2), ("g", 0, 0, 1), ("g", 2, 100, 0)]


def test_splitters_and_placers_learn_that_a_group_is_over(make_rig):
    over = []

    class Placing(LeastLoaded):
        def group_over(self, group):
            over.append(("placer", group.id))

    class Splitting(WholeRequests):
        def group_over(self, group):
            over.append(("splitter", group.id))

    rig = make_rig(policies(splitter=Splitting(), placer=Placing()))
    rig.start("a")
    rig.group("g", n=2)
    rig.finish("g/0")
    assert over == []
    rig.abort("g/1")
    assert over == [("splitter", "g"), ("placer", "g")]


def test_a_wrapped_strategy_is_notified_too(make_rig):
    notified = []

    class Inner(LeastLoaded):
        def tick(self, now):
            notified.append("time")

        def group_over(self, group):
            notified.append(group.id)

    class Outer:
        def __init__(self, inner):
            self.inner = inner

        def place(self, request, chunk_tokens, instances):
            return Placement(self.inner.place(request, chunk_tokens, instances), "outer")

    inner = Inner()
    placer = Slot("placer", "outer", Outer(inner), Slot("placer", "inner", inner))
    rig = make_rig(Policies(placer=placer))
    rig.start("a")
    assert rig.group("g")[0].why == "outer"
    rig.finish("g/0")
    assert notified == ["time", "time", "time", "g"]


def test_an_object_in_two_slots_is_notified_once_of_a_lost_instance(make_rig):
    notified = []

    class Both(WholeRequests, LeastLoaded):
        def instance_started(self, instance):
            notified.append(f"+{instance.id}")

        def instance_lost(self, instance):
            notified.append(f"-{instance.id}")

    both = Both()
    rig = make_rig(policies(splitter=both, placer=both))
    rig.start("a")
    rig.lose("a")
    assert notified == ["+a", "-a"]


@pytest.mark.parametrize("method", ["tick", "group_over"])
def test_one_that_raises_when_it_is_notified_is_named(make_rig, method):
    def fail(self, *given):
        raise ZeroDivisionError("oh")

    class Broken(LeastLoaded):
        pass

    setattr(Broken, method, fail)
    rig = make_rig(policies(placer=Broken()))

    def live():
        rig.start("a")
        rig.group("g")
        rig.finish("g/0")

    with pytest.raises(PluginError, match=r"plug-in 'mine', slot 'placer'.*ZeroDivisionError: oh"):
        live()
