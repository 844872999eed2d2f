"""The self-test's second question: does a response go on in a second chunk as a whole one does?"""

import numpy as np
import pytest

from seer_core.model import InstanceInfo

pytest.importorskip("torch")

from seer_worker.process.adapter import LogitRow
from seer_worker.process.selftest import continued_apart, wrong_continuation
from seer_worker.wire import Finished

from seer_core.model.arrays import Logprobs, Tokens
from seer_core.ports.engine import ChunkOutput


class Instance:
    """Answers by the number of tokens before; the second time it finds KV, which may be bad."""

    def __init__(self, off=0.0, capacity=1000):
        self.info = InstanceInfo("toy", capacity, 16, 4, 1000)
        self.adapter = self
        self.off, self.seen, self.rows, self.job, self.resets = off, False, [], None, 0

    def watch(self, on):
        rows, self.rows = self.rows, []
        return rows

    def submit(self, job):
        self.job = job

    def advance(self):
        job, tokens = self.job, []
        for place in range(job.max_tokens):
            position = len(job.token_ids) + place
            logits = np.arange(8, dtype=np.float32)[::-1] * (1 + position % 3)
            logits[0] += self.off * self.seen
            self.rows.append(LogitRow(job.seed, position, logits))
            tokens.append(position % 8)
        self.seen = True
        nothing = dict.fromkeys(("cached_tokens", "prefilled_tokens", "computed_tokens", "preemptions"), 0)
        written = Tokens(tokens), Logprobs([0.0] * len(tokens))
        output = ChunkOutput(job.id, *written, stopped=False, weight_version=0, **nothing)
        return [Finished(output)]

    def reset_cache(self):
        self.resets += 1


def test_a_response_that_goes_on_as_a_whole_one_is_no_news():
    instance = Instance()
    assert continued_apart(instance) == 0
    assert instance.resets == 1


def test_kv_that_is_wrong_for_the_second_chunk_is_reported_with_how_wrong_it_is():
    apart = continued_apart(Instance(off=-4.0))
    assert wrong_continuation(apart).startswith(
        "a response that goes on in a second chunk has other log-probs than a whole one, by up to"
    )


def test_numbers_that_are_only_rounded_otherwise_are_not_wrong():
    apart = continued_apart(Instance(off=-0.01))
    assert 0 < apart < 0.1
    assert wrong_continuation(apart) is None


def test_an_instance_without_room_for_the_probe_is_not_asked():
    assert continued_apart(Instance(off=-4.0, capacity=32)) is None
