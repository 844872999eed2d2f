"""A small simulated instance, and a sink that writes down what it says."""

import asyncio
from types import SimpleNamespace

import pytest
from seer_sim.clock import VirtualClock
from seer_sim.drafts import Drafts
from seer_sim.engine import SimEngine
from seer_sim.lengths import Lengths
from seer_sim.presets import PRESETS

from seer_core.model import InstanceInfo, Sampling
from seer_core.ports.drafting import SourceSpec
from seer_core.ports.engine import ChunkJob


class RecordingSink:
    def __init__(self, clock):
        self.clock = clock
        self.outputs = {}
        self.finished = []
        self.failed = []
        self.reports = []
        self.losses = []
        self.on_finish = lambda output: None

    def chunk_finished(self, instance_id, output):
        assert output.job_id not in self.outputs
        self.outputs[output.job_id] = output
        self.finished.append((output.job_id, self.clock.now()))
        self.on_finish(output)

    def chunk_failed(self, instance_id, job_id, reason):
        self.failed.append((job_id, reason))

    def reported(self, report):
        self.reports.append((self.clock.now(), report))

    def degraded(self, degradation):
        raise AssertionError(f"a simulated instance complains: {degradation}")

    def lost(self, instance_id, reason):
        self.losses.append((instance_id, reason))


class FixedPolicy:
    """Draft lengths by a function of (probes, others); records its calls."""

    def __init__(self, lengths):
        self.lengths_of = lengths
        self.calls = []
        self.recorded = []

    def lengths(self, probes, others):
        self.calls.append((probes, others))
        return self.lengths_of(probes, others)

    def record_acceptance(self, drafted_at, accepted_at):
        self.recorded.append((list(drafted_at), list(accepted_at)))


class FixedDrafter:
    """A drafter of which only the policy works."""

    def __init__(self, make_policy, path="nowhere:Nothing", draft_tokens=16):
        self.make_policy = make_policy
        self.spec = SourceSpec(path, {}, draft_tokens)
        self.step_times = None
        self.made = None

    def source(self):
        return self.spec

    def shares(self):
        return False

    def policy(self, step_times):
        self.step_times = step_times
        self.made = self.make_policy(step_times)
        return self.made


@pytest.fixture(scope="session")
def fixed_drafter():
    """Return a factory of drafters whose policy gives lengths by a function of (probes, others)."""
    return lambda lengths, **spec: FixedDrafter(lambda step_times: FixedPolicy(lengths), **spec)


@pytest.fixture(scope="session")
def chunk_job():
    """Return a factory of jobs; without ``generated`` it is a response's first chunk.

    With ``turn_start``, 0 in the first turn, an environment answers its turns.
    """

    def make(
        name,
        *,
        prompt=4,
        generated=(),
        max_tokens=8,
        known=8,
        group=None,
        seed=None,
        request=None,
        version=0,
        probe=False,
        siblings=0,
        early=False,
        turn_start=None,
        trajectory="",
    ):
        prompt_ids = list(range(100, 100 + prompt)) if isinstance(prompt, int) else list(prompt)
        request = request or f"r{name}"
        return ChunkJob(
            id=name,
            request_id=request,
            group_id=group or f"group of {request}",
            token_ids=[*prompt_ids, *generated],
            prompt_tokens=len(prompt_ids),
            max_tokens=max_tokens,
            sampling=Sampling(),
            seed=sum(map(ord, request)) if seed is None else seed,
            weight_version=version,
            known_tokens=known,
            probe=probe,
            siblings_finished=siblings,
            may_end_early=early,
            turns=turn_start is not None,
            turn_start=turn_start or 0,
            trajectory=trajectory,
        )

    return make


@pytest.fixture(scope="session")
def simulate():
    """Return a factory of one instance that has started, with its clock and sink."""

    def make(
        *,
        kv_blocks=64,
        block=4,
        max_running=8,
        max_batched=64,
        cost=PRESETS["cpu-tiny"],
        name="sim-0",
        clock=None,
        drafter=None,
        kv_pool=None,
        **more,
    ):
        clock = clock or VirtualClock()
        info = InstanceInfo(name, kv_blocks * block, block, max_running, kv_blocks * block)
        engine = SimEngine(
            info,
            clock,
            cost,
            lengths=more.pop("lengths", Lengths()),
            vocab_size=32000,
            max_batched_tokens=max_batched,
            acceptance=more.pop("acceptance", Drafts()),
            **more,
        )
        engine.set_drafter(drafter)
        engine.set_kv_pool(kv_pool)
        sink = RecordingSink(clock)
        asyncio.run(engine.start(sink))

        def run():
            while clock.step():
                pass
            return sink

        return SimpleNamespace(engine=engine, clock=clock, sink=sink, run=run)

    return make
