"""The context manager: what the finished responses of each prompt group have shown."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping

import attrs

from seer_core.errors import PromptError
from seer_core.model import GroupContext, Request
from seer_core.model.events import GroupSpec
from seer_core.model.requests import NOT_IN_FLIGHT

__all__ = ["ContextManager"]


NO_LABELS: Mapping[str, str] = {}
"""Shared by all groups without labels."""


FAMILIES = 4096
"""Families that are remembered while none of their groups is in flight.

Beyond, the one of which none has been for longest is forgotten.
"""


@attrs.define(eq=False)
class _Family:
    """The lengths that finished responses of sibling groups have shown; ``groups`` are those in flight."""

    finished: int = 0
    longest_finished_tokens: int = 0
    groups: dict[str, GroupContext] = attrs.Factory(dict)


class ContextManager:
    """Keeps one ``GroupContext`` per group that is in flight, and what their families have shown."""

    def __init__(self) -> None:
        self._groups: dict[str, GroupContext] = {}
        self._families: dict[str, _Family] = {}
        """Those of which a group is in flight."""
        self._others: OrderedDict[str, _Family] = OrderedDict()
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
            in_flight=NOT_IN_FLIGHT,
            sampling=spec.sampling,
            labels=spec.labels or NO_LABELS,
            arrived_s=now,
            turns=spec.turns,
            whole=spec.whole,
        )
        if spec.family:
            self._join(group, spec.family)
        self._seq += 1
        self._groups[spec.id] = group
        return group

    def record_finished(self, request: Request) -> None:
        """Take in the length of a finished response."""
        group = request.group
        family = self._families[group.family] if group.family else None
        known: list[GroupContext | _Family] = [group]
        if family is not None:
            known = [family, *family.groups.values()]
        for each in known:
            each.finished += 1
            each.longest_finished_tokens = max(each.longest_finished_tokens, request.generated_tokens)

    def close(self, request: Request) -> None:
        """Note that a request is over; the context is forgotten with the group's last one."""
        group = request.group
        group.left -= 1
        if group.left == 0:
            del self._groups[group.id]
            if group.family:
                self._leave(group)

    def _join(self, group: GroupContext, name: str) -> None:
        """Let a group that has arrived profit from what its family has shown, and will show."""
        family = self._families.get(name) or self._others.pop(name, None) or _Family()
        self._families[name] = family
        group.family, group.informed = name, bool(family.finished)
        group.finished, group.longest_finished_tokens = family.finished, family.longest_finished_tokens
        family.groups[group.id] = group

    def _leave(self, group: GroupContext) -> None:
        """Take a group that is over from its family."""
        family = self._families[group.family]
        del family.groups[group.id]
        if not family.groups:
            self._others[group.family] = self._families.pop(group.family)
            if len(self._others) > FAMILIES:
                self._others.popitem(last=False)

    @property
    def oldest(self) -> GroupContext:
        """The group that arrived first of those in flight; there must be one."""
        return next(iter(self))

    def __iter__(self) -> Iterator[GroupContext]:
        return iter(self._groups.values())

    def __len__(self) -> int:
        return len(self._groups)
