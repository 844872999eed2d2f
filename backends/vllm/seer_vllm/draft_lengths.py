"""One length of drafts for all requests of a step, without which vLLM 0.32 replays no full CUDA graph.

A full graph of decoding is recorded for so many requests with the same number of positions each.  A step
whose drafts differ in length runs piecewise, with each attention launched by the host:

- in the first model runner ``GPUModelRunner._is_uniform_decode`` (``v1/worker/gpu_model_runner.py``) asks
  whether every request has exactly one position more than the longest draft has tokens.
  ``CudagraphDispatcher`` (``v1/cudagraph_dispatcher.py``) has full graphs of that length alone: there are
  none for a step without drafts either;
- the second asks for one length, any (``get_uniform_decode_token_count`` of ``v1/worker/utils.py``), and
  records graphs of each that ``num_speculative_tokens_per_batch_size`` names
  (``CudaGraphManager._init_candidates`` of ``v1/worker/gpu/cudagraph_utils.py``).  It looks for one only
  among those with the next number of positions for which there is any.  So further lengths would take graphs
  from each other, and there are two: the longest, and 0, where about half of all batches have one.

So the scheduler pads shorter drafts.  A padded token is a guess like any other: it is accepted exactly if it
is the token that would have been sampled, so no token of a response depends on it.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["PADDING", "length_of", "lengths_of", "schedule_of"]

PADDING = 0
"""The token behind a draft that is shorter than its step's length; every vocabulary has it."""


def lengths_of(draft_tokens: int) -> tuple[int, ...]:
    """Return the lengths that a step's drafts may have, rising from 0: none, and the one with graphs."""
    return 0, draft_tokens


def length_of(longest: int, lengths: Sequence[int]) -> int:
    """Return the least of ``lengths`` that holds a draft of ``longest`` tokens."""
    return min(each for each in lengths if each >= longest)


def schedule_of(lengths: Sequence[int]) -> list[tuple[int, int, int]]:
    """Return lengths as vLLM's ``num_speculative_tokens_per_batch_size``: (from, to, draft tokens).

    It is what graphs are recorded for; ``AccountingScheduler`` does not go by the number of requests.
    """
    return [(count, count, length) for count, length in enumerate(sorted(lengths, reverse=True), 1)]
