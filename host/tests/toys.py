"""Engines without a model, imported by workers."""

import os
import time

from seer_host.instance import Refusal
from seer_host.wire import Failed, Finished, Load, Troubled

from seer_core.errors import EngineError
from seer_core.model import InstanceInfo
from seer_core.ports import ChunkOutput

VOCAB, LONGEST = 64, 256


class Toy:
    """Writes a token a step; token p of seed s is a function of both."""

    def __init__(self, start):
        self.start = start
        self.info = InstanceInfo(start.instance_id, 4096, 16, 8, LONGEST)
        self.running = {}
        self.version = 0
        self.told = [Troubled("drafting", "no idea yet")] if start.settings.get("troubled") else []
        if "refuses" in start.settings:
            raise EngineError(start.settings["refuses"])
        with open(os.path.join(start.scratch, "scratched"), "w"):
            pass

    def submit(self, job):
        if job.token_ids and max(job.token_ids) >= VOCAB:
            raise Refusal("there is no such token")
        self.running[job.id] = (job, [])

    def abort(self, job_id):
        del self.running[job_id]

    def step(self):
        ended = []
        for job, written in list(self.running.values()):
            if job.group_id == "fatal":
                raise RuntimeError("the toy is broken")
            if job.group_id == "mute":
                time.sleep(60)
            if job.group_id == "failing":
                ended.append(Failed(job.id, "no luck"))
            else:
                position = len(job.token_ids) + len(written)
                written.append((job.seed * 31 + position * 7) % VOCAB)
                if len(written) == job.max_tokens:
                    ended.append(Finished(self.output(job, written)))
        for result in ended:
            del self.running[result.job_id if isinstance(result, Failed) else result.output.job_id]
        return ended

    def output(self, job, written):
        size = len(job.token_ids)
        return ChunkOutput(
            job_id=job.id,
            token_ids=written,
            logprobs=[-1.0] * len(written),
            stopped=False,
            cached_tokens=0,
            prefilled_tokens=size,
            computed_tokens=size + len(written) - 1,
            preemptions=0,
            weight_version=self.version,
        )

    def load(self):
        return Load(len(self.running), 0, 0.0)

    def troubles(self):
        told, self.told = self.told, []
        return told

    def forget_group(self, group_id):
        self.told.append(Troubled("drafting", f"{group_id} is forgotten"))

    def measure_steps(self, batch, draft_tokens, context_tokens):
        raise Refusal("it has no clock")

    def reset_cache(self):
        pass

    def update_weights(self, source, version):
        if "bad" in source:
            raise Refusal("these weights are bad")
        self.version = version
        return f"weights {version}"

    def close(self):
        pass


class Unfinished:
    """Lacks methods."""
