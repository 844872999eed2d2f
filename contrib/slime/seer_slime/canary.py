"""A canary: some responses of each batch are written again, whole, by slime's own client, and compared."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import attrs
import structlog

from seer_slime.fallback import Unfinished, go_on, number_of

if TYPE_CHECKING:
    from seer_core import Completion

__all__ = ["ClientCanary", "canary_limits"]

log = structlog.get_logger("seer")


def canary_limits(args: Namespace) -> tuple[int, int]:
    """Return how many responses of a batch are written again, and after how many that differ Seer stops.

    They are ``seer_canary`` and ``seer_canary_stop`` of ``--custom-config-path``; 0 is none, and never.

    Raises:
        ConfigError: they are no such numbers.
    """
    return number_of(args, "seer_canary", 0), number_of(args, "seer_canary_stop", 0)


@attrs.define(eq=False)
class ClientCanary:
    """Counts the responses of a run that were compared, and those whose tokens differed."""

    compared: int = 0
    different: int = 0
    stopped: bool = False

    async def compare(
        self,
        args: Namespace,
        blank: Any,
        prompt_ids: Sequence[int],
        completion: Completion,
        sampling: Mapping[str, Any],
        stop_after: int,
    ) -> None:
        """Have slime's own client write a response with the same seed, into a ``blank`` sample."""
        nothing = Unfinished(completion.group_id, completion.index, [], [], completion.seed)
        try:
            theirs, _, rest = await go_on(args, blank, prompt_ids, nothing, sampling)
        except Exception as error:  # a failure of slime's client is its own, and Seer's response stands
            log.warning("canary_failed", request=completion.request_id, error=repr(error))
            return
        if rest.status == type(rest).Status.ABORTED:
            return
        self.compared += 1
        mine = completion.token_ids.tolist()
        if mine == theirs:
            return
        self.different += 1
        pairs = enumerate(zip(mine, theirs, strict=False))
        place = next((i for i, (one, other) in pairs if one != other), min(len(mine), len(theirs)))
        self.stopped = self.stopped or 0 < stop_after <= self.different
        log.error(
            "canary_differs",
            request=completion.request_id,
            place=place,
            instances=list(completion.instances),
            stopped=self.stopped,
        )
