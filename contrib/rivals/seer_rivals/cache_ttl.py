"""KV that is kept for a time to live while a tool works, and programs first come first served.

After CacheTTL, before that Continuum (arXiv 2511.02230): an engine pins the KV of a program whose tool works,
for a time, and admits the turns of programs in the order in which the programs came.  There the time follows
from the tool and the queue; here it is a setting.
"""

from __future__ import annotations

from msgspec import Struct

from seer_core.model import GroupContext, InstanceStatus, Request
from seer_core.plugins.config_types import NotNegative
from seer_core.plugins.hookspecs import Startup, hookimpl
from seer_rivals.session_queues import Key, SessionQueues, reserved_tokens

__all__ = ["CacheTtl", "Settings"]

TIER = "experimental"


class Settings(Struct, frozen=True, forbid_unknown_fields=True):
    """``[plugin.cache_ttl]``: how long KV is kept for a response whose tool works."""

    ttl_s: NotNegative = 2.0
    """The seconds for which an instance admits nothing in place of that KV."""


class _Pin(Struct, frozen=True):
    """KV that is kept, and until when."""

    request: Request
    kv_tokens: int
    until_s: float


class CacheTtl(SessionQueues):
    """Admits turns in the order of their responses, where they fit beside the KV that is kept.

    A response that came earlier than those whose KV is kept may have their room, the latest one's first.
    """

    def __init__(self, ttl_s: float) -> None:
        super().__init__()
        self._ttl_s = ttl_s
        self._now = 0.0
        self._pins: dict[str, dict[int, _Pin]] = {}

    def tick(self, now: float) -> None:
        """Let the KV go whose time is over."""
        self._now = now
        for pins in self._pins.values():
            while pins and (first := next(iter(pins.values()))).until_s < now:
                del pins[first.request.seq]

    def turn_ended(self, request: Request) -> None:
        """Keep the KV of a response whose tool works."""
        if request.instance is not None:
            pins = self._pins.setdefault(request.instance, {})
            pins[request.seq] = _Pin(request, request.context_tokens, self._now + self._ttl_s)

    def group_changed(self, group: GroupContext, request: Request) -> None:
        """Let the KV of a response go that is over."""
        self._unpin(request)

    def instance_lost(self, instance: InstanceStatus) -> None:
        """Forget the KV there."""
        super().instance_lost(instance)
        self._pins.pop(instance.id, None)

    def order(self, request: Request) -> Key:
        """Return the response's number by arrival."""
        return (request.seq,)

    def held_kv_tokens(self, instance: InstanceStatus, request: Request) -> int:
        """Return the KV that is kept there for responses that came earlier."""
        pins = self._pins.get(instance.id, {}).values()
        return sum(pin.kv_tokens for pin in pins if pin.request.seq < request.seq)

    def placed(self, request: Request, instance: InstanceStatus) -> None:
        """Use the response's own KV, and let the latest ones' go as far as there is no room for all."""
        self._unpin(request)
        pins = self._pins.get(instance.id, {})
        kept = sum(pin.kv_tokens for pin in pins.values())
        free = instance.free_kv_tokens - instance.footprint(request, reserved_tokens(request))
        for pin in sorted(pins.values(), key=lambda pin: -pin.request.seq):
            if kept <= free:
                break
            kept -= pin.kv_tokens
            del pins[pin.request.seq]

    def _unpin(self, request: Request) -> None:
        if request.instance is not None:
            self._pins.get(request.instance, {}).pop(request.seq, None)


@hookimpl
def seer_make_prioritizer(settings: Settings, startup: Startup) -> CacheTtl:
    """Serve programs in the order of their arrival, and keep their KV for a time."""
    return CacheTtl(settings.ttl_s)


seer_make_placer = seer_make_prioritizer  # one object fills both slots
