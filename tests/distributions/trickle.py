"""An engine on the real clock: response 0 of each group is one token long, the others never end.

It says on standard error when it is up, and leaves a file where it was stopped.
"""

import asyncio
import signal
import sys

from msgspec import Struct

from seer_core.errors import EngineError
from seer_core.model import InstanceInfo
from seer_core.model.events import InstanceDegraded, InstanceReported
from seer_core.plugins.hookspecs import hookimpl
from seer_core.ports.clock import RealClock
from seer_core.ports.engine import ChunkOutput, ModelInfo


class Settings(Struct, frozen=True):
    """``signal_after`` responses the process gets ``signal``; ``stuck`` instances never come up.

    Every chunk is given back for the reason ``refusal``, and each start reports the ``degradation``, if any.
    Steps that should have taken a second have taken ``overrun_s`` more.
    """

    instances: int = 1
    stuck: int = 0
    signal: int = 0
    signal_after: int = 1
    die: bool = False
    refusal: str = ""
    degradation: str = ""
    overrun_s: float = 0.0


class Trickle:
    def __init__(self, id, settings, base_dir, stuck):
        self.id = id
        self.settings = settings
        self.base_dir = base_dir
        self.stuck = stuck
        self.finished = 0
        self.starts = 0

    def set_drafter(self, drafter):
        return False

    def add_sibling_tokens(self, text):
        pass

    def set_kv_pool(self, pool):
        return False

    def forget_group(self, group_id):
        pass

    async def measure_steps(self, batch, draft_tokens, context_tokens=None):
        raise EngineError("it takes no time")

    async def start(self, sink):
        self.sink = sink
        self.starts += 1
        print(f"{self.id} is coming up", file=sys.stderr, flush=True)
        if self.stuck or (self.settings.die and self.starts > 1):
            await asyncio.Event().wait()
        if self.settings.degradation:
            sink.degraded(InstanceDegraded(self.id, "drafting", self.settings.degradation, "trickle.log"))
        return InstanceInfo(self.id, 512, 16, 8, 512)

    def submit(self, job):
        if self.settings.refusal:
            give_back = self.sink.chunk_failed
            asyncio.get_running_loop().call_soon(give_back, self.id, job.id, self.settings.refusal)
        elif job.request_id.endswith("/0"):
            asyncio.get_running_loop().call_later(0.001, self.finish, job)

    def finish(self, job):
        size = len(job.token_ids)
        if self.settings.overrun_s:
            overrun_s = self.settings.overrun_s
            self.sink.reported(InstanceReported(self.id, 1, 0, 0.1, emulated_s=1.0, overrun_s=overrun_s))
        self.sink.chunk_finished(
            self.id, ChunkOutput(job.id, [7], [-1.0], True, 0, size, size, 0, job.weight_version)
        )
        self.finished += 1
        if self.settings.signal and self.finished == self.settings.signal_after:
            signal.raise_signal(self.settings.signal)

    def abort(self, job_id):
        pass

    async def reset_cache(self):
        pass

    async def update_weights(self, source, version):
        pass

    async def sleep(self):
        return 0

    async def wake(self):
        pass

    async def stop(self):
        (self.base_dir / f"{self.id}.stopped").touch()


class TrickleFleet:
    def __init__(self, settings, base_dir):
        self.engines = [
            Trickle(f"trickle-{number}", settings, base_dir, number < settings.stuck)
            for number in range(settings.instances)
        ]
        self.clock = RealClock()
        self.model = ModelInfo(1000, 512)
        self.tokenizer = None


@hookimpl
def seer_make_engines(settings, startup):
    return TrickleFleet(settings, startup.base_dir)
