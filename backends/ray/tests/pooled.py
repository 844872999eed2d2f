"""A scripted engine that shares KV, imported by workers: its tokens follow from the KV that it was given."""

import hashlib

import msgspec
import numpy as np
from scripted import Scripted, output, token_at
from seer_worker.process.place import node_name
from seer_worker.process.stores import STORE, FailsafeStore
from seer_worker.wire import Degraded, Finished

from seer_core.ports.kv import StoreContext

BLOCK_TOKENS = 16
BLOCK_BYTES = 4096


class Pooled(Scripted):
    """Fetches the KV of a chunk's context, computes what is missing, and saves what it has at the end."""

    def __init__(self, start):
        super().__init__(start)
        self.info = msgspec.structs.replace(
            self.info, prefill_s_per_token=1e-3, fetch_s_per_token=1e-4, kv_kind="pooled"
        )
        self._flaws = []
        self._store = FailsafeStore(None)
        if start.store is not None:
            host = StoreContext(
                self.info.id, BLOCK_BYTES, BLOCK_TOKENS, self._report, node_name(), start.address
            )
            self._store = FailsafeStore(
                STORE.make(start.store.path, start.store.settings, host), self._report
            )
        self._begun = {}

    def submit(self, job):
        super().submit(job)
        keys = keys_of(job.token_ids)
        found = np.empty((self._store.find(keys) if keys else 0, BLOCK_BYTES), np.uint8)
        found = found[: self._store.get(keys[: len(found)], found)]
        computed = [kv_of(key) for key in keys[len(found) :]]
        digest = hashlib.sha256(b"".join(row.tobytes() for row in (*found, *computed))).hexdigest()
        self._begun[job.id] = (job, len(found) * BLOCK_TOKENS, digest)

    def step(self):
        ended = []
        for each in super().step():
            job, pooled, digest = self._begun.pop(each.output.job_id)
            at = len(job.token_ids)
            tokens = [
                token_at(f"{job.seed}/{digest}", at + number) for number in range(1, job.max_tokens + 1)
            ]
            self._save(keys_of([*job.token_ids, *tokens]))
            chunk = msgspec.structs.replace(
                output(job, tokens), pool_tokens=pooled, prefilled_tokens=at - pooled
            )
            ended.append(Finished(chunk))
        return ended

    def _save(self, keys):
        lacking = self._store.ask(lambda store: store.lacks(keys), [])
        if lacking:
            blocks = np.stack([kv_of(keys[number]) for number in lacking])
            self._store.ask(lambda store: store.put([keys[number] for number in lacking], blocks), None)

    def abort(self, job_id):
        super().abort(job_id)
        del self._begun[job_id]

    def forget_group(self, group_id):
        pass

    def receive_pool_message(self, message):
        self._store.receive(message)

    def take_pool_message(self):
        return self._store.take_message()

    def degradations(self):
        flaws, self._flaws = self._flaws, []
        return [Degraded("kv_pool", flaw) for flaw in flaws]

    def close(self):
        self._store.ask(lambda store: store.close(), None)

    def _report(self, reason):
        self._flaws.append(reason)


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
