"""The analytic engine against a naive one that takes one step, one token and one block at a time."""

import math

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from seer_sim.cost import CostModel

COST = CostModel(
    overhead_s=0.011,
    weight_bytes=1e3,
    active_share=0.3,
    kv_bytes_per_token=7.0,
    flops_per_token=1e3,
    bytes_per_s=1e5,
    flops_per_s=2e5,
    bandwidth_efficiency=0.9,
    compute_efficiency=0.7,
)


class NaiveRun:
    def __init__(self, job, new_tokens):
        self.job = job
        self.tokens = len(job.token_ids)
        self.final = self.tokens + new_tokens
        self.computed = self.cached = self.work = self.preemptions = 0
        self.blocks = 0


class NaiveInstance:
    """vLLM's schedule(), step by step; free blocks are a list of what each still holds, oldest first."""

    def __init__(self, kv_blocks, block, max_running, max_batched):
        self.block = block
        self.max_running = max_running
        self.max_batched = max_batched
        self.free = [None] * kv_blocks
        self.waiting = []
        self.running = []
        self.finished = []
        self.now = 0.0

    def take(self, run, count):
        for _ in range(count):
            if None in self.free:
                self.free.remove(None)
            else:
                owner = self.free[0][0]
                self.free.remove(max(entry for entry in self.free if entry[0] == owner))
            run.blocks += 1

    def release(self, run):
        full = run.computed // self.block
        self.free += [(run.job.request_id, number) for number in range(full)]
        self.free += [None] * (run.blocks - full)
        run.blocks = run.computed = 0

    def found(self, run):
        """Full blocks of the run's context that its own or a sibling's content covers."""
        reusable = (run.tokens - 1) // self.block
        own = sum(entry is not None and entry[0] == run.job.request_id for entry in self.free)
        prompt = (run.job.prompt_tokens - 1) // self.block
        siblings = {
            r.job.request_id: r.computed // self.block
            for r in self.running
            if r.job.group_id == run.job.group_id
        }
        for entry in self.free:
            if entry and self.groups[entry[0]] == run.job.group_id:
                siblings[entry[0]] = siblings.get(entry[0], 0) + 1
        shared = prompt if any(blocks >= prompt for blocks in siblings.values()) else 0
        return min(own, reusable), shared

    def step(self):
        preempted = False
        budget = self.max_batched
        takes = []
        scheduled = 0
        while scheduled < len(self.running):
            run = self.running[scheduled]
            take = min(run.tokens - run.computed, budget)
            needed = math.ceil((run.computed + take) / self.block) - run.blocks
            while needed > len(self.free) and run in self.running:
                victim = self.running.pop()
                self.release(victim)
                victim.preemptions += 1
                self.waiting.insert(0, victim)
                preempted = True
            if run in self.running:
                self.take(run, max(0, needed))
                takes.append((run, take))
                budget -= take
                scheduled += 1
        for run, take in takes:
            run.computed += take
        while not preempted and self.waiting and budget > 0 and len(self.running) < self.max_running:
            run = self.waiting[0]
            blocks = math.ceil(run.tokens / self.block)
            if blocks > len(self.free):
                break
            own, shared = self.found(run)
            kept = [entry for entry in self.free if entry and entry[0] == run.job.request_id]
            for entry in kept:
                self.free.remove(entry)
            self.free += [None] * (len(kept) - own)
            run.blocks = own
            self.take(run, blocks - own)
            run.computed = max(own, shared) * self.block
            if not run.preemptions:
                run.cached = run.computed
            self.waiting.pop(0)
            self.running.append(run)
            take = min(run.tokens - run.computed, budget)
            run.computed += take
            takes.append((run, take))
            budget -= take
        self.now += COST.steps_s(sum(t for _, t in takes), sum(r.computed for r, _ in takes), 0, 1)
        for run, take in takes:
            run.work += take
            if run.computed == run.tokens:
                run.tokens += 1
                if run.tokens == run.final:
                    # Its last token was sampled, never computed.
                    self.running.remove(run)
                    self.release(run)
                    self.finished.append((run.job.id, self.now, run.cached, run.work, run.preemptions))

    def play(self, arrivals):
        self.groups = {job.request_id: job.group_id for _, job in arrivals}
        pending = sorted(arrivals, key=lambda arrival: arrival[0])
        while pending or self.running or self.waiting:
            if not self.running and not self.waiting:
                self.now = max(self.now, pending[0][0])
            while pending and pending[0][0] <= self.now:
                job = pending.pop(0)[1]
                generated = len(job.token_ids) - job.prompt_tokens
                self.waiting.append(NaiveRun(job, min(job.max_tokens, job.known_tokens - generated)))
            self.step()
        return self.finished


requests = st.lists(
    st.tuples(
        st.integers(1, 12),  # prompt
        st.integers(0, 20),  # generated before
        st.integers(1, 40),  # new tokens
        st.integers(0, 2),  # group
        st.integers(0, 60),  # arrival, in odd ticks
    ),
    min_size=1,
    max_size=9,
)


@settings(max_examples=200, deadline=None)
@given(
    requests,
    st.integers(72, 160),
    st.sampled_from([1, 3, 4]),
    st.integers(1, 6),
    st.sampled_from([6, 16, 100]),
)
@example([(4, 0, 40, 0, 0)] * 4, 80, 4, 6, 100)
def test_times_order_and_counts_equal_those_of_single_steps(
    simulate, chunk_job, requests, kv_tokens, block, max_running, max_batched
):
    kv_blocks = math.ceil(kv_tokens / block)
    arrivals = []
    for number, (prompt, generated, new, group, ticks) in enumerate(requests):
        job = chunk_job(
            str(number),
            # siblings have one prompt
            prompt=3 * group + 4 if prompt > 6 else prompt,
            generated=[7] * generated,
            max_tokens=new,
            known=generated + new,
            group=f"g{group}" if prompt > 6 else f"alone{number}",
        )
        arrivals.append((ticks * 0.0317293, job))
    sim = simulate(
        kv_blocks=kv_blocks, block=block, max_running=max_running, max_batched=max_batched, cost=COST
    )
    for when_s, job in arrivals:
        sim.clock.call_at(when_s, lambda job=job: sim.engine.submit(job))
    sink = sim.run()

    assert not sink.failed
    naive = NaiveInstance(kv_blocks, block, max_running, max_batched).play(arrivals)
    assert [name for name, _ in sink.finished] == [name for name, *_ in naive]
    for (name, when_s), (_, naive_s, cached, work, preemptions) in zip(sink.finished, naive, strict=True):
        output = sink.outputs[name]
        assert when_s == pytest.approx(naive_s, rel=1e-9)
        assert (output.cached_tokens, output.computed_tokens, output.preemptions) == (
            cached,
            work,
            preemptions,
        )


@given(st.integers(1, 64), st.integers(0, 5000), st.integers(0, 64), st.integers(1, 400), st.integers(1, 399))
def test_many_steps_cost_the_sum_of_single_steps(tokens, context, growth, steps, first):
    single = math.fsum(COST.steps_s(tokens, context + i * growth, growth, 1) for i in range(steps))
    assert COST.steps_s(tokens, context, growth, steps) == pytest.approx(single, rel=1e-12)
