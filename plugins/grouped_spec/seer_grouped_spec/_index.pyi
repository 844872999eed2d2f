"""The draft index of grouped speculative decoding and the choice among its drafts, in C++ (src/)."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from seer_core.errors import SeerError

Int32 = NDArray[np.int32]
Float32 = NDArray[np.float32]
Float64 = NDArray[np.float64]

VERSION: str
"""Of the distribution that this was built in."""
SOURCE_DIGEST: str
"""Of the source that this was built from; see ``doctor.source_digest``."""

class DraftIndexError(SeerError):
    """A call that the index cannot carry out.

    Remedy: change the argument that the message names.
    """

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

    ``drafts`` are requests asked for with a limit above 0.  No draft was given for ``stale`` ones (gone or
    closed), ``mismatched`` ones (what they wrote does not go on from what is stored, or holds a negative id)
    and ``unstored`` ones (some of their text found no room; ``append`` it).  ``bytes_leaving`` is text of
    dropped groups on its way into the common index, a little per call.
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

    Every call keeps the GIL.  A handle never names anything but what it was given out for: once that is
    gone, ``draft`` gives no tokens for it and every other call raises.

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
        lengths: Int32,
        written: Int32,
        new_tokens: Int32,
        limits: Int32,
        out: Int32,
        counts: Int32,
        probabilities: Float32,
    ) -> None:
        """Append what each request has written, then draft a path for it; in place, zero copy.

        Prompt and response of ``requests[b]`` have ``lengths[b]`` tokens in all, the last ``written[b]`` of
        which are its own in ``new_tokens``, where one request's follow the other's; those that are stored
        already are skipped.  Writes ``counts[b] <= min(limits[b], K)`` tokens to ``out`` [B, K], and to
        ``probabilities`` [B, K] the estimated chance that the draft is accepted up to each.  Limit 0 only
        appends.  All arrays are C-contiguous int32, ``probabilities`` float32; but for ``new_tokens`` they
        may be longer than the batch, whose size is that of ``requests``.
        """

    def draft_trees(
        self,
        requests: Int32 | NDArray[np.int64],
        lengths: Int32,
        written: Int32,
        new_tokens: Int32,
        max_nodes: Int32,
        out: Int32,
        parents: Int32,
        counts: Int32,
        probabilities: Float32,
        top_k: int = 0,
        max_depth: int = 0,
        paths: int = 0,
    ) -> None:
        """Draft trees, most probable nodes first; ``parents`` [B, N] precede their children, -1 is the root.

        At most ``top_k`` children per node, ``max_depth`` tokens per path and so many ``paths``; 0: no limit.
        """

    def stats(self) -> IndexStats: ...

class Calibration:
    """Acceptance of tokens drafted with a given probability; monotone, and the identity at first."""

    def __init__(self, refresh: int = 16) -> None: ...
    def calibrate(self, probability: float) -> float:
        """Return the observed acceptance of tokens with this probability; order is kept."""

    def learn(self, verdicts: Sequence[tuple[float, bool]]) -> None:
        """Take in draft tokens' uncalibrated probabilities, and whether each was accepted.

        They show after ``refresh`` calls.
        """

class Step:
    """The parts of one decoding step.

    ``batch`` requests with ``context_tokens`` in all; ``drafting`` of them, with ``drafting_context_tokens``
    in all, verify ``draft_tokens``.
    """

    def __init__(
        self,
        batch: float,
        context_tokens: float,
        drafting: float,
        drafting_context_tokens: float,
        draft_tokens: float,
    ) -> None: ...
    @property
    def batch(self) -> float: ...
    @property
    def context_tokens(self) -> float: ...
    @property
    def drafting(self) -> float: ...
    @property
    def drafting_context_tokens(self) -> float: ...
    @property
    def draft_tokens(self) -> float: ...

class StepModel:
    """Predicts seconds per step: a profile, corrected by every step that `learn` receives.

    ``profile`` [batches, K + 1] holds T(B, 0), T(B, 1), ..., T(B, K) in seconds for B = 1, 2, ...
    """

    REFRESH: int
    """Steps between two fits."""

    def __init__(self, profile: Float64) -> None: ...
    def seconds(self, step: Step) -> float:
        """Return the seconds of a step; never less than a tenth of what the profile says."""

    def costs(self, batch: int) -> tuple[float, float, float]:
        """Return what drafting adds, in seconds: per request, per token of its context, per draft token."""

    def learn(self, step: Step, seconds: float) -> None:
        """Take in how long a step really took."""

class TokenChoice:
    """Which draft tokens to verify: the most probable of the whole batch, as many as pay.

    ``profile`` is as for ``StepModel``.  ``priority_factor`` is what a probe's token is worth in tokens of
    others when tokens compete (the paper's lambda); whether drafts pay at all is judged by plain tokens.
    They do if they give ``least_gain`` more tokens per second than a step without.  Not thread-safe.
    """

    LEARN_EVERY: int
    """Steps between those whose verdicts are learnt from."""
    EXPLORE_EVERY: int
    """Steps without drafts after which one token is drafted only to learn what drafts are worth, and cost."""

    def __init__(self, profile: Float64, priority_factor: float = 2.0, least_gain: float = 0.02) -> None: ...
    def open(self, handle: int, probe: bool) -> None:
        """Learn that a request, a probe or not, runs under this handle from now on."""

    def choose(
        self,
        handles: Int32,
        lengths: Int32,
        counts: Int32,
        chances: Float32,
        drafts: Int32 | None = None,
        parents: Int32 | None = None,
    ) -> None:
        """Lower ``counts`` [B] of draft tokens to what is worth verifying; in place.

        ``lengths`` [B] are the requests' tokens so far, ``chances`` [>= B, K] that a draft is accepted up to
        each token, as the index says.  Trees, most probable tokens first, come with their tokens and
        ``parents``, both [>= B, K].
        """

    def learn(self, handles: Int32, written: Int32, new_tokens: Int32, seconds: float) -> None:
        """Learn that the step last chosen for took so long, and gave ``written`` [B] tokens to ``handles``.

        ``new_tokens``, one request's after the other's, show which of a tree's were accepted.  The duration
        counts if the same requests are here, none was in its prefill, and this method was called after
        every step.
        """

    @property
    def calibration(self) -> Calibration: ...
    @property
    def steps(self) -> StepModel: ...
