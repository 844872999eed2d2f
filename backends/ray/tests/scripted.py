"""An engine without a model, imported by workers: a token follows from the seed and the position alone."""

import hashlib
import sys
import time

from seer_worker.wire import Finished, Telemetry

from seer_core.model import InstanceInfo
from seer_core.ports.engine import ChunkOutput


class Scripted:
    """Writes a token a step to each chunk, and its first to its log."""

    emulated = True

    def __init__(self, start):
        self.info = InstanceInfo(start.instance_id, 4096, 16, 8, 1024)
        self.step_s = start.settings["step_s"]
        self.running = {}
        print(f"{start.instance_id} runs", file=sys.stderr, flush=True)

    def submit(self, job):
        self.running[job.id] = (job, [])

    def abort(self, job_id):
        del self.running[job_id]

    def step(self):
        time.sleep(self.step_s)
        ended = []
        for job, written in list(self.running.values()):
            written.append(token_at(job.seed, len(job.token_ids) + len(written)))
            if len(written) == job.max_tokens:
                del self.running[job.id]
                ended.append(Finished(output(job, written)))
        return ended

    def telemetry(self):
        return Telemetry(len(self.running), 0, 0.0)

    def measure_steps(self, batch, draft_tokens, context_tokens):
        raise NotImplementedError

    def reset_cache(self):
        pass

    def update_weights(self, source, version):
        return f"weights {version}"

    def watch(self, on):
        return []

    def close(self):
        pass


def token_at(seed, position):
    digest = hashlib.sha256(f"{seed}/{position}".encode()).digest()
    return 3 + int.from_bytes(digest[:2], "big")


def output(job, written):
    size = len(job.token_ids)
    return ChunkOutput(
        job_id=job.id,
        token_ids=written,
        logprobs=[0.0] * len(written),
        stopped=False,
        cached_tokens=0,
        prefilled_tokens=size,
        computed_tokens=size + len(written) - 1,
        preemptions=0,
        weight_version=job.weight_version,
    )
