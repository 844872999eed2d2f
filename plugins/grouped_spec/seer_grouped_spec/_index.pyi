"""The draft index of grouped speculative decoding, in C++ (src/)."""

import numpy as np
from numpy.typing import NDArray

from seer_core.errors import SeerError

Int32 = NDArray[np.int32]
Float32 = NDArray[np.float32]

class DraftIndexError(SeerError):
    """A call the index cannot carry out: it names the culprit, the fact and the remedy."""

class Voting:
    """How the places whose context matches vote on what comes next; immutable.

    ``lookup_min`` is the shortest match that may draft and ``lookup_max`` the longest that counts, in
    tokens, 1 to 64.  ``gather`` bounds the places looked at per draft: its time and quality.
    ``min_probability`` ends a path where its estimated probability falls below it.  ``escape`` weighs
    "something else follows" against one vote.  ``sibling_weight`` is a sibling's vote against the
    request's own; ``own_recency`` and ``sibling_recency`` say how fast votes lose weight with distance;
    ``soft_match`` and ``soft_far`` reward tokens that are equal beyond the first unequal one, among the
    last 8 and the 8 before.  ``common_weight`` is a vote of the text of other groups that are gone, of
    which ``common_gather`` places are looked at; 0 keeps no such text.
    """

    def __init__(
        self,
        *,
        lookup_min: int = 1,
        lookup_max: int = 64,
        gather: int = ...,
        min_probability: float = 0.0,
        escape: float = ...,
        sibling_weight: float = ...,
        own_recency: float = ...,
        sibling_recency: float = ...,
        soft_match: float = ...,
        soft_far: float = ...,
        common_weight: float = ...,
        common_gather: int = ...,
        common_lookup_min: int = ...,
    ) -> None: ...
    @property
    def lookup_min(self) -> int: ...
    @property
    def lookup_max(self) -> int: ...
    @property
    def gather(self) -> int: ...
    @property
    def min_probability(self) -> float: ...
    @property
    def escape(self) -> float: ...
    @property
    def sibling_weight(self) -> float: ...
    @property
    def own_recency(self) -> float: ...
    @property
    def sibling_recency(self) -> float: ...
    @property
    def soft_match(self) -> float: ...
    @property
    def soft_far(self) -> float: ...
    @property
    def common_weight(self) -> float: ...
    @property
    def common_gather(self) -> int: ...
    @property
    def common_lookup_min(self) -> int: ...

class IndexStats:
    """A snapshot; ``tokens``, ``bytes``, ``groups`` and ``requests`` are what is held now, the rest counts.

    ``drafts`` are rows asked for with a limit above 0.  No draft was given for ``stale`` rows (request
    gone or closed) and ``mismatched`` ones (the row is shorter than, or different from, what is stored,
    or holds a negative id); ``unstored`` rows had new tokens that found no room.  ``bytes_leaving`` is text
    of dropped groups on its way into the common index, a little per call.
    """

    tokens: int
    bytes: int
    groups: int
    requests: int
    common_tokens: int
    bytes_leaving: int
    dropped_for_memory: int
    dropped_by_ttl: int
    drafts: int
    stale: int
    mismatched: int
    unstored: int

class DraftIndex:
    """All requests' texts by group, and drafts that continue them.

    Thread-safe: every call releases the GIL and takes one mutex; appends take it in slices of 256
    tokens and step aside for drafts.  A handle never names anything but what it was given out for:
    once that is gone, ``draft`` gives no tokens for it and every other call raises.

    ``memory_bytes`` bounds everything held, ``common_bytes`` (at most a quarter of it) the text of groups
    that are gone.  When memory is full, the least recently used group goes, except those with open
    requests that the latest draft call served.
    """

    def __init__(
        self, memory_bytes: int = 1 << 30, *, voting: Voting = ..., common_bytes: int = 1 << 25
    ) -> None: ...
    @property
    def voting(self) -> Voting: ...
    def open_group(self, prompt: Int32, now_s: float, ttl_s: float) -> int:
        """Open a group; it expires ``ttl_s`` after ``now_s`` or the last ``touch_group``."""

    def touch_group(self, group: int, now_s: float) -> None: ...
    def drop_group(self, group: int) -> None:
        """Drop a group and its requests; its responses go to the common index."""

    def expire(self, now_s: float) -> list[int]:
        """Drop the groups whose time is up and return their handles."""

    def clear(self) -> None:
        """Drop everything; counters stay."""

    def open_request(self, group: int) -> int:
        """Open a request whose text begins after the group's prompt; at most 2,047 per group."""

    def append(self, request: int, prev_token_count: int, tokens: Int32) -> None:
        """Add response tokens that follow the first ``prev_token_count``.

        Those already there are skipped.  Raises on a gap, a difference, a negative id, a closed request,
        and when neither memory nor a droppable group is left.
        """

    def length(self, request: int) -> int:
        """Response tokens stored."""

    def tokens(self, request: int, start: int, stop: int) -> Int32:
        """Return a copy of response tokens ``start`` to ``stop``."""

    def close_request(self, request: int) -> None:
        """End a request; its text stays with the group."""

    def draft(
        self,
        requests: Int32 | NDArray[np.int64],
        rows: Int32,
        lengths: Int32,
        limits: Int32,
        tokens: Int32,
        out: Int32,
        counts: Int32,
        probabilities: Float32,
    ) -> None:
        """Append what is new in each request's row, then draft a path for it; in place, zero copy.

        Row ``rows[b]`` of ``tokens`` [R, L] holds prompt and response of ``requests[b]``, ``lengths[b]``
        tokens in all.  Writes ``counts[b] <= min(limits[b], K)`` tokens to ``out`` [B, K], and to
        ``probabilities`` [B, K] the estimated chance that the draft is accepted up to each.  Limit 0 only
        appends.  All arrays are C-contiguous int32, ``probabilities`` float32; one-dimensional ones and
        the outputs may be longer than the batch, whose size is that of ``requests``.
        """

    def draft_trees(
        self,
        requests: Int32 | NDArray[np.int64],
        rows: Int32,
        lengths: Int32,
        max_nodes: Int32,
        tokens: Int32,
        out: Int32,
        parents: Int32,
        counts: Int32,
        probabilities: Float32,
        top_k: int = 0,
        max_depth: int = 0,
    ) -> None:
        """Draft trees, most probable nodes first; ``parents`` [B, N] precede their children, -1 is the root.

        At most ``top_k`` children per node and ``max_depth`` tokens per path; 0: no limit.
        """

    def stats(self) -> IndexStats: ...
