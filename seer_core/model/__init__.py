"""The nouns: requests, chunks, events, results, and the arrays that hold tokens."""

from seer_core.model.requests import (
    MOST_RESPONSES,
    MOST_TOP_K,
    ChunkRecord,
    Completion,
    FinishReason,
    GroupContext,
    InstanceInfo,
    InstanceStatus,
    PromptGroup,
    Request,
    RequestState,
    Sampling,
    request_seed,
)

__all__ = [
    "MOST_RESPONSES",
    "MOST_TOP_K",
    "ChunkRecord",
    "Completion",
    "FinishReason",
    "GroupContext",
    "InstanceInfo",
    "InstanceStatus",
    "PromptGroup",
    "Request",
    "RequestState",
    "Sampling",
    "request_seed",
]
