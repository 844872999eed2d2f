"""Rollouts of scripted engines, and what their tests wait for."""

import asyncio
import os
from pathlib import Path

import ray
from seer_divided_rollout import Chunks
from seer_host.tables import SeerTable
from seer_ray.launcher import RayLauncher
from seer_ray.settings import Settings
from seer_session.runtime import Runtime
from seer_worker.client.process_client import Launch, ProcessClient

from seer_core.model import PromptGroup
from seer_core.model.events import ChunkFinished, InstanceLost
from seer_core.plugins.slots import Assembly, Strategies
from seer_core.ports.clock import RealClock
from seer_core.ports.engine import ModelInfo, PlainFleet
from seer_core.scheduling.scheduler import Policies, Slot
from tests.support.eventually import PATIENCE_S, aeventually
from tests.support.processes import alive

HERE = str(Path(__file__).parent)
START_S = 2 * PATIENCE_S
"""How long a start may take that ends well: Ray starts its own processes first."""
LIMIT_S = 4 * PATIENCE_S
"""How long a whole rollout may take, its starts and ends included."""


def patient(address, **changes):
    """Return settings of a launcher that waits for a slow machine."""
    return Settings(address=address, **{"launch_timeout_s": START_S} | changes)


def play(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, LIMIT_S))


def some_groups():
    return [
        PromptGroup(id=f"g{n}", prompt_token_ids=tuple(range(10, 20 + n)), n=4, max_tokens=96, seed=n)
        for n in range(4)
    ]


def tokens(result):
    return {each.request_id: each.token_ids.tolist() for each in result.completions}


class Reaper:
    """Calls ``kill`` once, when some chunks have finished, and sets ``lost`` once an instance is."""

    def __init__(self, kill):
        self.kill, self.seen = kill, 0
        self.lost = asyncio.Event()

    def observe(self, now, event, commands):
        self.seen += isinstance(event, ChunkFinished)
        if self.seen == 5 and isinstance(event, ChunkFinished):
            self.kill()
        if isinstance(event, InstanceLost):
            self.lost.set()


async def gone(*pids):
    """Wait until these processes are, which are children of others, have ended."""
    await aeventually(lambda: not any(map(alive, pids)))


async def places():
    """Return how many places are taken or asked for."""
    table = await asyncio.to_thread(ray.util.placement_group_table)
    return sum(each["state"] != "REMOVED" for each in table.values())


def workers_of(runtime):
    return [engine.worker.started for engine in runtime._fleet.engines.values()]


def scripted_runtime(log_dir, launcher, *observers, step_s=0.0, instances=2, seer=None, **changes):
    """Return a runtime of scripted engines over a launcher."""
    environment = {} if isinstance(launcher, RayLauncher) else dict(os.environ)
    paths = [HERE, os.environ.get("PYTHONPATH", "")]
    launch = Launch(
        **{
            "instance": "scripted:Scripted",
            "settings": {"step_s": step_s},
            "environment": environment | {"PYTHONPATH": os.pathsep.join(paths)},
            "launcher": launcher,
            "log_dir": log_dir,
            "start_timeout_s": START_S,
            "stop_timeout_s": 5.0,
            "control_timeout_s": PATIENCE_S,
            "silence_timeout_s": PATIENCE_S,
        }
        | changes
    )
    engines = [ProcessClient(f"scripted-{number}", launch) for number in range(instances)]
    policies = Policies(splitter=Slot("splitter", "test", Chunks(16)))
    slots = tuple(Slot("observer", "test", each) for each in observers)
    fleet = PlainFleet(engines, RealClock(), ModelInfo(1 << 17, 1024), None)
    return Runtime(Assembly(fleet, Strategies(policies, slots)), seer or SeerTable())


def tokens_in_group(log_dir, name, cpus):
    """Return the tokens of a rollout in a placement group of the Ray program that calls this."""

    async def there():
        launcher = RayLauncher(patient("", cpus=cpus, placement_groups=[name]))
        async with scripted_runtime(log_dir, launcher) as runtime:
            return tokens(await runtime.rollout(some_groups()).wait())

    return play(there())
