"""A limit on how many chunks an instance gets at once, set while a rollout runs."""

import pytest
from seer_host.config_files import make_config
from seer_session.runtime import Runtime

from seer_core.errors import EngineError
from seer_core.model.events import ChunkFinished, Dispatch, InstanceLimited
from seer_core.ports.policy import Observer

from .helpers import outputs, play

PLUGINS = [
    [],
    ["divided_rollout"],
    ["divided_rollout", "context_sched"],
    ["divided_rollout", "length_posterior"],
]


class Running(Observer):
    """How many chunks run on each instance, and how many ran there when one was sent since ``begin``."""

    def __init__(self):
        self.running, self.most, self.limits = {}, {}, []

    def begin(self):
        self.most = {}

    def observe(self, now, event, commands):
        if isinstance(event, ChunkFinished):
            self.running[event.instance_id].discard(event.request_id)
        elif isinstance(event, InstanceLimited):
            self.limits.append((event.instance_id, event.max_running, event.by))
        for command in commands:
            if isinstance(command, Dispatch):
                name = command.instance_id
                self.running.setdefault(name, set()).add(command.request_id)
                self.most[name] = max(self.most.get(name, 0), len(self.running[name]))


@pytest.mark.parametrize("plugins", PLUGINS, ids=["defaults", *("-".join(each) for each in PLUGINS[1:])])
def test_a_limit_holds_under_each_policy_until_it_is_raised_and_changes_no_token(
    plugins, some_groups, tmp_path
):
    tables = {
        "seer": {"engine": "sim", "plugins": plugins},
        "engine": {"sim": {"instances": 2, "max_running": 4}},
    }
    found = Running()

    async def run(limited):
        async with Runtime.from_config(
            make_config(tables, base_dir=tmp_path, origin="a test"), [found]
        ) as runtime:
            rollout = runtime.rollout(some_groups(24, 2, max_tokens=400))
            for number in range(48):
                if limited and number == 6:
                    runtime.limit("sim-0", 1, by="me")
                if limited and number == 14:
                    found.begin()  # by now what ran above the limit is over
                if limited and number == 26:
                    assert found.most["sim-0"] == 1
                    assert found.most["sim-1"] == 4
                    runtime.limit("sim-0", 4)
                await anext(rollout)
            return await rollout.wait()

    assert outputs(play(run(True))) == outputs(play(run(False)))
    assert found.limits == [("sim-0", 1, "me"), ("sim-0", 4, "")]
    assert found.most["sim-0"] > 1


def test_what_cannot_be_a_limit_is_refused_by_name(tmp_path):
    tables = {"seer": {"engine": "sim"}, "engine": {"sim": {"max_running": 4}}}

    async def run():
        async with Runtime.from_config(make_config(tables, base_dir=tmp_path, origin="a test")) as runtime:
            for limit in (0, 5):
                with pytest.raises(
                    EngineError, match=r"'sim-0' runs 1 to 4 requests at once \(max_running\)"
                ):
                    runtime.limit("sim-0", limit)
            with pytest.raises(EngineError, match=r"there is no instance 'x'; there are sim-0"):
                runtime.limit("x", 1)

    play(run())
