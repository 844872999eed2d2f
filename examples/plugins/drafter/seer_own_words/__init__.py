"""Drafts from what a response has said before."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from msgspec import Meta, Struct
from seer_core.plugins.hookspecs import hookimpl
from seer_core.ports.drafting import DraftBatch, DraftContext, Drafter, SiblingTokens, SourceSpec, StepTimes
from seer_core.ports.engine import ChunkJob


class Settings(Struct, frozen=True):
    """``[plugin.own_words]``: no draft has more than ``draft_tokens``."""

    draft_tokens: Annotated[int, Meta(ge=1, le=64)] = 4


class Lookup:
    """DraftSource, the engine half: what followed the last token where the request has it before."""

    def __init__(self, settings: Mapping[str, Any], host: DraftContext) -> None:
        self._texts: dict[int, list[int]] = {}
        self._drafted = 0

    def open(self, job: ChunkJob) -> int:
        """Keep the text so far under the lowest free handle, which is returned."""
        handle = next(number for number in range(len(self._texts) + 1) if number not in self._texts)
        self._texts[handle] = list(job.token_ids)
        return handle

    def add_sibling_tokens(self, text: SiblingTokens) -> None:
        """Do nothing; never called, because this drafter does not share tokens between instances."""

    def propose(self, batch: DraftBatch) -> None:
        """Take in what has been written, and write drafts for the next step: lines, so parents stay."""
        requests = zip(batch.handles.tolist(), batch.limits.tolist(), batch.each_written(), strict=True)
        for b, (handle, limit, written) in enumerate(requests):
            text = self._texts[handle]
            text += written.tolist()
            earlier = next((at for at in range(len(text) - 1, 0, -1) if text[at - 1] == text[-1]), len(text))
            draft = text[earlier:][:limit]
            batch.drafts[b, : len(draft)] = draft
            batch.counts[b] = len(draft)
            self._drafted += len(draft)

    def close(self, handle: int) -> None:
        """Free the handle."""
        del self._texts[handle]

    def forget(self, group_id: str) -> None:
        """Drop a group; nothing is kept of any."""

    def reset(self) -> None:
        """Drop everything."""
        self._texts.clear()

    def stats(self) -> dict[str, float]:
        """Return figures for the trace."""
        return {"drafted_tokens": self._drafted}

    def stop(self) -> None:
        """End what was started: nothing."""


class Steady:
    """DraftPolicy, the pure half: drafts of one length while the batch is small."""

    def __init__(self, draft_tokens: int) -> None:
        self.draft_tokens = draft_tokens

    def lengths(self, probes: int, others: int) -> tuple[int, int]:
        """Return the draft tokens per probe and per other request."""
        return (self.draft_tokens, self.draft_tokens) if probes + others <= 8 else (0, 0)

    def record_acceptance(self, drafted_at: Sequence[float], accepted_at: Sequence[float]) -> None:
        """Ignore how many drafts were accepted: the length of drafts is fixed."""


class OwnWords:
    """Drafter: says what each engine's worker loads."""

    def __init__(self, draft_tokens: int) -> None:
        self.draft_tokens = draft_tokens

    def source(self) -> SourceSpec:
        """Return the engine half."""
        return SourceSpec(f"{Lookup.__module__}:{Lookup.__name__}", {}, self.draft_tokens)

    def shares(self) -> bool:
        """Return whether sources learn what siblings write on other instances: this one looks at no other."""
        return False

    def policy(self, step_times: StepTimes) -> Steady:
        """Return the pure half, which simulated engines ask."""
        return Steady(self.draft_tokens)


@hookimpl
def seer_make_drafter(settings: Settings) -> Drafter:
    """Fill the slot."""
    return OwnWords(settings.draft_tokens)
