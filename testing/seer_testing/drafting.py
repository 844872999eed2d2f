"""Contracts of the Protocols in ``seer_core.ports.drafting``: policy, drafter, draft source."""

from __future__ import annotations

import random
import re
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import hypothesis.strategies as st
import msgspec
import numpy as np
import pytest
from hypothesis import given

from seer_core.model import Sampling
from seer_core.model.arrays import Tokens
from seer_core.ports.drafting import (
    DraftBatch,
    DraftContext,
    Drafter,
    DraftPolicy,
    DraftSource,
    SiblingTokens,
    SourceSpec,
    StepTimes,
    tree_flaw,
)
from seer_core.ports.engine import ChunkJob
from seer_testing.rollouts import quiet
from seer_testing.support import as_sent, expect_contract, seeded_random

__all__ = ["DraftPolicyContract", "DraftSourceContract", "DrafterContract"]

EXAMPLES = 60
STEPS = 200

FREE = StepTimes((1, 64), (0, 16), ((1.0, 1.0), (1.0, 1.0)))
"""Drafts cost nothing."""

REAL = StepTimes(
    (1, 8, 32),
    (0, 2, 4, 8),
    (
        (2.5e-3, 2.5e-3, 2.6e-3, 2.7e-3),
        (2.6e-3, 3.4e-3, 4.0e-3, 5.6e-3),
        (5.1e-3, 9.1e-3, 11.8e-3, 17.4e-3),
    ),
)
"""A small model in vLLM on one CPU thread, measured."""

STEEP = StepTimes((1, 64), (0, 8), ((1.0, 9.0), (64.0, 576.0)))
"""A step takes as long as it has tokens."""

HOST = DraftContext(
    "a", max_running=8, max_model_tokens=256, vocab_size=1000, draft_tokens=6, step_times=FREE
)
TREES = msgspec.structs.replace(HOST, paths=3)
"""An engine that verifies three paths at once."""


class DraftPolicyContract:
    """Tests of a ``DraftPolicy``; ``make_policy`` returns a new one for an instance with these step times."""

    draft_tokens: int = 8
    """No draft is to be longer."""

    def make_policy(self, step_times: StepTimes) -> DraftPolicy:
        """Return a new policy."""
        raise NotImplementedError("define make_policy(step_times), which returns a new policy")

    @quiet(EXAMPLES)
    @given(
        times=st.sampled_from([FREE, REAL, STEEP]),
        probes=st.integers(0, 40),
        others=st.integers(0, 40),
        measured=st.lists(st.lists(st.floats(0, 1), max_size=8), max_size=4),
    )
    def test_lengths_are_two_numbers_within_the_limit(
        self, times: StepTimes, probes: int, others: int, measured: list[list[float]]
    ) -> None:
        """For any batch and any acceptance measured so far, also of positions that were never drafted."""
        policy = self.make_policy(times)
        for shares in [[], *measured]:
            drafted = [1000.0 / 2**place for place in range(len(shares))]
            policy.record_acceptance(drafted, [d * share for d, share in zip(drafted, shares, strict=True)])
            if probes + others:
                self._ask(policy, probes, others)

    def test_two_with_the_same_input_decide_the_same(self) -> None:
        """Without this, no simulation repeats."""

        def story(policy: DraftPolicy) -> list[tuple[int, int]]:
            rng = seeded_random()
            lengths = []
            for _ in range(STEPS):
                lengths.append(self._ask(policy, rng.randint(0, 8), rng.randint(1, 24)))
                drafted = sorted((rng.randint(0, 50) for _ in range(max(lengths[-1]))), reverse=True)
                policy.record_acceptance(drafted, [rng.randint(0, count) for count in drafted])
            return lengths

        first, second = story(self.make_policy(REAL)), story(self.make_policy(REAL))
        for step, (one, other) in enumerate(zip(first, second, strict=True)):
            assert one == other, f"in step {step} one answered {one}, and another {other}"

    def test_it_does_not_change_its_input(self) -> None:
        """The counts are the engine's."""
        drafted, accepted = [9.0, 5.0, 1.0], [4.0, 1.0, 0.0]
        policy = self.make_policy(REAL)
        for _ in range(3):
            policy.record_acceptance(drafted, accepted)
        assert (drafted, accepted) == ([9.0, 5.0, 1.0], [4.0, 1.0, 0.0]), (
            "record_acceptance() changed its arguments"
        )

    def _ask(self, policy: DraftPolicy, probes: int, others: int) -> tuple[int, int]:
        lengths = policy.lengths(probes, others)
        assert isinstance(lengths, tuple), f"answered {lengths!r}, which is no pair"
        assert [type(length) for length in lengths] == [int, int], f"answered {lengths!r}, not two ints"
        assert all(0 <= length <= self.draft_tokens for length in lengths), (
            f"answered {lengths}; drafts have 0 to {self.draft_tokens} tokens"
        )
        return lengths


class DrafterContract(DraftPolicyContract):
    """Tests of a ``Drafter`` and of its pure half, if it has one; ``make`` returns a new one."""

    def make(self) -> Drafter:
        """Return a new drafter."""
        raise NotImplementedError("define make(), which returns a new drafter")

    def make_policy(self, step_times: StepTimes) -> DraftPolicy:
        """Return the drafter's pure half."""
        policy = self.make().policy(step_times)
        if policy is None:
            pytest.skip("this drafter has no pure half")
        return policy

    def test_it_is_a_drafter(self) -> None:
        """It has the methods of the Protocol."""
        assert isinstance(self.make(), Drafter)

    def test_it_always_says_the_same_of_sharing(self) -> None:
        """Each engine asks for itself."""
        drafter = self.make()
        answers = [drafter.shares() for _ in range(3)]
        assert answers in ([True] * 3, [False] * 3), f"answered {answers}"

    def test_what_a_source_is_made_of_is_plain_data(self) -> None:
        """It travels to another process, under a path that can be imported there."""
        spec = self.make().source()
        assert isinstance(spec, SourceSpec), f"source() answered {spec!r}, which is no SourceSpec"
        assert re.fullmatch(r"[\w.]+:\w+", spec.path), f"{spec.path!r} is no package.module:Class"
        as_sent(spec.settings)
        assert spec.draft_tokens >= 1


class DraftSourceContract:
    """Tests of a ``DraftSource``; ``make_source`` returns a new one that drafts for ``host``.

    It is asked for lines and for trees; where it is asked for trees, lines will do.
    """

    def make_source(self, host: DraftContext) -> DraftSource:
        """Return a new source."""
        raise NotImplementedError("define make_source(host), which returns a new source")

    def test_it_has_the_methods_of_a_source(self) -> None:
        """The names come from the Protocol ``DraftSource``."""
        with self._bench() as bench:
            expect_contract(bench.source, DraftSource)

    def test_drafts_keep_to_their_limits(self) -> None:
        """At most ``limits[b]`` tokens of the vocabulary, in a story of repeats that invites drafts."""
        with self._bench() as bench:
            bench.story()

    @quiet(EXAMPLES)
    @given(seed=st.integers(0, 2**32), paths=st.integers(2, 8))
    def test_trees_are_trees_of_no_more_paths_than_the_engine_verifies(self, seed: int, paths: int) -> None:
        """Parents before their children, no two equal children of one parent; lines are such trees too."""
        with self._bench(host=msgspec.structs.replace(HOST, paths=paths)) as bench:
            bench.story(random.Random(seed), steps=40)

    def test_only_drafts_and_counts_are_written(self) -> None:
        """And parents, if drafts may be trees; all else is the engine's, as is what lies beyond a limit."""
        for host in (HOST, TREES):
            with self._bench(guarded=True, host=host) as bench:
                bench.story()

    def test_open_chunks_have_handles_of_their_own(self) -> None:
        """Also when many more are open than run at once; a closed one's may be used again."""
        with self._bench() as bench:
            handles = [bench.open(number % HOST.max_running, f"g/{number}") for number in range(100)]
            assert all(isinstance(handle, int) for handle in handles)
            assert len(set(handles)) == 100
            for handle in handles:
                bench.source.close(handle)
            bench.propose([bench.open(0, "g/100")], [0], [6])

    def test_siblings_may_be_learnt_at_any_time(self) -> None:
        """Also of unknown groups, of requests that run here, with gaps, and twice."""
        with self._bench() as bench:
            for rollout, group in (("", "unknown"), ("another", "g"), ("", "g")):
                bench.source.add_sibling_tokens(SiblingTokens(rollout, group, "g/1", 0, Tokens(REPEAT)))
            handle = bench.open(0, "g/0", REPEAT[:8])
            for request, start in (("g/1", 0), ("g/1", 0), ("g/1", 100), ("g/2", 5), ("g/0", 4)):
                bench.source.add_sibling_tokens(SiblingTokens("", "g", request, start, Tokens(REPEAT)))
            bench.propose([handle], [0], [6])
            bench.source.forget("g")
            bench.source.add_sibling_tokens(SiblingTokens("", "g", "g/1", len(REPEAT), Tokens(REPEAT)))
            bench.story()

    def test_a_group_may_be_forgotten_at_any_time(self) -> None:
        """Known or not, with chunks open or without; it may come again."""
        with self._bench() as bench:
            bench.source.forget("unknown")
            handle = bench.open(0, "g/0")
            bench.source.forget("g")
            bench.propose([handle], [0], [6])
            bench.source.close(handle)
            bench.source.forget("g")
            bench.propose([bench.open(0, "g/1")], [0], [6])

    def test_after_a_reset_it_goes_on(self) -> None:
        """It has no text from before; the engine sees to it that no chunk is open."""
        with self._bench() as bench:
            bench.source.reset()
            bench.source.close(bench.open(0, "g/0", REPEAT * 4))
            bench.source.reset()
            text = REPEAT[: len(REPEAT) // 2]
            [draft] = bench.propose([bench.open(0, "h/0", text, group="h")], [0], [6])
            assert draft != REPEAT[len(text) : len(text) + 6], "drafts text from before the reset"

    def test_figures_are_numbers_by_name(self) -> None:
        """They go into the trace."""
        with self._bench() as bench:
            bench.story()
            stats = bench.source.stats()
            assert all(isinstance(name, str) for name in stats)
            assert all(isinstance(value, float | int) for value in stats.values())

    def test_it_stops_and_leaves_no_thread(self) -> None:
        """With chunks open, too."""
        before = threading.active_count()
        with self._bench() as bench:
            bench.open(0, "g/0")
        assert threading.active_count() <= before, "stop() leaves a thread behind"

    @contextmanager
    def _bench(self, guarded: bool = False, host: DraftContext = HOST) -> Iterator[_Bench]:
        source = self.make_source(host)
        try:
            yield _Bench(source, guarded, host)
        finally:
            source.stop()


PROMPT = [1, 2, 3, 4]
REPEAT = list(range(100, 124))


class _Bench:
    """An engine's texts, one row per chunk, and a source that receives them and drafts."""

    def __init__(self, source: DraftSource, guarded: bool, host: DraftContext) -> None:
        self.source = source
        self.guarded = guarded
        self.host = host
        self.lengths = [0] * host.max_running
        self.unsent: list[list[int]] = [[] for _ in self.lengths]

    def open(self, row: int, request: str, response: Sequence[int] = (), group: str = "g") -> int:
        ids = [*PROMPT, *response]
        self.lengths[row], self.unsent[row] = len(ids), []
        job = ChunkJob(f"{request}#0", request, group, ids, len(PROMPT), 256, Sampling(), 7, 0)
        return self.source.open(job)

    def write(self, row: int, tokens: Sequence[int]) -> None:
        self.unsent[row] += tokens
        self.lengths[row] += len(tokens)

    def propose(self, handles: list[int], rows: list[int], limits: list[int]) -> list[list[int]]:
        """Ask for drafts of at most ``limits`` tokens and return them; guarded, see what else was written."""
        size, width = len(handles), self.host.draft_tokens
        written = [self.unsent[row] for row in rows]
        for row in rows:
            self.unsent[row] = []
        batch = DraftBatch(
            handles=np.array(handles, np.int32),
            lengths=np.array([self.lengths[row] for row in rows], np.int32),
            written=np.array([len(tokens) for tokens in written], np.int32),
            new_tokens=np.array([token for tokens in written for token in tokens], np.int32),
            limits=np.array(limits, np.int32),
            drafts=np.full((size, width), -1, np.int32),
            parents=np.tile(np.arange(-1, width - 1, dtype=np.int32), (size, 1)),
            counts=np.zeros(size, np.int32),
        )
        inputs = ["handles", "lengths", "written", "new_tokens", "limits"]
        if self.host.paths == 1:
            inputs.append("parents")
        before = {name: getattr(batch, name).copy() for name in (*inputs, "parents")}
        self.source.propose(batch)
        for count, limit, draft, parents in zip(
            batch.counts, limits, batch.drafts, batch.parents, strict=True
        ):
            assert 0 <= count <= limit, f"drafted {count} tokens where {limit} were allowed"
            taken = draft[:count]
            assert ((taken >= 0) & (taken < self.host.vocab_size)).all(), f"{taken} are not all tokens"
            flaw = tree_flaw(taken.tolist(), parents[:count].tolist(), self.host.paths)
            assert flaw is None, f"drafted {flaw}"
        if self.guarded:
            changed = [name for name in inputs if not np.array_equal(getattr(batch, name), before[name])]
            assert not changed, f"wrote into {', '.join(changed)}"
            for array, was in (
                (batch.drafts, np.full_like(batch.drafts, -1)),
                (batch.parents, before["parents"]),
            ):
                beyond = np.arange(width) >= np.array(limits)[:, None]
                assert (array == was)[beyond].all(), "wrote into drafts beyond their limits"
        return [draft[:count].tolist() for draft, count in zip(batch.drafts, batch.counts, strict=True)]

    def story(self, rng: random.Random | None = None, steps: int = STEPS) -> None:
        """Open, write, propose and close at random; requests of a group write much the same."""
        rng = rng or seeded_random()
        open_rows: dict[int, int] = {}
        for step in range(steps):
            row = rng.randrange(self.host.max_running)
            if row not in open_rows:
                group = rng.choice("gh")
                open_rows[row] = self.open(row, f"{group}/{step}", REPEAT[: rng.randint(0, 24)], group)
            elif rng.random() < 0.1 or self.lengths[row] > 200:
                self.source.close(open_rows.pop(row))
                continue
            size = rng.randint(1, 3)
            at = self.lengths[row] - len(PROMPT)
            self.write(row, [REPEAT[(at + i) % len(REPEAT)] for i in range(size)])
            if rng.random() < 0.2:  # now and then something else, after which several things may come
                self.write(row, [rng.choice(REPEAT)])
            self.propose([open_rows[row]], [row], [rng.randint(0, self.host.draft_tokens)])
        rows = sorted(open_rows)
        if rows:
            limits = [rng.randint(0, self.host.draft_tokens) for _ in rows]
            self.propose([open_rows[row] for row in rows], rows, limits)
