"""Programs that are paused as a whole while KV is short.

After ThunderAgent (arXiv 2602.13692): an instance has as many active programs as its KV has room for, those
whose tools work included.  Where they outgrow it, the shortest that do not run are paused and lose their KV;
paused ones come back first, the longest before others.  There a program that acts weighs less the longer its
tool takes; here it weighs the same.
"""

from __future__ import annotations

from seer_core.model import GroupContext, InstanceStatus, Request, RequestState
from seer_core.plugins.hookspecs import Startup, hookimpl
from seer_rivals.session_queues import Key, SessionQueues, reserved_tokens

__all__ = ["ProgramPause"]

TIER = "experimental"


class ProgramPause(SessionQueues):
    """Keeps the active responses of an instance, with their KV, below what it holds.

    Turns of active ones come first, by arrival; then paused ones, the longest first; then new ones.
    """

    def __init__(self) -> None:
        super().__init__()
        self._active: dict[str, dict[int, tuple[Request, int]]] = {}
        self._homes: dict[int, str] = {}
        self._totals: dict[str, int] = {}

    def home_of(self, request: Request) -> str | None:
        """Return the instance where the response is active."""
        return self._homes.get(request.seq)

    def order(self, request: Request) -> Key:
        """Return active before paused before new."""
        if request.seq in self._homes:
            return 0, 0, request.seq
        return (1, -request.context_tokens, request.seq) if request.chunks else (2, 0, request.seq)

    def held_kv_tokens(self, instance: InstanceStatus, request: Request) -> int:
        """Return what active responses hold beside those that run, for one that is not active."""
        if request.seq in self._homes:
            return 0
        return max(0, self._totals.get(instance.id, 0) - instance.reserved_kv_tokens)

    def placed(self, request: Request, instance: InstanceStatus) -> None:
        """Count the response as active there, at the length to which the turn may take it."""
        self._note(request, instance.id, request.context_tokens + reserved_tokens(request))
        self._pause(instance, request)

    def turn_ended(self, request: Request) -> None:
        """Count the response at its length."""
        home = self._homes.get(request.seq)
        if home is not None:
            self._note(request, home, request.context_tokens)

    def group_changed(self, group: GroupContext, request: Request) -> None:
        """Forget a response that is over."""
        self._forget(request.seq)

    def instance_lost(self, instance: InstanceStatus) -> None:
        """Count the responses there as paused."""
        super().instance_lost(instance)
        for seq in list(self._active.get(instance.id, ())):
            self._forget(seq)

    def _pause(self, instance: InstanceStatus, placed: Request) -> None:
        """Pause the shortest responses that do not run until the others fit; the one placed runs now."""
        active = self._active[instance.id]
        if self._totals[instance.id] <= instance.info.kv_capacity_tokens:
            return
        idle = [
            (tokens, seq, request)
            for seq, (request, tokens) in active.items()
            if request is not placed and (request.state is RequestState.ACTING or seq in self._keys)
        ]
        for _, seq, request in sorted(idle):
            if self._totals[instance.id] <= instance.info.kv_capacity_tokens:
                return
            waits = seq in self._keys
            self._forget(seq)
            if waits:
                self.push(request)

    def _note(self, request: Request, home: str, tokens: int) -> None:
        self._forget(request.seq)
        self._homes[request.seq] = home
        self._active.setdefault(home, {})[request.seq] = request, tokens
        self._totals[home] = self._totals.get(home, 0) + tokens

    def _forget(self, seq: int) -> None:
        home = self._homes.pop(seq, None)
        if home is not None:
            _, tokens = self._active[home].pop(seq)
            self._totals[home] -= tokens


@hookimpl
def seer_make_prioritizer(startup: Startup) -> ProgramPause:
    """Serve active programs first, and pause the shortest where KV is short."""
    return ProgramPause()


seer_make_placer = seer_make_prioritizer  # one object fills both slots
