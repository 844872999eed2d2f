"""An engine without a model, imported by workers: a token follows from the seed and the position alone."""

import hashlib
import sys
import time

from seer_worker.process.adapter import EndedChunk
from seer_worker.wire import Telemetry

from seer_core.model import InstanceInfo


class Scripted:
    """Writes a token a step to each chunk, and its first to its log."""

    emulated = True

    def __init__(self, start):
        self.info = InstanceInfo(start.instance_id, 4096, 16, 8, 1024)
        self.step_s = start.settings["step_s"]
        self.running = {}
        print(f"{start.instance_id} runs", file=sys.stderr, flush=True)

    def submit(self, job, salt):
        self.running[job.id] = (job, [])

    def abort(self, job_ids):
        for job_id in job_ids:
            del self.running[job_id]

    def step(self):
        time.sleep(self.step_s)
        ended = []
        for job, written in list(self.running.values()):
            written.append(token_at(job.seed, len(job.token_ids) + len(written)))
            if len(written) == job.max_tokens:
                del self.running[job.id]
                ended.append(EndedChunk(job.id, written, [0.0] * len(written)))
        return ended

    def telemetry(self):
        return Telemetry(len(self.running), 0, 0.0)

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
