"""Drafting in vLLM's workers: a ``DraftSource`` behind its custom proposer, or a method of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from seer_worker.process.drafts import Drafting, Drafts, SourceProposer
from seer_worker.wire import Degraded

from seer_core.ports.drafting import SourceSpec
from seer_vllm.draft_lengths import schedule_of
from seer_vllm.drafters import OWN_METHODS

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = ["OwnMethod", "Proposer", "own_method", "speculative_config"]

PROPOSER = "seer_vllm.proposer.Proposer"


CARRIER = {"method": "ngram_gpu", "prompt_lookup_min": 1, "prompt_lookup_max": 1}
"""The method with which the second model runner is made, before ``speculator.install`` replaces it."""


def speculative_config(spec: SourceSpec, *, second: bool, lengths: tuple[int, ...] = ()) -> dict[str, Any]:
    """Return vLLM's ``speculative_config`` for a source; ``second``: for its second model runner.

    That records graphs for drafts of these ``lengths``, if there are any.
    """
    method = own_method(spec)
    if second:
        graphs = {"num_speculative_tokens_per_batch_size": schedule_of(lengths)} if lengths else {}
        return {**CARRIER, "num_speculative_tokens": spec.draft_tokens, **graphs}
    if method is None:
        return {"method": "custom_class", "model": PROPOSER, "num_speculative_tokens": spec.draft_tokens}
    return {**spec.settings, "method": method, "num_speculative_tokens": spec.draft_tokens}


def own_method(spec: SourceSpec) -> str | None:
    """Return which method of vLLM's own the source is; None if it is a class."""
    return spec.path.partition(":")[2] if spec.path in OWN_METHODS else None


class Proposer(SourceProposer):
    """vLLM's ``custom_class``; ``Speculator`` asks it in the second model runner."""

    def __init__(self, vllm_config: Any) -> None:
        super().__init__(
            vllm_config.speculative_config.num_speculative_tokens,
            vllm_config.model_config.get_vocab_size(),
            vllm_config.scheduler_config.max_num_seqs,
        )
        self.batch_ids: Callable[[], Sequence[str]] = list
        """Returns the ids of the whole batch, in order."""
        self.request_ids = lambda: list(self.batch_ids())

    def load_model(self, model: Any) -> None:
        """Load nothing: a source needs no model of vLLM's."""

    def propose(
        self,
        sampled_token_ids: list[list[int]],
        num_tokens_no_spec: NDArray[np.int32],
        token_ids_cpu: NDArray[np.int32],
        **_: Any,
    ) -> Drafts:
        """Return drafts for the next step, a list for each request; not asked where one nears its end."""
        lengths = num_tokens_no_spec[: len(sampled_token_ids)]
        return self.propose_for(
            sampled_token_ids, lengths, lambda row, start, stop: token_ids_cpu[row, start:stop].tolist()
        )


class OwnMethod:
    """A method of vLLM's own, timed, and given up when it fails; it reads no source and no chunk's job."""

    def __init__(self, drafter: Any, vllm_config: Any) -> None:
        self._drafter, self._vllm_config = drafter, vllm_config
        self._method = vllm_config.speculative_config.method
        self.drafting = Drafting(
            vllm_config.speculative_config.num_speculative_tokens, vllm_config.model_config.get_vocab_size()
        )
        propose = drafter.propose

        def timed(*arguments: Any, **named: Any) -> Drafts:
            sampled = next(value for value in arguments if isinstance(value, list))
            return self.drafting.draft(sampled, lambda: propose(*arguments, **named))

        drafter.propose = timed

    def reset(self) -> None:
        """Make what keeps texts anew."""
        if self._method == "suffix":
            self._drafter.__init__(self._vllm_config)

    def report(self) -> tuple[float, dict[str, float]]:
        """Return the seconds spent on drafts, and whether it was given up."""
        return self.drafting.seconds, {"failed": 1.0} if self.drafting.failed else {}

    def take_degradations(self) -> list[Degraded]:
        """Return what has failed since the last call."""
        return self.drafting.degradations.take()
