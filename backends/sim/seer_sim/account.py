"""An account of a simulated instance's steps: the seconds of each part, and the KV in use."""

from __future__ import annotations

import msgspec

__all__ = ["StepAccount"]


class StepAccount(msgspec.Struct, frozen=True, gc=False):
    """Like steps that followed one another, and the seconds that they were spent on; these add up.

    ``floor_s`` is the overhead and the reading of weights, ``attention_s`` that of decoding requests,
    ``requests_s`` what requests and their positions add to the floor, ``prefill_s`` what the computation of
    contexts adds, ``drafts_s`` the time of drafting.  ``kv_first`` and ``kv_last`` are the parts of the
    instance's KV in use in the first step and in the last.
    """

    began_s: float
    ended_s: float
    floor_s: float
    attention_s: float
    requests_s: float
    prefill_s: float
    drafts_s: float
    kv_first: float
    kv_last: float
