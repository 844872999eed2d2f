"""A draft source with a file of what will be written, imported by workers."""

import json
from pathlib import Path


class Prepared:
    """Drafts trees from a file of texts by seed: each token beside a wrong one, or as the group is called."""

    def __init__(self, settings, host):
        self.texts = Path(settings["texts"])
        self.paths = host.paths
        self.jobs, self.known = {}, {}

    def open(self, job):
        handle = len(self.jobs)
        self.jobs[handle] = job
        self.known[handle] = list(job.token_ids)
        return handle

    def close(self, handle):
        del self.known[handle]

    def propose(self, batch):
        texts = json.loads(self.texts.read_text()) if self.texts.exists() else {}  # not yet in the self-test
        for b, (handle, written) in enumerate(zip(batch.handles.tolist(), batch.each_written(), strict=True)):
            job, known = self.jobs[handle], self.known[handle]
            known += written.tolist()
            assert len(known) == batch.lengths[b]
            if job.group_id == "failing":
                raise RuntimeError("no luck")
            to_come = texts.get(str(job.seed), [])[len(known) :]
            tokens, parents, last = [], [], -1
            for token in to_come:
                twins = [(token + 1) % 100, token] if self.paths > len(tokens) // 2 + 1 else [token]
                if job.group_id == "wrong":
                    twins = [(token + 1) % 100]
                if len(tokens) + len(twins) > batch.limits[b]:
                    break
                tokens += twins
                parents += [last] * len(twins)
                last = len(tokens) - 1
            batch.drafts[b, : len(tokens)] = tokens
            batch.parents[b, : len(tokens)] = parents
            batch.counts[b] = len(tokens)

    def add_sibling_tokens(self, text):
        pass

    def forget(self, group_id):
        pass

    def reset(self):
        pass

    def stats(self):
        return {"open": float(len(self.known))}

    def stop(self):
        pass
