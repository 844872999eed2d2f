"""Observers beyond events: completions, the KV pool's figures, and one line to wire one."""

import asyncio
from itertools import pairwise

import pytest
from seer_host.config_files import load_config
from seer_session.assembly import assemble
from seer_session.runtime import Runtime
from seer_session.session import rollout

from seer_core.errors import PluginError
from seer_core.model.events import InstanceStopped
from seer_core.runtime.observers import ObserverHub
from seer_core.scheduling.scheduler import Slot

PROMPTS = [{"prompt": f"number {number}", "n": 3, "max_tokens": 40} for number in range(4)]


class Watching:
    """Sees everything there is to see."""

    def __init__(self):
        self.completions = []
        self.pool = []
        self.events = 0

    def observe(self, now, event, commands):
        self.events += 1

    def completed(self, now, completion):
        self.completions.append((now, completion))

    def pool_reported(self, now, stats):
        self.pool.append((now, stats))


def test_an_observer_sees_each_completion_when_it_is_over(write_config):
    watching = Watching()
    result = rollout(write_config(), PROMPTS, observers=[watching])
    assert [completion for _, completion in watching.completions] == result.completions
    assert all(now == completion.finished_s for now, completion in watching.completions)


def test_an_observer_sees_the_pool_s_figures_not_too_often_and_at_the_end(write_config):
    watching = Watching()
    more = "[engine.sim]\nreport_interval_s = 0.01\n[kv_pool.sim_pool]\ndram_bytes = 1000000000"
    config = load_config(write_config(["divided_rollout"], more, seer='kv_pool = "sim_pool"'))
    prompts = [{"prompt": "long", "n": 8, "max_tokens": 4000}]
    rollout(config, prompts, observers=[watching])
    times = [now for now, _ in watching.pool]
    assert len(times) > 2
    assert all(later - earlier >= 1.0 for earlier, later in pairwise(times[:-1]))
    assert {stats.capacity_bytes for _, stats in watching.pool} == {10**9}
    assert watching.pool[-1][1].put_bytes >= watching.pool[0][1].put_bytes


def test_without_a_pool_observers_get_no_figures_of_one(write_config):
    watching = Watching()
    rollout(write_config(seer='kv_pool = "none"'), PROMPTS, observers=[watching])
    assert watching.pool == []


@pytest.mark.parametrize("method", ["completed", "pool_reported"])
def test_one_that_raises_is_left_out_and_the_others_go_on(write_config, tmp_path, method):
    class Fragile(Watching):
        pass

    def fail(self, now, seen):
        raise ZeroDivisionError("oh")

    setattr(Fragile, method, fail)
    fragile, other = Fragile(), Watching()
    more = "[engine.sim]\nreport_interval_s = 0.01\n[kv_pool.sim_pool]\ndram_bytes = 1000000000"
    config = load_config(write_config(["divided_rollout"], more, seer='kv_pool = "sim_pool"'))

    result = rollout(config, PROMPTS, observers=[fragile, other])
    assert result.summary.observers_failed == 1
    assert len(other.completions) == 12
    assert fragile.events < other.events
    debugging = load_config(tmp_path / "seer.toml", ["seer.debug=true"])
    with pytest.raises(PluginError, match="slot 'observer': raised ZeroDivisionError: oh"):
        rollout(debugging, PROMPTS, observers=[Fragile()])


def test_a_pool_that_cannot_report_its_figures_is_asked_once_and_observers_go_on(write_config):
    more = "[engine.sim]\nreport_interval_s = 0.01\n[kv_pool.sim_pool]\ndram_bytes = 1000000000"
    assembly = assemble(load_config(write_config(["divided_rollout"], more, seer='kv_pool = "sim_pool"')))
    asked = []
    watching = Watching()

    async def run():
        async with Runtime(assembly.with_observer(watching)) as runtime:
            assembly.kv_pool.strategy.stats = lambda: asked.append(1) or 1 / 0
            return await runtime.rollout(runtime.groups(PROMPTS)).wait()

    assert len(asyncio.run(run()).completions) == 12
    assert (len(asked), watching.pool) == (1, [])


def test_an_observer_that_has_stopped_is_shown_nothing_while_the_others_stop():
    class Last(Watching):
        async def start(self):
            pass

        async def stop(self):
            hub.notify(1.0, InstanceStopped("a"), [])

    first, last = Watching(), Last()
    hub = ObserverHub([Slot("observer", "first", first), Slot("observer", "last", last)])

    async def run():
        await hub.start()
        hub.notify(0.5, InstanceStopped("b"), [])
        await hub.stop()

    asyncio.run(run())
    assert (first.events, last.events) == (1, 1)
