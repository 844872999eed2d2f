"""The context manager: what the finished responses of each prompt group have shown."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from seer_core.errors import PromptError
from seer_core.model import GroupContext, Request
from seer_core.model.events import GroupSpec

__all__ = ["ContextManager"]


NO_LABELS: Mapping[str, str] = {}
"""Shared by all groups without labels."""


class ContextManager:
    """Keeps one ``GroupContext`` per group that is in flight."""

    def __init__(self) -> None:
        self._groups: dict[str, GroupContext] = {}
        self._seq = 0

    def open(self, spec: GroupSpec, now: float = 0.0) -> GroupContext:
        """Start the context of a group that has arrived; group ids are unique among those in flight."""
        if spec.id in self._groups:
            raise PromptError(f"group {spec.id!r} is already in flight; give each group an id of its own")
        group = GroupContext(
            spec.id,
            self._seq,
            spec.n,
            spec.prompt_tokens,
            spec.max_tokens,
            spec.known_lengths,
            left=spec.n,
            sampling=spec.sampling,
            labels=spec.labels or NO_LABELS,
            arrived_s=now,
            turns=spec.turns,
        )
        self._seq += 1
        self._groups[spec.id] = group
        return group

    def record_finished(self, request: Request) -> None:
        """Take in the length of a finished response."""
        group = request.group
        group.finished += 1
        group.longest_finished_tokens = max(group.longest_finished_tokens, request.generated_tokens)

    def close(self, request: Request) -> None:
        """Note that a request is over; the context is forgotten with the group's last one."""
        group = request.group
        group.left -= 1
        if group.left == 0:
            del self._groups[group.id]

    @property
    def oldest(self) -> GroupContext:
        """The group that arrived first of those in flight; there must be one."""
        return next(iter(self))

    def __iter__(self) -> Iterator[GroupContext]:
        return iter(self._groups.values())

    def __len__(self) -> int:
        return len(self._groups)
