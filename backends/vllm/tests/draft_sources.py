"""Draft sources for tests, imported by workers; they check what they are given as they go."""

import json
import random
from pathlib import Path

import numpy as np

VOCAB = 128


class Scripted:
    """Drafts as the name of the group says: perfect, garbage, mixed, raise, beyond, foreign; else nothing.

    ``perfect`` and ``mixed`` read the responses from the file ``answers.json``, a list by seed.
    """

    def __init__(self, settings, host):
        self.host = host
        self.notes = Path(settings["notes"])
        self.random = random.Random(1)
        self.open_jobs = {}
        self.seen = {}
        self.answers = {}
        self.handle = 0
        self.proposals = 0
        self.note("made", host.draft_tokens, host.vocab_size, host.max_running, host.max_model_tokens)

    def note(self, *words):
        with (self.notes / "calls.jsonl").open("a") as file:
            file.write(json.dumps(words) + "\n")

    def open(self, job):
        self.handle += 1
        self.open_jobs[self.handle] = job
        if job.group_id in ("perfect", "mixed"):
            answers = json.loads((self.notes / "answers.json").read_text())
            self.answers[self.handle] = job.token_ids[: job.prompt_tokens] + answers[job.seed]
        self.note("open", self.handle, job.id, len(job.token_ids))
        return self.handle

    def propose(self, batch):
        self.proposals += 1
        size = len(batch.handles)
        assert size == len(batch.rows) == len(batch.counts) == len(batch.limits) == len(set(batch.rows))
        assert batch.drafts.shape == (size, self.host.draft_tokens)
        assert {array.dtype for array in (batch.tokens, batch.drafts, batch.lengths)} == {np.dtype(np.int32)}
        assert not batch.counts.any()
        for b, handle in enumerate(batch.handles.tolist()):
            job, length, sampled = self.open_jobs[handle], int(batch.lengths[b]), int(batch.sampled[b])
            text = batch.tokens[batch.rows[b], :length].tolist()
            assert text[: len(job.token_ids)] == job.token_ids
            assert length == self.seen.get(handle, len(job.token_ids)) + sampled
            self.seen[handle] = length
            left = len(job.token_ids) + job.max_tokens - length
            limit = int(batch.limits[b])
            assert limit == (max(min(self.host.draft_tokens, left - 1), 0) if sampled else 0)
            draft = self.draft(job.group_id, handle, length, limit)
            batch.counts[b] = len(draft)
            batch.drafts[b, : len(draft)] = draft[: self.host.draft_tokens]

    def draft(self, group, handle, length, limit):
        match group:
            case "perfect":
                return self.answers[handle][length : length + limit]
            case "garbage":
                return [self.random.randrange(VOCAB) for _ in range(limit)]
            case "mixed":
                true = self.answers[handle][length : length + self.random.randint(0, limit)]
                return [token if self.random.random() < 0.8 else 7 for token in true]
            case "raise":
                raise ValueError("no draft today")
            case "foreign":
                return [VOCAB] * limit
            case "beyond":
                return [1] * (limit + 1)
        return []

    def close(self, handle):
        del self.open_jobs[handle]
        self.note("close", handle)

    def forget(self, group_id):
        self.note("forget", group_id)

    def reset(self):
        assert not self.open_jobs
        self.note("reset")

    def stats(self):
        return {"proposals": float(self.proposals), "open": float(len(self.open_jobs))}

    def stop(self):
        self.note("stop")


class Unfinished:
    """Lacks methods."""

    def open(self, job):
        return 0


class Broken(Scripted):
    """Cannot be made."""

    def __init__(self, settings, host):
        raise RuntimeError("the draft server is not there")
