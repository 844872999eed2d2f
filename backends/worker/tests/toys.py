"""Engines without a model, imported by workers."""

import os
import time
from math import nan
from types import SimpleNamespace

from seer_worker.process.adapter import EndedChunk, Rejected
from seer_worker.process.pooling import PooledRequests
from seer_worker.process.stores import FailsafeStore
from seer_worker.wire import Degraded, Telemetry

from seer_core.errors import EngineError
from seer_core.model import InstanceInfo
from seer_core.model.arrays import TopLogprobs

VOCAB, LONGEST = 64, 256


def preload():
    """Import for a fork server what the toys will need."""
    import seer_worker.process.selftest  # noqa: F401


def make_sampler():
    """Return what chooses by key; the import of PyTorch takes two seconds."""
    from seer_worker.sampling.sampler import Sampler

    return Sampler(VOCAB)


class Toy:
    """Writes a token a step, by key, from logits that depend on the last token."""

    emulated = False

    def __init__(self, start):
        self.start = start
        self.info = InstanceInfo(start.instance_id, 4096, 16, 8, LONGEST)
        self.running = {}
        self.sampler = None if self.emulated else make_sampler()
        self.version = 0
        self.reports = [Degraded("drafting", "no idea yet")] if start.settings.get("degraded") else []
        self.drafts = None if start.source is None else ToyDrafts(self.reports)
        if "refuses" in start.settings:
            raise EngineError(start.settings["refuses"])
        with open(os.path.join(start.scratch, "scratched"), "w"):
            pass

    def submit(self, job, salt):
        if job.token_ids and max(job.token_ids) >= VOCAB:
            raise Rejected("there is no such token")
        self.running[job.id] = (job, [])

    def abort(self, job_ids):
        for job_id in job_ids:
            del self.running[job_id]

    def step(self):
        import torch

        ended = []
        for job, written in list(self.running.values()):
            if job.group_id == "fatal":
                raise RuntimeError("the toy is broken")
            if job.group_id == "cut off":
                raise EOFError("Ran out of input")
            if job.group_id == "mute":
                time.sleep(60)
            if job.group_id == "held":
                continue
            if job.group_id == "failing":
                ended.append(EndedChunk(job.id, failure="no luck"))
            else:
                text = job.token_ids + [token for token, _ in written]
                logits = torch.sin(torch.arange(VOCAB) * (text[-1] + 1.0))[None] * 3
                [token], [logprob] = self.sampler.choose(logits, [job], [len(text)])
                written.append(self.spoil(token, logprob))
                if len(written) == job.max_tokens:
                    ended.append(EndedChunk(job.id, *zip(*written, strict=True)))
        for each in ended:
            del self.running[each.job_id]
        return ended

    def telemetry(self):
        return Telemetry(len(self.running), 0, 0.0)

    def degradations(self):
        reports = list(self.reports)
        self.reports.clear()
        return reports

    def reset_cache(self):
        pass

    def update_weights(self, source, version):
        if "bad" in str(source):
            raise Rejected("these weights are bad")
        self.version = version
        return f"weights {version}" + (f" on {source.base}" if source.base else "")

    def spoil(self, token, logprob):
        return token, logprob

    def watch(self, on):
        return self.sampler.watch.turn(on)

    def close(self):
        pass


class ToyDrafts:
    """Drafts nothing, and reports what it receives."""

    takes_source, paths = False, 1

    def __init__(self, reports):
        self.reports = reports

    def add_sibling_tokens(self, text):
        self.reports.append(Degraded("drafting", f"{text.request_id} goes on with {text.token_ids.tolist()}"))

    def forget(self, group_id):
        pass

    def reset(self):
        pass

    def report(self):
        return 0.0, {}

    def take_degradations(self):
        return []

    def stop(self):
        pass


class Streaming(Toy):
    """Returns what a running chunk has written; one of group ``poisoned`` comes to what is no number."""

    def written(self, job_id, start):
        job, written = self.running[job_id]
        poisoned = [(token, nan if job.group_id == "poisoned" else logprob) for token, logprob in written[5:]]
        streamed = (written[:5] + poisoned)[start:]
        return [token for token, _ in streamed], [logprob for _, logprob in streamed]


class Ranking(Streaming):
    """Also returns the chosen token as the most probable one of each place."""

    def top_logprobs(self, job_id, start, end):
        return TopLogprobs.of([[each] for each in self.running[job_id][1][start:end]])


class Measuring(Toy):
    """Measures the process that it is in."""

    def meters(self):
        return SimpleNamespace(moves=lambda: {"step_s": float(os.getpid())})


class Hesitant(Streaming):
    """Begins a chunk anew once it has written 4 tokens, as after values that are not finite."""

    def step(self):
        for job_id, (job, written) in self.running.items():
            if len(written) == 4 and job_id not in self.begun_anew:
                self.begun_anew.add(job_id)
                self.running[job_id] = (job, [])
        return super().step()

    def __init__(self, start):
        super().__init__(start)
        self.begun_anew = set()


class Endable(Toy):
    """Ends chunks on demand; one of group ``spoilt`` comes to what is no number."""

    def __init__(self, start):
        super().__init__(start)
        self.ending = []

    def end_chunk(self, job_id):
        self.ending.append(job_id)

    def step(self):
        ended = []
        for job_id in self.ending:
            if job_id in self.running:
                _, written = self.running.pop(job_id)
                ended.append(EndedChunk(job_id, *zip(*(written or [(1, -1.0)]), strict=True)))
        for job_id, (job, written) in list(self.running.items()):
            if job.group_id == "spoilt" and len(written) == 2:
                del self.running[job_id]
                ended.append(EndedChunk(job_id, [1], [nan]))
        return [*ended, *super().step()]

    def abort(self, job_ids):
        super().abort(job_ids)
        self.ending = [each for each in self.ending if each not in job_ids]


class Sleepy(Toy):
    """Gives memory back, if it is not set to refuse, and cannot wake from bad weights."""

    def sleep(self):
        if "sleepless" in self.start.settings:
            raise Rejected("it has coffee")
        self.reports.append(Degraded("drafting", "good night"))
        return 4096

    def wake(self):
        self.reports.append(Degraded("drafting", "good morning"))
        if self.version == 13:
            raise RuntimeError("the toy had a nightmare")


class Bare(Toy):
    """Drafts not, and shares no KV."""

    def __init__(self, start):
        super().__init__(start)
        self.drafts = None


class Pooling(Toy):
    """Claims to share KV: counts its steps for the pool, and repeats what the pool has sent."""

    def __init__(self, start):
        super().__init__(start)
        self.store = CountingStore()

    def step(self):
        self.store.note["steps"] = self.store.note.get("steps", 0) + 1
        return super().step()

    def share_kv(self, open_store, report):
        return PooledRequests(FailsafeStore(self.store, report), 16)


class CountingStore:
    """Has a note, and no KV."""

    def __init__(self):
        self.note = {"made": 1}

    def receive(self, note):
        self.note.update(note)

    def take_message(self):
        note, self.note = self.note, {}
        return note


class Slow(Toy):
    """Takes its time over weights."""

    def update_weights(self, source, version):
        time.sleep(30)
        return super().update_weights(source, version)


class Unwatched(Toy):
    """Chooses its tokens elsewhere."""

    def watch(self, on):
        return []


class Greedy(Toy):
    """Takes other tokens than were chosen."""

    def spoil(self, token, logprob):
        return (token + 1) % VOCAB, logprob


class Warm(Toy):
    """Gives log-probs of another temperature."""

    def spoil(self, token, logprob):
        return token, logprob / 2


class Late(Toy):
    """Takes every position for the next one."""

    def __init__(self, start):
        super().__init__(start)
        choose = self.sampler.choose
        self.sampler.choose = lambda logits, jobs, positions: choose(logits, jobs, [positions[0] + 1])


class Seeing(Toy):
    """Takes images, and refuses a chunk whose images it has not."""

    def __init__(self, start):
        super().__init__(start)
        self.images = {}

    def hold_image(self, digest, data):
        self.images[digest] = data

    def drop_images(self, digests):
        for digest in digests:
            del self.images[digest]

    def submit(self, job, salt):
        images = [image["digest"] for image in job.attachments.get("images", [])]
        if missing := [digest for digest in images if digest not in self.images]:
            raise Rejected(f"{missing} are not here")
        super().submit(job, salt)


class Idle(Toy):
    """Never writes a token."""

    def step(self):
        return []


class Failing(Toy):
    """Fails every chunk."""

    def step(self):
        return [EndedChunk(job_id, failure="no luck at all") for job_id in list(self.running)]


class Unfinished:
    """Lacks methods."""
