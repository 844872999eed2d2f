"""The nouns of a rollout: what a user submits, what the scheduler keeps of it, what comes back."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from enum import Enum
from functools import cached_property
from typing import Any, Literal

import attrs
import msgspec

from seer_core.model.arrays import Logprobs, PromptLogprobs, Tokens, TopLogprobs
from seer_core.model.sampling import Sampling

__all__ = [
    "MOST_RESPONSES",
    "WHOLE",
    "ChunkRecord",
    "Completion",
    "Exactness",
    "FinishReason",
    "GroupContext",
    "InstanceInfo",
    "InstanceStatus",
    "PromptGroup",
    "Request",
    "RequestState",
    "TurnRecord",
    "WrittenResponse",
    "group_seed",
    "request_seed",
]

MOST_RESPONSES = 65_536
"""Of one group: beyond any group that is trained on, and still no danger to the machine's memory."""

FinishReason = Literal["stop", "length", "error", "aborted"]
"""The reason why a response is over: the model ended it, its limit did, it failed, or the user aborted it."""

WHOLE: tuple[FinishReason, ...] = ("stop", "length")
"""Reasons of responses that ended by themselves or at their limit: a scheduler learns from no others."""

Exactness = Literal["exact", "reproducible", "distributed"]
"""``exact``: a token depends on the request's seed, the token's place and the tokens before it, however the
response is divided and wherever it runs. ``reproducible``: also on where its chunk begins, so the same chunks
give the same response. ``distributed``: on chance; its distribution is the model's all the same.
"""


class PromptGroup(msgspec.Struct, frozen=True):
    """One prompt and the ``n`` responses wanted for it (GRPO's group)."""

    id: str
    """The group's id."""
    prompt_token_ids: tuple[int, ...]
    """The tokens of the prompt."""
    n: int
    """How many responses are wanted."""
    max_tokens: int
    """The most tokens of each response, prompt excluded."""
    sampling: Sampling = Sampling()
    """How tokens are drawn."""
    seed: int = 0
    """The group's seed, from which each response's own follows, unless ``seeds`` has them."""
    metadata: Mapping[str, Any] = {}
    """The user's own data, which comes back with each completion."""
    known_lengths: tuple[int, ...] | None = None
    """The tokens of each response, where they are known beforehand; only an oracle or a simulated engine
    reads them.
    """
    labels: Mapping[str, str] = {}
    """Labels such as a tenant or a priority: strategies see them, and the trace keeps them."""
    timeout_s: float | None = None
    """Responses that are not over so long after their submission are aborted."""
    streams: bool = False
    """Whether the responses are read while they are written; an engine that can then reports the pieces of a
    chunk.
    """
    turns: bool = False
    """Whether an environment answers the turns of its responses; the rollout sets it."""
    trajectories: tuple[str, ...] = ()
    """The trajectory of which each response is one turn; empty for none. Their KV stays in the KV pool, for
    the next turn, until ``Driver.forget`` of it.
    """
    family: str = ""
    """The family that it is of; empty for none. Groups of a family are siblings to each other: the lengths
    of their responses help all of them, and so do the texts until ``Driver.forget`` of it.
    """
    attachments: Mapping[str, Any] = {}
    """Further fields for an engine that takes some, such as images or an adapter: they go to it unread with
    each chunk.
    """
    seeds: tuple[int, ...] = ()
    """The seed of each response; empty where they follow from the group's."""

    def seed_of(self, index: int) -> int:
        """Return the seed with which the tokens of response ``index`` are drawn."""
        return self.seeds[index] if self.seeds else request_seed(self.seed, index)


def group_seed(run_seed: int, iteration: int, group_id: str) -> int:
    """Return the 63-bit seed of a group; another run's seed or another iteration changes every group's."""
    digest = hashlib.blake2b(f"{run_seed}:{iteration}:{group_id}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def request_seed(group_seed: int, index: int) -> int:
    """Return the 63-bit sampling seed of response ``index``, by SplitMix64 (Steele et al. 2014)."""
    z = (group_seed * 0x9E3779B97F4A7C15 + (index + 1) * 0xD1B54A32D192ED03) & 0xFFFFFFFFFFFFFFFF
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return (z ^ (z >> 31)) >> 1


class RequestState(Enum):
    """Where a request stands; ``WAITING`` and ``RUNNING`` alternate, once per chunk.

    ``ACTING``: its environment works on its last turn; it holds no place in an engine, and no KV is reserved.
    """

    WAITING = "waiting"
    RUNNING = "running"
    ACTING = "acting"
    FINISHED = "finished"


NOT_IN_FLIGHT: dict[str, int] = {}
"""Shared by all groups of which nothing was ever in flight; it stays empty."""


@attrs.define(eq=False)
class GroupContext:
    """The state of one prompt group, which its requests share.

    All lengths are in tokens.  ``finished`` counts the responses that ended by themselves or at
    their limit; ``left`` counts those not over yet.  ``longest_finished_tokens`` is 0 until one has
    finished.  ``steps`` engine steps verified ``drafted`` draft tokens for it and accepted ``accepted``.
    ``in_flight`` counts its requests in flight by instance, by id, where there are any: there is its prompt.
    ``sampling`` and ``labels`` are the prompt's; it was submitted at ``arrived_s``, on the run's clock.
    ``finished`` and ``longest_finished_tokens`` are those of its whole ``family``, if it is of one.
    """

    id: str
    """The group's id."""
    seq: int
    """Its number by arrival."""
    size: int
    """How many responses are wanted."""
    prompt_tokens: int
    """The tokens of the prompt."""
    max_tokens: int
    """The most tokens of each response."""
    known_lengths: tuple[int, ...] | None = None
    """The true length of each response, which only an oracle gets."""
    left: int = 0
    finished: int = 0
    longest_finished_tokens: int = 0
    steps: int = 0
    drafted: int = 0
    accepted: int = 0
    in_flight: dict[str, int] = attrs.Factory(dict)
    sampling: Sampling = attrs.Factory(Sampling)
    labels: Mapping[str, str] = attrs.Factory(dict)
    arrived_s: float = 0.0
    first_seq: int = 0
    """The number by arrival of its first request; the others follow."""
    turns: bool = False
    """Whether an environment answers the turns of its responses."""
    family: str = ""
    """The family that it is of; empty for none."""
    informed: bool = False
    """Whether responses of its family had finished when it came, so that it needs no probe."""
    whole: bool = False
    """Whether its responses are not divided, for the engines cannot go on with one under its sampling."""

    @property
    def estimate_tokens(self) -> int:
        """Longest finished response; ``max_tokens`` while none has finished (paper, Algorithm 2)."""
        return self.longest_finished_tokens if self.finished else self.max_tokens


@attrs.define(eq=False, weakref_slot=False)
class Request:
    """One response in the making.  ``instance`` is where it runs, or ran last (its KV is there).

    ``chunk_tokens`` and ``chunk_kv_tokens`` are the limit and the whole footprint of its last chunk.  Its id
    and number follow from its group and index, for a million may wait.
    """

    group: GroupContext
    """The state of its group."""
    index: int
    """Its number within its group, from 0; the one with 0 is the probe."""
    state: RequestState = RequestState.WAITING
    """Where it stands."""
    generated_tokens: int = 0
    """The tokens of its finished chunks, and of its environment's answers."""
    chunk_tokens: int = 0
    chunk_kv_tokens: int = 0
    chunks: int = 0
    """How many chunks have finished."""
    migrations: int = 0
    """How many of them ran on another instance than the one before."""
    failures: int = 0
    """How often a chunk of it failed."""
    instance: str | None = None

    def __lt__(self, other: Request) -> bool:
        """Sort by arrival, so that a heap may hold a request twice: queues often drop stale entries late."""
        return self.seq < other.seq

    @property
    def id(self) -> str:
        """The request's id, ``GROUP/INDEX``."""
        return f"{self.group.id}/{self.index}"

    @property
    def seq(self) -> int:
        """Its number by arrival."""
        return self.group.first_seq + self.index

    @property
    def probe(self) -> bool:
        """Whether it is the group's speculative request, which predicts the others' length (paper)."""
        return self.index == 0 and not self.group.informed

    @property
    def context_tokens(self) -> int:
        """Prompt and generated tokens: what the next chunk starts from."""
        return self.group.prompt_tokens + self.generated_tokens

    @property
    def remaining_tokens(self) -> int:
        """Output tokens the request may still generate."""
        return self.group.max_tokens - self.generated_tokens


class InstanceInfo(msgspec.Struct, frozen=True, dict=True):
    """The limits of an engine instance; fixed while it lives."""

    id: str
    """The instance's name."""
    kv_capacity_tokens: int
    """The tokens whose KV it holds: a multiple of ``block_tokens``."""
    block_tokens: int
    """The tokens of one KV block."""
    max_running: int
    """The most sequences that it decodes in one step."""
    max_model_tokens: int
    """The longest context, prompt and response together."""
    kv_bytes_per_token: int = 0
    """The KV of one token; 0 where unknown."""
    prefill_s_per_token: float = 0.0
    """The time that prefilling takes for one token; 0 where unknown."""
    fetch_s_per_token: float | None = None
    """The time to bring one token's KV from another instance; none where instances share no KV."""
    fingerprint: str = ""
    """Stands for the weights that the instance started with, as ``InstanceClient.update_weights`` has it;
    empty if the engine does not say.
    """
    shares_prompts: bool = False
    """Whether requests of one group that run there at a time hold the full blocks of their prompt, its last
    token left out, once.
    """
    step_s: float = 0.0
    """The time of a step that decodes 32 requests (``max_running`` if fewer) of short contexts; 0 where
    unknown.
    """
    chunk_s: float = 0.0
    """The delay that a chunk whose KV is there causes to others when it comes in; 0 where unknown."""
    chunk_s_per_token: float = 0.0
    """The part of that delay for each token of the chunk's context; 0 where unknown."""
    chunk_gap_s: float = 0.0
    """The time from a chunk's end to the next token of its response, the way of requests included; 0 where
    the next step has it.
    """
    labels: dict[str, str] = {}
    """Labels that the engine's config gives it, such as the kind of GPU."""
    kv_kind: str = ""
    """Stands for the layout of its KV: only instances of one kind fetch each other's."""
    model: str = ""
    """Stands for the files of its model, as ``ModelInfo.digest`` has it; empty if the engine does not say."""
    node: str = ""
    """Stands for the node that it runs on, as its worker measured it; empty if the engine does not say."""
    kv_reach: str = ""
    """The node within which its KV is fetched; empty where the pool spans nodes."""
    ends_early: bool = False
    """Whether it ends chunks that may end early before it preempts any."""
    overcommits: bool = False
    """Whether less than whole chunks should be reserved there, although it preempts where KV runs short."""
    metrics_address: str = ""
    """The address at which its engine's own figures are served for Prometheus; empty where none are."""
    end_token_ids: tuple[int, ...] = ()
    """The tokens with which a response ends; empty if the engine does not say."""
    exactness: Exactness = "exact"
    """How far its tokens depend on a request's seed and their places alone."""
    raw_logprobs: bool = True
    """Whether its log-probs are those of the model's own distribution, whichever sampling a prompt has."""
    quantization: str = ""
    """The format in which its weights are quantised, whose log-probs its are; empty if they are not, or the
    engine does not say.
    """

    @cached_property
    def kv_domain(self) -> tuple[str, str]:
        """Kind and reach of its KV: only instances that have both in common fetch each other's."""
        return self.kv_kind, self.kv_reach

    @cached_property
    def move_cost(self) -> float:
        """The cost of taking over a request's KV from its domain, in 0..1 of prefilling all of it again."""
        if self.fetch_s_per_token is None:
            return 1.0
        if self.prefill_s_per_token <= 0.0:
            return 0.0
        return min(1.0, self.fetch_s_per_token / self.prefill_s_per_token)

    def move_cost_from(self, other: InstanceInfo) -> float:
        """Return ``move_cost`` for a request from there; of another domain or no pool, it prefills all."""
        shared = self.kv_domain == other.kv_domain and other.fetch_s_per_token is not None
        return self.move_cost if shared else 1.0


@attrs.define(eq=False)
class InstanceStatus:
    """One instance as the scheduler sees it: its limits and the load the scheduler gave it.

    ``reserved_kv_tokens`` sums the whole-block footprints of the chunks in flight, a prompt that siblings
    share counted once, so it is there before the engine has allocated it; ``reported_*`` are the figures of
    the engine's last report.
    """

    info: InstanceInfo
    """Its limits and labels."""
    seq: int
    """Its number by start."""
    running: int = 0
    """The chunks that the scheduler has sent there and that are not over."""
    reserved_kv_tokens: int = 0
    reported_kv_usage: float = 0.0
    """The part of its KV in use, from 0 to 1."""
    reported_running: int = 0
    """The requests that it runs."""
    reported_waiting: int = 0
    """The requests that wait inside it."""
    id: str = attrs.field(init=False)
    """The instance's id."""

    def __attrs_post_init__(self) -> None:
        self.id = self.info.id

    @property
    def free_kv_tokens(self) -> int:
        """KV tokens that no chunk in flight may need; negative when over-committed."""
        return self.info.kv_capacity_tokens - self.reserved_kv_tokens

    @property
    def free_slots(self) -> int:
        """Sequences that could still join the running batch."""
        return self.info.max_running - self.running

    def footprint(self, request: Request, chunk_tokens: int) -> int:
        """KV tokens, in whole blocks, that such a chunk adds to what is reserved here.

        It is what ``request`` needs to the chunk's end, without the prompt's blocks that siblings in flight
        here have reserved already.
        """
        info, group = self.info, request.group
        block = info.block_tokens
        tokens = group.prompt_tokens + request.generated_tokens + chunk_tokens
        whole = -(-tokens // block) * block
        if info.shares_prompts and self.id in group.in_flight:
            return whole - (group.prompt_tokens - 1) // block * block
        return whole

    def shared_kv_tokens(self, group: GroupContext) -> int:
        """KV tokens of the group's prompt that its requests in flight hold here, for one more as well."""
        info = self.info
        if info.shares_prompts and self.id in group.in_flight:
            return (group.prompt_tokens - 1) // info.block_tokens * info.block_tokens
        return 0

    def prompt_kv_tokens(self, group: GroupContext) -> int:
        """KV tokens of the group's prompt that its requests hold once while they are in flight here together.

        These are its full blocks, but for the last token, which every request computes for itself.
        """
        block = self.info.block_tokens
        return (group.prompt_tokens - 1) // block * block if self.info.shares_prompts else 0


class ChunkRecord(msgspec.Struct, frozen=True, gc=False):
    """One finished chunk: where and when it ran and its cost.  Times are on the run's clock."""

    instance: str
    """The instance on which it ran."""
    tokens: int
    """The new tokens that it brought."""
    dispatched_s: float
    """When it was sent to the instance."""
    finished_s: float
    """When it finished."""
    cached_tokens: int
    """The tokens of its context whose KV the instance's prefix cache had."""
    prefilled_tokens: int
    """The tokens of its context that were computed before the first new one."""
    recomputed_tokens: int
    """The positions that were computed a second time, on re-entry or after a preemption."""
    preemptions: int
    """How often the engine preempted it."""
    weight_version: int
    """The version of the weights that wrote it."""
    steps: int = 0
    """The engine steps that gave it tokens."""
    drafted_at: list[int] = []
    """The count at index j is of the steps that verified at least j + 1 draft tokens."""
    accepted_at: list[int] = []
    """The count at index j is of the steps that accepted at least j + 1 draft tokens."""
    pool_tokens: int = 0
    """The tokens of its context whose KV came from the pool."""
    attachments: dict[str, Any] = {}
    """The engine's own fields of its answer, unread."""


class TurnRecord(msgspec.Struct, frozen=True, gc=False):
    """One turn of a response: what the model wrote up to a stop, and what its environment answered."""

    tokens: int
    """The tokens that the model wrote."""
    answer_tokens: int = 0
    """The tokens of the environment's answer, which follow."""
    environment_s: float | None = None
    """The time from the end of the model's tokens to the answer, in seconds; none without an answer."""
    reward: float | None = None
    """The reward of the turn, if the environment gave one."""


class WrittenResponse(msgspec.Struct):
    """A response as an earlier process left it; ``finish_reason`` is None where it is not over."""

    token_ids: Tokens = msgspec.field(default_factory=Tokens)
    """The tokens of its finished chunks."""
    logprobs: Logprobs = msgspec.field(default_factory=Logprobs)
    """The log-prob of each, in nats."""
    chunks: list[ChunkRecord] = msgspec.field(default_factory=list)
    """The finished chunks, in order."""
    finish_reason: FinishReason | None = None
    top_logprobs: TopLogprobs | None = None
    """The most probable tokens at the place of each, where the prompt asks for them."""
    prompt_logprobs: PromptLogprobs | None = None
    """The log-probs of the prompt, where it asks for them and there is a chunk."""
    turns: list[TurnRecord] = msgspec.field(default_factory=list)
    """The turns that its environment has answered, in order; tokens after them are of the next one."""
    acting: bool = False
    """Whether the next turn is whole, and its environment has not answered it."""
    attachments: Mapping[str, Any] | None = None
    """The further fields of its chunks from now on, if its answers brought some; None for the prompt's."""


class Completion(msgspec.Struct, frozen=True):
    """One finished response."""

    request_id: str
    """The request, as ``GROUP/INDEX``."""
    group_id: str
    """The group that it is of."""
    index: int
    """The response's number within its group, from 0."""
    seed: int
    """The seed with which its tokens were drawn."""
    token_ids: Tokens
    """The tokens of the response."""
    logprobs: Logprobs
    """The log-prob of each token under the raw model distribution (temperature 1, no top-k or top-p), in
    nats.
    """
    text: str | None
    """The response as text; none without a tokenizer."""
    finish_reason: FinishReason
    """The reason why it is over: ``stop`` and ``length`` end a response as usual."""
    weight_version: int
    """The version of the weights that wrote it."""
    chunks: list[ChunkRecord]
    """Its chunks, in order."""
    instances: list[str]
    """The instances on which it ran, in order."""
    finished_s: float
    """When it was over, on the run's clock."""
    metadata: Mapping[str, Any]
    """The prompt's own data."""
    stop_reason: str | int | None = None
    """The stop string or the stop token of its prompt's at which it ended."""
    top_logprobs: TopLogprobs | None = None
    """For each token of the response the most probable tokens in its place, with their log-probs under the
    same distribution, the most probable first: pairs of token id and log-prob. None where the prompt asks for
    none.
    """
    prompt_logprobs: PromptLogprobs | None = None
    """The same of the prompt's tokens but its first: ``logprobs`` and ``top_logprobs``. None where the prompt
    does not ask for them, or the response has no token.
    """
    turns: list[TurnRecord] = []
    """The turns of the response, in order, where an environment answers them; their tokens are all of its
    tokens. The environment's tokens have log-prob 0.
    """
    reward: float | None = None
    """The sum of the rewards that its environment gave; none where it gave none."""
    attachments: Mapping[str, Any] = {}
    """The further fields of its last chunks, where answers of its environment have brought some, such as the
    images of prompt and answers; else empty.
    """
    error: str | None = None
    """The reason, in words, why its environment or its last chunk failed, with finish reason ``error``."""

    @property
    def whole(self) -> bool:
        """Whether the response ended by itself or at its limit, and neither failed nor was aborted."""
        return self.finish_reason in WHOLE

    @property
    def loss_mask(self) -> list[int]:
        """For each token of the response 1 if the model wrote it, and 0 if its environment answered it."""
        if not self.turns:
            return [1] * len(self.token_ids)
        return [mask for turn in self.turns for mask in (*[1] * turn.tokens, *[0] * turn.answer_tokens)]
