"""The worth of drafts from siblings on recorded responses, found by replay through the draft index."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray
from seer_host.installation import how_to_get_plugin
from seer_sim.replayed import SEGMENT_TOKENS, DraftedText, ReplayedDrafts, ReplayedResponse

from seer_core.errors import ConfigError
from seer_lab.workloads import Workload

if TYPE_CHECKING:
    from seer_grouped_spec.replay import Recording

__all__ = [
    "ReplayedGroup",
    "drafts_of_groups",
    "read_replayed",
    "replayed_drafts",
    "replayed_group",
    "with_replayed",
]

CHANCES = (0.0, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4)
"""Levels at which a batch may cut its drafts; more of them change nothing."""

TEXTS = 16
"""Kinds of text, each of as many steps."""

DRAFT_TOKENS = 8
"""The longest draft (``[plugin.grouped_spec].draft_tokens``)."""

AnyWorkload = TypeVar("AnyWorkload", bound=Workload)
Accepted = NDArray[np.int64]
Chances = NDArray[np.float32]


def read_replayed(path: Path) -> ReplayedDrafts:
    """Replay the responses of a file, as ``seer replay`` reads it, or of a run's directory.

    Raises:
        ConfigError: the draft index is not installed.
        ReplayError: the file cannot be read.
    """
    try:
        from seer_grouped_spec.replay import load
    except ImportError as error:
        remedy = how_to_get_plugin("grouped_spec")
        raise ConfigError(f"--drafts needs the package seer-grouped-spec ({error}); {remedy}") from error
    return replayed_drafts(load(path / "completions.jsonl" if path.is_dir() else path))


class ReplayedGroup(NamedTuple):
    """The responses of a replayed group, and the steps of each stretch of their text."""

    responses: list[ReplayedResponse]
    segments: list[tuple[Accepted, Chances]]


def replayed_drafts(recordings: Sequence[Recording]) -> ReplayedDrafts:
    """Return how well the responses of recorded groups are drafted."""
    return drafts_of_groups([replayed_group(recording) for recording in recordings])


def replayed_group(recording: Recording) -> ReplayedGroup:
    """Replay one group, whose drafts depend on no other."""
    from seer_grouped_spec.replay import replay_steps

    group = ReplayedGroup([], [])
    for number, played in enumerate(replay_steps(recording, DRAFT_TOKENS)):
        tokens = recording.written(number)
        if not tokens:
            continue
        count = -(-tokens // SEGMENT_TOKENS)
        edges = np.searchsorted(played.starts, np.arange(1, count) * SEGMENT_TOKENS)
        found = list(zip(np.split(played.accepted, edges), np.split(played.chances, edges), strict=True))
        steps = tuple(max(1, len(accepted)) for accepted, _ in found)
        name = f"{recording.group}/{number}"
        group.responses.append(ReplayedResponse(name, recording.group, tokens, steps))
        group.segments.extend(part for part in found if len(part[0]))
    return group


def drafts_of_groups(groups: Sequence[ReplayedGroup]) -> ReplayedDrafts:
    """Return how well the responses of replayed groups are drafted."""
    segments = [each for group in groups for each in group.segments]
    responses = tuple(each for group in groups for each in group.responses)
    return ReplayedDrafts(CHANCES, tuple(_texts(segments)), responses)


def with_replayed(workload: AnyWorkload, drafts: ReplayedDrafts) -> AnyWorkload:
    """Return the workload with drafts from siblings that are worth what they were in a replay."""
    engine: dict[str, Any] = workload.tables["engine"]["sim"]
    acceptance = {**engine.get("acceptance", {}), "replayed": msgspec.to_builtins(drafts)}
    tables = {**workload.tables, "engine": {"sim": {**engine, "acceptance": acceptance}}}
    return msgspec.structs.replace(workload, tables=tables)


def _texts(segments: Sequence[tuple[Accepted, Chances]]) -> list[DraftedText]:
    """Sort segments by how much of them is accepted, and add up those that are alike."""
    ordered = sorted(segments, key=lambda each: float(each[0].mean()))
    ends = np.cumsum([len(accepted) for accepted, _ in ordered])
    kinds = np.minimum((ends - 1) * TEXTS // ends[-1], TEXTS - 1)
    texts = []
    for kind in np.unique(kinds).tolist():
        mine = [each for each, of in zip(ordered, kinds.tolist(), strict=True) if of == kind]
        texts.append(
            _text(np.concatenate([each for each, _ in mine]), np.concatenate([each for _, each in mine]))
        )
    return sorted(texts, key=lambda text: text.gain)


def _text(accepted: Accepted, chances: Chances) -> DraftedText:
    """Return the shares of steps that verify and accept each position, level by level."""
    positions = np.arange(chances.shape[1])
    verified, kept, variance = [], [], []
    for least in CHANCES:
        chosen = (chances > 0) & (chances >= least)  # chances never rise along a draft
        counts = chosen.sum(axis=1)
        verified.append(_shares(counts[:, None] > positions))
        kept.append(_shares(np.minimum(accepted, counts)[:, None] > positions))
        variance.append(float(np.where(chosen, chances, 0).sum(axis=1, dtype=float).var()))
    return DraftedText(tuple(verified), tuple(kept), tuple(variance))


def _shares(steps: NDArray[np.bool_]) -> tuple[float, ...]:
    return tuple(steps.mean(axis=0).tolist())
