"""A scripted engine that shares KV, imported by workers: its tokens follow from the KV that it was given."""

import hashlib

import attrs
import msgspec
import numpy as np
from scripted import Scripted, token_at
from seer_worker.process.account import RequestStats
from seer_worker.process.pooling import PooledRequests
from seer_worker.process.stores import FailsafeStore

BLOCK_TOKENS = 16
BLOCK_BYTES = 4096


class Pooled(Scripted):
    """Fetches the KV of a chunk's context, computes what is missing, and saves what it has at the end."""

    def __init__(self, start):
        super().__init__(start)
        self.info = msgspec.structs.replace(
            self.info, prefill_s_per_token=1e-3, fetch_s_per_token=1e-4, kv_kind="pooled"
        )
        self._store = FailsafeStore(None)
        self._begun = {}

    def share_kv(self, open_store, report):
        self._store = FailsafeStore(open_store(BLOCK_BYTES, BLOCK_TOKENS), report)
        return PooledRequests(self._store, BLOCK_BYTES)

    def submit(self, job, salt):
        super().submit(job, salt)
        keys = keys_of(job.token_ids)
        found = np.empty((self._store.find(keys) if keys else 0, BLOCK_BYTES), np.uint8)
        found = found[: self._store.get(keys[: len(found)], found)]
        computed = [kv_of(key) for key in keys[len(found) :]]
        digest = hashlib.sha256(b"".join(row.tobytes() for row in (*found, *computed))).hexdigest()
        self._begun[job.id] = (job, len(found) * BLOCK_TOKENS, digest)

    def step(self):
        ended = []
        for each in super().step():
            job, pooled, digest = self._begun.pop(each.job_id)
            at = len(job.token_ids)
            tokens = [
                token_at(f"{job.seed}/{digest}", at + number) for number in range(1, job.max_tokens + 1)
            ]
            self._save(keys_of([*job.token_ids, *tokens]))
            account = RequestStats(at - pooled + len(tokens) - 1, pooled)
            ended.append(attrs.evolve(each, token_ids=tokens, account=account))
        return ended

    def _save(self, keys):
        lacking = self._store.ask(lambda store: store.lacks(keys), [])
        if lacking:
            blocks = np.stack([kv_of(keys[number]) for number in lacking])
            self._store.ask(lambda store: store.put([keys[number] for number in lacking], blocks), None)

    def abort(self, job_ids):
        super().abort(job_ids)
        for job_id in job_ids:
            del self._begun[job_id]


def keys_of(tokens):
    """Return the keys of the full blocks of a context whose last token is still to be computed."""
    keys, chain = [], hashlib.sha256(b"weights-0")
    for end in range(BLOCK_TOKENS, len(tokens), BLOCK_TOKENS):
        chain.update(repr(list(tokens[end - BLOCK_TOKENS : end])).encode())
        keys.append(chain.digest())
    return keys


def kv_of(key):
    """Return the block of a key, as every instance computes it."""
    return np.frombuffer(hashlib.shake_128(key).digest(BLOCK_BYTES), np.uint8)
