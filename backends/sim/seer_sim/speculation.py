"""Speculation on a simulated instance: it asks the drafter's policy and tells it what to expect."""

from __future__ import annotations

from collections.abc import Iterable

from seer_core.drafting import DraftPolicy
from seer_core.ports import ChunkJob
from seer_sim.acceptance import Acceptance
from seer_sim.lockstep import Lockstep

__all__ = ["Speculation"]


class Speculation:
    """A policy, and the table that says what comes of its drafts."""

    def __init__(self, policy: DraftPolicy, acceptance: Acceptance) -> None:
        self._policy = policy
        self._acceptance = acceptance
        self._table = acceptance.table()

    def class_of(self, job: ChunkJob) -> tuple[bool, int]:
        """Return the class whose runs move in lockstep: probe or not, and a row of the table."""
        return job.probe, self._acceptance.row(job.siblings_finished)

    def rates(self, job: ChunkJob) -> tuple[float, ...]:
        """Return the probabilities that drafts for the job are accepted up to position 1, 2, ..."""
        return self._table[self._acceptance.row(job.siblings_finished)]

    def lockstep(self, job: ChunkJob, block: int) -> Lockstep:
        """Return an empty lockstep for the job's class."""
        return Lockstep(block, self.rates(job), job.probe)

    def draft(self, locksteps: Iterable[Lockstep], max_positions: int) -> None:
        """Set the draft lengths of the next steps; none where all drafts would exceed ``max_positions``."""
        locksteps = list(locksteps)
        probes = sum(lockstep.size for lockstep in locksteps if lockstep.probe)
        others = sum(lockstep.size for lockstep in locksteps) - probes
        if not probes + others:
            return
        ours, theirs = self._policy.lengths(probes, others)
        if probes * (1 + ours) + others * (1 + theirs) > max_positions:
            ours = theirs = 0
        for lockstep in locksteps:
            lockstep.draft(ours if lockstep.probe else theirs)

    def learn(self, locksteps: Iterable[Lockstep], steps: int) -> None:
        """Tell the policy what ``steps`` steps verified, and what of it was accepted in expectation."""
        drafting = [lockstep for lockstep in locksteps if lockstep.draft_tokens and lockstep.size]
        if not drafting:
            return
        longest = max(lockstep.draft_tokens for lockstep in drafting)
        drafted = [0.0] * longest
        accepted = [0.0] * longest
        for lockstep in drafting:
            drafts = lockstep.size * steps
            for position in range(lockstep.draft_tokens):
                drafted[position] += drafts
                accepted[position] += drafts * lockstep.rates[position]
        self._policy.learn(drafted, accepted)
