"""The analytic engine against a naive one that takes one step, one token and one block at a time."""

import math

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from seer_sim.batch import StepRun
from seer_sim.cost import CostModel
from seer_sim.drafts import Class, Drafts

COST = CostModel(
    position_s=1e-5,
    request_s=2e-5,
    sampled_s=3e-5,
    overhead_s=0.011,
    weight_bytes=400,
    expert_bytes=600,
    expert_share=0.3,
    kv_bytes_per_token=7.0,
    flops_per_token=1e3,
    attention_flops=6.0,
    prefill_attention_flops=5.0,
    bytes_per_s=1e5,
    flops_per_s=2e5,
    bandwidth_efficiency=0.9,
    compute_efficiency=0.7,
)


ACCEPTANCE = Drafts(siblings=(0, 2), rates=((0.7, 0.45, 0.2), (0.9, 0.85, 0.8, 0.3)), request_s=1e-4)
MODEL_ACCEPTANCE = msgspec.structs.replace(ACCEPTANCE, paths=2, model="h800-qwen2-vl-7b-tp8")
UNIT = 1 << 32


class NaiveRun:
    def __init__(self, job, new_tokens):
        self.job = job
        self.tokens = len(job.token_ids)
        self.final = self.tokens + new_tokens
        self.computed = self.cached = self.work = self.preemptions = 0
        self.blocks = self.shown = 0
        self.decoding = False
        self.steps = self.drafted = 0

    @property
    def pace(self):
        """Return the facts that decide its pace with drafts: probe or not, and the rates of its drafts."""
        return self.job.probe, ACCEPTANCE.rates[self.job.siblings_finished >= 2]


class NaiveInstance:
    """vLLM's schedule(), step by step and block by block.

    ``free`` says what each free block holds, oldest first: nothing, or (owner, number), where a prompt's full
    blocks are its group's and those behind are the request's own.  ``holders`` has how many requests use a
    computed block of a prompt.

    Drafts give each pace a number of tokens per step, now more, now less, whose sum is never a whole token
    behind the expected one.
    """

    def __init__(self, kv_blocks, block, max_running, max_batched, lengths=None, acceptance=ACCEPTANCE):
        self.lengths = lengths or (lambda probes, others: (0, 0))
        self.paths = acceptance.paths
        self.drafts = acceptance
        self.clocks = {}
        self.block = block
        self.max_running = max_running
        self.max_batched = max_batched
        self.free = [None] * kv_blocks
        self.holders = {}
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
                self.free.remove(max(block for block in self.free if block[0] == owner))
            run.blocks += 1

    def shared(self, run):
        """A prompt's last token is always computed, for its logits."""
        return (run.job.prompt_tokens - 1) // self.block

    def content(self, run, number):
        owner = f"prompt of {run.job.group_id}" if number < self.shared(run) else run.job.request_id
        return owner, number

    def show(self, run):
        """Let siblings find those blocks of the prompt that this run has computed."""
        for number in range(run.shown, min(run.computed // self.block, self.shared(run))):
            block = self.content(run, number)
            self.holders[block] = self.holders.get(block, 0) + 1
            run.shown += 1

    def release(self, run):
        full = run.computed // self.block
        prompt, shared = [], 0
        for block in (self.content(run, number) for number in range(run.shown)):
            self.holders[block] -= 1
            if self.holders[block]:
                shared += 1
            else:
                del self.holders[block]
                prompt.append(block)
        self.free += [self.content(run, number) for number in range(run.shown, full)] + prompt
        self.free += [None] * (run.blocks - max(full, run.shown))
        run.blocks = run.computed = run.shown = 0
        run.decoding = False

    def found(self, run):
        """Return the computed blocks that the run's context begins with."""
        found = []
        while len(found) < (run.tokens - 1) // self.block:
            block = self.content(run, len(found))
            if block not in self.holders and block not in self.free:
                break
            found.append(block)
        return found

    def draft(self):
        """Return, by pace, this step's draft tokens and the tokens they give in expectation."""
        decoding = [run for run in self.running if run.decoding]
        probes = sum(run.job.probe for run in decoding)
        others = len(decoding) - probes
        ours, theirs = self.lengths(probes, others) if decoding else (0, 0)
        if probes * (1 + self.paths * ours) + others * (1 + self.paths * theirs) > self.max_batched:
            ours = theirs = 0
        plan = {}
        for run in decoding:
            probe, rates = run.pace
            drafts = min(ours if probe else theirs, len(rates))
            plan[run.pace] = drafts, UNIT + round(sum(rates[:drafts]) * UNIT)
        return plan

    def gain(self, run, plan):
        """Return the tokens that this step gives a decoding run."""
        clock = self.clocks.setdefault(run.pace, 0)
        return min((clock + plan[run.pace][1]) // UNIT - clock // UNIT, run.final - run.tokens)

    def needed(self, run, plan):
        """Return the blocks that this step costs a run; a context has all of its own already."""
        if not run.decoding:
            return 0
        return math.ceil((run.computed + self.gain(run, plan)) / self.block) - run.blocks

    def step(self):
        short, early = False, []
        plan = self.draft()
        while sum(self.needed(run, plan) for run in self.running) > len(self.free):
            victim = self.running.pop()
            decoded = victim.decoding
            self.release(victim)
            if decoded and victim.job.may_end_early:
                early.append(victim)
            else:
                victim.preemptions += 1
                self.waiting.insert(0, victim)
            short = True
        budget = self.max_batched
        takes = []
        for run in self.running:
            take = min(run.tokens - run.computed, budget)
            if run.decoding:
                take = 1 + self.paths * plan[run.pace][0]
            gain = self.gain(run, plan) if run.decoding else take
            self.take(run, self.needed(run, plan))
            takes.append((run, take, gain))
            budget -= take
        for run, _, gain in takes:
            run.computed += gain
            self.show(run)
        while not short and self.waiting and budget > 0 and len(self.running) < self.max_running:
            run = self.waiting[0]
            blocks = math.ceil(run.tokens / self.block)
            found = self.found(run)
            if blocks - sum(block in self.holders for block in found) > len(self.free):
                break
            for block in found:
                if block not in self.holders:
                    self.free.remove(block)
            # What it kept behind that is of no use any more.
            self.free = [None if block and block[0] == run.job.request_id else block for block in self.free]
            run.blocks = len(found)
            self.take(run, blocks - len(found))
            run.computed = len(found) * self.block
            if not run.preemptions:
                run.cached = run.computed
            self.show(run)
            self.waiting.pop(0)
            self.running.append(run)
            take = min(run.tokens - run.computed, budget)
            run.computed += take
            self.show(run)
            takes.append((run, take, take))
            budget -= take
        sampled = sum(take if run.decoding else 1 for run, take, _ in takes)
        self.now += COST.pass_s(sum(take for _, take, _ in takes), len(takes), sampled)
        classes = []
        for run, take, _ in takes:
            if run.decoding:
                # KV is read for drafts too, and of the tokens expected before, not of whole ones.
                context = run.computed_then + (self.clocks[run.pace] - run.clock_then) / UNIT
                self.now += (context + take) * COST.attention_s(take)
                classes.append(Class(1, plan[run.pace][0], context))
            else:
                self.now += COST.prefill_attention_s(run.computed - take, take)
        self.now += sum(self.drafts.seconds(classes))
        for pace in {run.pace for run, _, _ in takes if run.decoding}:
            self.clocks[pace] += plan[pace][1]
        for run, _, gain in takes:
            run.work += gain
            if run.decoding:
                run.tokens += gain
                run.drafted += plan[run.pace][0]
                run.steps += 1
            elif run.computed == run.tokens:
                run.tokens += 1
                run.steps += 1
                run.decoding = True
                run.computed_then, run.clock_then = run.computed, self.clocks.get(run.pace, 0)
            if run.tokens == run.final:
                # Its last token was sampled, never computed.
                self.running.remove(run)
                self.release(run)
                self.finished.append((run, self.now))
        self.finished += [(run, self.now) for run in early]

    def play(self, arrivals):
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
        st.booleans(),  # probe
        st.integers(0, 3),  # finished siblings
        st.booleans(),  # may end early
    ),
    min_size=1,
    max_size=9,
)


@settings(max_examples=300, deadline=None)
@given(
    requests,
    st.integers(72, 160),
    st.sampled_from([1, 3, 4, 16]),
    st.integers(1, 6),
    st.sampled_from([6, 16, 100]),
    st.none() | st.tuples(*[st.integers(0, 5)] * 3),
    st.sampled_from([ACCEPTANCE, MODEL_ACCEPTANCE]),
)
@example([(4, 0, 40, 0, 0, False, 0, True)] * 4, 80, 4, 6, 100, None, ACCEPTANCE)
@example([(4, 0, 40, 0, 0, False, 0, False)] * 4, 80, 4, 6, 100, None, ACCEPTANCE)
@example([(4, 0, 40, 0, 0, n == 1, n, n > 1) for n in range(4)], 80, 1, 6, 100, (2, 1, 3), ACCEPTANCE)
def test_times_order_and_counts_equal_those_of_single_steps(
    simulate,
    chunk_job,
    fixed_drafter,
    requests,
    kv_tokens,
    block,
    max_running,
    max_batched,
    drafts,
    acceptance,
):
    kv_blocks = math.ceil(kv_tokens / block)
    arrivals = []
    for number, (prompt, generated, new, group, ticks, probe, siblings, early) in enumerate(requests):
        job = chunk_job(
            str(number),
            # siblings have one prompt
            prompt=3 * group + 4 if prompt > 6 else prompt,
            generated=[7] * generated,
            max_tokens=new,
            known=generated + new,
            group=f"g{group}" if prompt > 6 else f"alone{number}",
            probe=probe,
            siblings=siblings,
            early=early,
        )
        arrivals.append((ticks * 0.0317293, job))

    def lengths(probes, others):
        a, b, c = drafts
        return (a * probes + b * others) % 6, (b * probes + c * others) % 6

    sim = simulate(
        kv_blocks=kv_blocks,
        block=block,
        max_running=max_running,
        max_batched=max_batched,
        cost=COST,
        acceptance=acceptance,
        drafter=fixed_drafter(lengths) if drafts else None,
    )
    sim.engine.account = account = []
    for when_s, job in arrivals:
        sim.clock.call_at(when_s, lambda job=job: sim.engine.submit(job))
    sink = sim.run()

    assert not sink.failed
    size = kv_blocks, block, max_running, max_batched
    naive = NaiveInstance(*size, lengths if drafts else None, acceptance).play(arrivals)
    assert [name for name, _ in sink.finished] == [run.job.id for run, _ in naive]
    for (name, when_s), (run, naive_s) in zip(sink.finished, naive, strict=True):
        output = sink.outputs[name]
        assert when_s == pytest.approx(naive_s, rel=1e-9)
        assert (output.cached_tokens, output.computed_tokens) == (run.cached, run.work)
        assert (output.preemptions, output.steps) == (run.preemptions, run.steps)
        assert len(output.token_ids) == run.tokens - len(run.job.token_ids)
        assert output.stopped == (run.tokens == run.job.known_tokens + run.job.prompt_tokens)
        assert sum(output.drafted_at) == run.drafted
        assert sum(output.accepted_at) == len(output.token_ids) - output.steps
    for steps in account:
        *_, floor_s, attention_s, requests_s, prefill_s, drafts_s, kv_first, kv_last = (
            msgspec.structs.astuple(steps)
        )
        parts = (floor_s, attention_s, requests_s, prefill_s, drafts_s)
        assert min(parts) >= -1e-12
        assert sum(parts) == pytest.approx(steps.ended_s - steps.began_s)
        assert 0 < kv_first <= kv_last <= 1


@given(st.integers(1, 400), st.floats(0, 1), st.floats(0, 0.1), st.floats(0, 1), st.floats(0, 0.1))
def test_many_steps_cost_the_sum_of_single_steps(steps, step_s, growth_s, drafting_s, drafting_growth_s):
    segment = StepRun(steps, step_s, growth_s, drafting_s, drafting_growth_s)
    whole = math.fsum(step_s + i * growth_s for i in range(steps))
    drafting = math.fsum(drafting_s + i * drafting_growth_s for i in range(steps))
    assert segment.after(steps) == pytest.approx(whole, rel=1e-12)
    assert segment.drafting_after(steps) == pytest.approx(drafting, rel=1e-12)
