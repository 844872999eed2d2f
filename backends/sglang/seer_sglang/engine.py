"""A real SGLang, step by step: chunks in, ended ones out, and what each has cost."""

from __future__ import annotations

import itertools
import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import attrs
import torch
from seer_host.ports import reserved_port
from seer_host.routed_experts import first_wanted
from seer_worker.process.account import RequestStats
from seer_worker.process.adapter import LogitRow, ScriptedTokens
from seer_worker.process.drafts import SourceProposer
from seer_worker.process.kv_parts import KvParts
from seer_worker.process.lone_groups import share_thread
from seer_worker.process.meters import Step
from seer_worker.process.pooling import PAUSE_S
from seer_worker.process.stores import FailsafeStore
from sglang.srt.configs.model_config import AttentionArch, ModelConfig
from sglang.srt.managers.io_struct import AbortReq
from sglang.srt.managers.schedule_batch import FINISH_LENGTH, FINISH_MATCHED_TOKEN, Req, ScheduleBatch
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.runtime_context import SpawnRanks, publish
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import PortArgs, ServerArgs

from seer_core.errors import EngineError
from seer_core.model import Sampling
from seer_core.model.arrays import LEAST_LOGPROB, Logprobs, PromptLogprobs, TopLogprobs
from seer_core.ports.engine import ChunkJob
from seer_core.ports.kv import KVStore
from seer_sglang import attention, drafting, embedding, experts, images, internals
from seer_sglang.blocks import SglangLayers
from seer_sglang.pooling import KvPoolAdapter
from seer_sglang.ranked_pool import FollowingPool, LeadingPool
from seer_sglang.ranks import FollowingRank, LeadingRank, in_all_ranks
from seer_sglang.routing import RoutedExperts, keep_in_plain_memory
from seer_sglang.sampling import ChunkState, SglangSampler
from seer_sglang.scheduler import InlineScheduler

__all__ = ["Chunk", "SglangEngine", "read_vocab_size", "server_args"]

ABORTED = ChunkJob("aborted", "aborted", "aborted", [0], 1, 1, Sampling(), 0, 0)
NO_LOGPROBS = -1
"""From where SGLang computes log-probs of a prompt, if it computes none."""

DRAIN_STEPS = 8
"""Steps in which an engine without chunks has put away the last ones: two, in fact."""


@attrs.define(eq=False)
class Chunk:
    """A chunk in SGLang's hands."""

    req: Req
    writing: ChunkState
    account: RequestStats = attrs.field(factory=RequestStats)
    drafted_after: int = 0
    cached_tokens: int | None = None

    @property
    def token_ids(self) -> Sequence[int]:
        """The tokens written so far, to the one with which it ends."""
        written: Sequence[int] = self.req.output_ids_through_stop
        return written

    @property
    def stopped(self) -> bool:
        """Whether it has ended with a token that ends responses."""
        return isinstance(self.req.finished_reason, FINISH_MATCHED_TOKEN)

    @property
    def prompt_logprobs(self) -> PromptLogprobs | None:
        """The log-probs of the prompt, if they were asked for and the prompt is computed."""
        found = self.req.logprob
        if found.input_token_logprobs_val is None:
            return None
        tops = None
        if found.top_logprobs_num:
            places = zip(found.input_top_logprobs_idx[1:], found.input_top_logprobs_val[1:], strict=True)
            tops = TopLogprobs.of(
                [list(zip(ids, map(_possible, values), strict=True)) for ids, values in places]
            )
        return PromptLogprobs(Logprobs(map(_possible, found.input_token_logprobs_val[1:])), tops)

    @property
    def given_up(self) -> str | None:
        """Why SGLang has ended it otherwise than by a token or its length."""
        reason = self.req.finished_reason or self.req.to_finish
        if isinstance(reason, FINISH_MATCHED_TOKEN | FINISH_LENGTH):
            return None
        return str(getattr(reason, "message", reason))


def server_args(settings: Mapping[str, Any], kv_cache_bytes: int | None) -> ServerArgs:
    """Return SGLang's arguments: those given, and KV memory in its own unit.

    Raises:
        EngineError: SGLang does not take them, or the bytes cannot be counted in tokens.
    """
    limit: dict[str, int] = {}
    if kv_cache_bytes is not None:
        args = _accepted(settings)
        config = ModelConfig.from_server_args(args)
        match config.attention_arch:
            case AttentionArch.MHA:
                values = config.get_num_kv_heads(args.tp_size) * (config.head_dim + config.v_head_dim)
            case AttentionArch.MLA:
                values = config.kv_lora_rank + config.qk_rope_head_dim
            case _:
                raise EngineError(
                    "kv_cache_bytes is for models with plain or latent attention; set"
                    " engine_args.max_total_tokens instead"
                )
        token_bytes = config.num_hidden_layers * values * torch.empty(0, dtype=config.dtype).itemsize
        limit["max_total_tokens"] = kv_cache_bytes // token_bytes // args.page_size * args.page_size
    return _accepted(settings, **limit)


def read_vocab_size(args: ServerArgs) -> int:
    """Return the size of a model's vocabulary, before it is loaded."""
    return int(ModelConfig.from_server_args(args).vocab_size)


class SglangEngine:
    """SGLang's scheduler and model in this process, and the chunks they are working on.

    With tensor parallelism it is one of ``ranks``, which meet at a ``port`` of the loopback.  Rank 0's has
    the ``proposer``, if its arguments have drafts.  With ``uniform_drafts`` all steps have trees of one size.
    ``end_token_ids`` are the tokens that end a response, in place of those that SGLang finds.
    """

    def __init__(
        self,
        args: ServerArgs,
        proposer: SourceProposer | None = None,
        ranks: LeadingRank | FollowingRank | None = None,
        port: int | None = None,
        *,
        uniform_drafts: bool = False,
        end_token_ids: Sequence[int] = (),
    ) -> None:
        self.ranks = LeadingRank() if ranks is None else ranks
        nodes = args.speculative_num_draft_tokens if args.speculative_algorithm is not None else None
        self._room = None if nodes is None else drafting.DraftBudget(nodes, uniform=uniform_drafts)
        if self._room is not None:
            drafting.put_in_place(self._room)
        if args.device == "cpu":
            keep_in_plain_memory()
            if args.ep_size > 1:
                experts.install()
        number = self.ranks.number
        publish(args, role="scheduler", ranks=SpawnRanks(world_rank=number, gpu_id=number))
        share_thread()
        with reserved_port() if port is None else nullcontext(port) as meeting:
            self.scheduler = InlineScheduler(args, _ports(meeting))
        internals.check_scheduler(self.scheduler, drafts=self._room is not None)
        self.scheduler.may_end_early = self._may_end_early
        self.runner = self.scheduler.tp_worker.model_runner
        self.config = self.scheduler.model_config
        self.vocab_size: int = self.config.vocab_size
        self._end_token_ids = frozenset(end_token_ids)
        device = torch.device(self.runner.device)
        self.sampler = SglangSampler(
            self.vocab_size, device, self._end_token_ids, args.model_path, self.ranks
        )
        self.runner.sampler = self.sampler
        if args.attention_backend == "torch_native":
            attention.install(self.runner.attn_backend)
            embedding.install()
        if args.device == "cpu":
            images.install(self.runner.model)
        self.images = images.SglangImages(args.model_path, trust_remote_code=args.trust_remote_code)
        self._proposer = proposer
        self._verifier = drafting.KeyedVerifier(self.sampler, self._end_token_ids)
        self._live: list[str] = []
        """The ids of the requests for which drafts are wanted now, in order."""
        self._verified: list[tuple[str, int]] = []
        """The ids of the requests of a step with drafts, and how many tokens each had written before."""
        if proposer is not None:
            proposer.request_ids = lambda: self._live
        if self._room is not None:
            drafting.install(self.scheduler, self._verifier, self._propose, self._room.width)
        self.routing = RoutedExperts(self.scheduler)
        self.chunks: dict[str, Chunk] = {}
        self.computed = Step(0, 0)
        self.parts = _parts_of(self.runner, self.ranks.count)
        self.pooling: KvPoolAdapter | None = None
        self.pause: Callable[[], None] = partial(time.sleep, PAUSE_S)
        """Called in place of a step's computation if chunks only wait for their KV."""
        self._numbers = itertools.count()

    def share(
        self,
        layers: SglangLayers,
        store: KVStore,
        report: Callable[[str], None],
        awaited_bytes: int | None = None,
    ) -> LeadingPool:
        """Use a store, whose blocks are those of ``layers``; ``report`` takes the reason of a failure.

        A request with more than ``awaited_bytes`` to load waits for it; None: none does.
        """
        assert isinstance(self.ranks, LeadingRank)
        self.ranks.send(("follow_pool", (awaited_bytes,), {}))
        failsafe = FailsafeStore(store, report)
        pool = LeadingPool(failsafe, layers.block_bytes, self.ranks, self.parts, awaited_bytes)
        self._use_pool(layers, pool, awaited_bytes)
        return pool

    def follow_pool(self, awaited_bytes: int | None) -> None:
        """Use the store that rank 0 uses."""
        assert isinstance(self.ranks, FollowingRank)
        layers = self.shared_layers()
        self._use_pool(layers, FollowingPool(layers.block_bytes, self.ranks, self.parts), awaited_bytes)

    def _use_pool(
        self, layers: SglangLayers, pool: LeadingPool | FollowingPool, awaited_bytes: int | None
    ) -> None:
        if awaited_bytes is not None:
            layers.stage_from_half_of(awaited_bytes // (layers.block_bytes * self.parts.parts))
        self.pooling = KvPoolAdapter(layers, pool, lambda: self.sampler.sound)
        self.scheduler.tree_cache.pooling = self.pooling

    def add(
        self,
        job: ChunkJob,
        cache_salt: str,
        *,
        to_the_end: bool = False,
        save: bool = True,
        script: ScriptedTokens | None = None,
    ) -> None:
        """Queue a chunk; with ``to_the_end`` it goes on to its last token, also past one that ends responses.

        Without ``save`` its KV does not go to the pool.  With a ``script`` it ends where that ends; what
        computes the steps finds it in the request's ``custom_params``.

        Raises:
            ValueError: SGLang does not take it.
            Rejected: nor one of its images.
        """
        if not job.token_ids:
            raise ValueError("it has no tokens")
        least, most = min(job.token_ids), max(job.token_ids)
        if least < 0 or most >= self.vocab_size:
            raise ValueError(f"there is no token {least if least < 0 else most}")
        params = SamplingParams(
            max_new_tokens=job.max_tokens,
            temperature=job.sampling.temperature,
            top_p=job.sampling.top_p,
            top_k=job.sampling.top_k or -1,
            ignore_eos=to_the_end,
            stop_token_ids=set(job.sampling.stop_token_ids) or None,
        )
        if script is not None:
            params.custom_params = {"job": job, "script": script}
            params.stop_token_ids = None if script.end is None else {script.end}
        params.normalize(None)
        params.verify(self.vocab_size)
        self.images.of(job)  # made ready here, where one may still be refused
        ends = script is None and not job.sampling.ignore_eos
        self.queue(job, cache_salt, params, ends=ends, to_the_end=to_the_end, save=save)

    @in_all_ranks
    def queue(
        self,
        job: ChunkJob,
        cache_salt: str,
        params: SamplingParams,
        *,
        ends: bool,
        to_the_end: bool,
        save: bool,
    ) -> None:
        """Queue a chunk that SGLang takes with these parameters; see ``add``.

        Without ``ends`` none of the model's tokens ends it.
        """
        text, shown = self.images.inputs(job)
        asks = job.sampling.prompt_logprobs is not None and job.prompt_tokens == len(job.token_ids)
        req = Req(
            f"{next(self._numbers)}.",  # SGLang aborts all ids that begin with the given one
            None,
            text,
            params,
            eos_token_ids=set(self._end_token_ids) if ends else None,
            vocab_size=self.vocab_size,
            cache_salt=cache_salt,
            return_logprob=asks,
            top_logprobs_num=(job.sampling.prompt_logprobs or 0) if asks else 0,
            return_routed_experts=self.routing.on,
            routed_experts_start_len=first_wanted(job),
        )
        req.logprob_start_len = 0 if asks else NO_LOGPROBS
        req.multimodal_inputs = shown
        writing = ChunkState(job, lambda: req.output_ids, to_the_end=to_the_end)
        self.chunks[req.rid] = Chunk(req, writing)
        if self._proposer is not None and not to_the_end:
            self._proposer.open(req.rid, job)
        if self.pooling is not None:
            self.pooling.open(req.rid, job, cache_salt, saves=save)
        self.scheduler.add(req)

    @in_all_ranks
    def hold_image(self, digest: str, data: bytes) -> None:
        """Hold the file of an image."""
        self.images.hold(digest, data)

    @in_all_ranks
    def drop_images(self, digests: Sequence[str]) -> None:
        """Forget images."""
        self.images.drop(digests)

    def chunk(self, job_id: str) -> Chunk:
        """Return a running chunk."""
        return next(chunk for chunk in self.chunks.values() if chunk.writing.job.id == job_id)

    @in_all_ranks
    def abort(self, job_ids: Sequence[str]) -> None:
        """Drop chunks, ended or not; what is running leaves its KV with the next step."""
        dropped = set(job_ids)
        for rid, chunk in list(self.chunks.items()):
            if chunk.writing.job.id in dropped:
                if self.pooling is not None:
                    self.pooling.give_up(rid, chunk.req.origin_input_ids)
                self._drop(rid)

    @in_all_ranks
    def stop(self, job_id: str) -> None:
        """Drop a chunk whose response, or turn, has ended with what it has just written."""
        req = self.chunk(job_id).req
        if self.pooling is not None:
            self.pooling.end(req.rid, *self._text_and_slots(req.rid, req.owned_kv_len()), cut=False)
        self._drop(req.rid)

    @in_all_ranks
    def end(self, job_id: str) -> None:
        """Let a running chunk end with its next token."""
        req = self.chunk(job_id).req
        params = req.sampling_params
        params.max_new_tokens = min(params.max_new_tokens, len(req.output_ids) + 1)

    @in_all_ranks
    @torch.no_grad()
    def step(self) -> list[Chunk]:
        """Make one step; return the chunks that it ended.  One in which chunks only wait is a pause."""
        if self._room is not None:
            self._room.make(self.scheduler)
        before = self._computed_tokens()
        batch = self.scheduler.plan()
        if self.ranks.count > 1:
            self._expect_same_plan(batch)
        self.computed = Step(0, 0)
        if batch is not None:
            self._book(batch)
            if batch.return_logprob and batch.forward_mode.is_extend():
                self._name_images(batch)
            if self.pooling is not None:
                self.pooling.stage_running(self._still_there(before), self._text_and_slots)
        elif self.awaits_kv:
            self.pause()
        ended = self.scheduler.compute(batch, self._put_staged)
        if batch is not None and batch.return_logprob:
            _leave_prompts(batch)
        if batch is not None and self._room is not None and batch.forward_mode.is_decode():
            self._book_drafts(batch)
        return [self._forget(req.rid) for req in ended if req.rid in self.chunks]

    @property
    def waiting(self) -> int:
        """Chunks that have not been let in, or have been put back."""
        return sum(req.rid in self.chunks for req in self.scheduler.waiting_queue)

    @property
    def awaits_kv(self) -> bool:
        """Whether a chunk waits for its KV."""
        return self.pooling is not None and self.pooling.waiting

    @property
    def kv_usage(self) -> float:
        """The share of KV memory that running chunks hold."""
        return float(self.scheduler.pool_stats_observer.get_pool_stats().full_token_usage)

    @property
    def kv_layers(self) -> list[torch.Tensor]:
        """The KV of all layers, [slots, ...] each: keys and values, or latents.

        None if it is not kept token by token, in full attention.
        """
        pool = self.scheduler.token_to_kv_pool_allocator.get_kvcache()
        layers: list[torch.Tensor] = []
        if type(pool) is MHATokenToKVPool and not pool.is_quantized_kv_cache:
            layers = [*pool.k_buffer, *pool.v_buffer]
        elif type(pool) is MLATokenToKVPool:
            layers = [*pool.kv_buffer]
        return layers if all(len(layer) == pool.size + pool.page_size for layer in layers) else []

    def shared_layers(self) -> SglangLayers:
        """Return SGLang's KV as a pool has it, with the experts that computed it."""
        kv = self.kv_layers
        return SglangLayers([*kv, *self.routing.slots] if kv else kv, self.scheduler.page_size)

    @in_all_ranks
    def watch(self, on: bool) -> list[LogitRow]:
        """Keep the logits of every choice from now on, or no longer; return those kept."""
        return self.sampler.watch.turn(on)

    @in_all_ranks
    def settle(self) -> None:
        """Let what has been dropped leave its KV."""
        for _ in range(DRAIN_STEPS):
            if not self.chunks:  # a step may put back what was dropped, and it would be prefilled again
                self.scheduler.abort_request(AbortReq(abort_all=True))
            if self.scheduler.is_fully_idle():
                break
            self.step()

    @in_all_ranks
    def flush(self) -> bool:
        """Forget all cached KV if no request is there; return whether none was."""
        self.images.forget_encoded()
        return bool(self.scheduler.flush_cache())

    def _book(self, batch: ScheduleBatch) -> None:
        """Give the sampler the requests whose rows come, and book what the step computes for each."""
        extend = batch.forward_mode.is_extend()
        positions = batch.extend_lens if extend else [1] * len(batch.reqs)
        self.sampler.expect([self._chunk(req).writing for req in batch.reqs])
        for req, computed in zip(batch.reqs, positions, strict=True):
            chunk = self._chunk(req)
            chunk.account.computed_tokens += computed
            if extend and self.pooling is not None:
                self.pooling.let_in(req.rid, req.prefix_len)
            if chunk.cached_tokens is None:
                chunk.account.pool_tokens = req.host_loaded_length
                chunk.cached_tokens = req.prefix_len - req.host_loaded_length
        self.computed = Step(len(batch.reqs), sum(positions))

    def _name_images(self, batch: ScheduleBatch) -> None:
        """Ask for the log-probs of tokens that stand for images, in place of what the prefix cache has."""
        begin = 0
        for req, unwanted in zip(batch.reqs, batch.extend_logprob_start_lens, strict=True):
            wanted = req.extend_len - unwanted
            if req.return_logprob and req.multimodal_inputs is not None:
                first = req.prefix_len + 1
                ids = self._chunk(req).writing.job.token_ids[first : first + wanted]
                batch.extend_input_logprob_token_ids[begin : begin + len(ids)] = torch.tensor(ids)
            begin += wanted

    def _expect_same_plan(self, batch: ScheduleBatch | None) -> None:
        """Raise EngineError if this rank has planned another step than rank 0, whose KV would be nonsense."""
        reqs = [] if batch is None else batch.reqs
        mine = [(req.rid, req.kv.kv_committed_len, req.prefix_len) for req in reqs]
        theirs = self.ranks.agreed(lambda: mine)
        if mine != theirs:
            raise EngineError(f"rank {self.ranks.number} plans {mine}, and rank 0 {theirs}")

    def _computed_tokens(self) -> dict[str, int]:
        """Return the number of tokens whose KV is there, and finite, of each chunk that is written."""
        if self.pooling is None:
            return {}
        return {
            rid: chunk.req.kv.kv_committed_len for rid, chunk in self.chunks.items() if chunk.writing.sound
        }

    def _still_there(self, computed: Mapping[str, int]) -> dict[str, int]:
        """Return those that hold KV still, when a step has been planned."""
        return {rid: count for rid, count in computed.items() if self.chunks[rid].req.kv.holds_kv}

    def _text_and_slots(self, rid: str, count: int) -> tuple[array[int], torch.Tensor]:
        """Return a chunk's tokens so far, and the slots of the first ``count``."""
        req = self.chunks[rid].req
        rows = self.scheduler.req_to_token_pool.req_to_token
        return req.origin_input_ids + req.output_ids, rows[req.kv.req_pool_idx, :count]

    def _put_staged(self) -> None:
        if self.pooling is not None:
            self.pooling.put_staged()

    def _book_drafts(self, batch: ScheduleBatch) -> None:
        """Note what became of the drafts of a step, whose requests may have left the batch since."""
        verifier = self._verifier
        for (rid, before), depth, accepted, kept in zip(
            self._verified, verifier.deepest, verifier.accepted, verifier.kept, strict=True
        ):
            chunk = self.chunks.get(rid)
            if chunk is not None:
                written = len(chunk.token_ids) - before
                if written < kept:  # it ended at one of the drafts
                    accepted = kept = written
                chunk.account.computed_tokens += kept - 1
                chunk.account.reached(depth, accepted, kept)

    def _propose(self, reqs: Sequence[Req]) -> drafting.Trees:
        """Return trees for those of these requests that are still wanted."""
        self._verified = [(req.rid, len(req.output_ids)) for req in reqs]
        assert self._room is not None
        trees = self.ranks.agreed(lambda: self._trees(reqs))
        self.computed = Step(len(reqs), self._room.width(trees) * len(reqs))
        return trees

    def _trees(self, reqs: Sequence[Req]) -> drafting.Trees:
        assert self._room is not None
        tokens: list[list[int]] = [[] for _ in reqs]
        parents: list[list[int]] = [[] for _ in reqs]
        if self._proposer is None:
            return tokens, parents
        there = [place for place, req in enumerate(reqs) if req.rid in self.chunks]
        self._live = [reqs[place].rid for place in there]
        sampled, lengths = [], []
        for place in there:
            req, chunk = reqs[place], self.chunks[reqs[place].rid]
            sampled.append(req.output_ids[chunk.drafted_after :].tolist())
            chunk.drafted_after = len(req.output_ids)
            lengths.append(len(req.origin_input_ids) + len(req.output_ids))

        def text(place: int, start: int, stop: int) -> list[int]:
            req = reqs[there[place]]
            return [*self.chunks[req.rid].writing.job.token_ids, *req.output_ids][start:stop]

        found = self._proposer.propose_trees(sampled, lengths, text, self._room.nodes - 1)
        for place, draft, links in zip(there, *found, strict=True):
            tokens[place], parents[place] = draft, links
        return tokens, parents

    def _may_end_early(self, req: Req) -> bool:
        chunk = self.chunks.get(req.rid)
        return chunk is not None and chunk.writing.job.may_end_early and len(req.output_ids) > 0

    def _drop(self, rid: str) -> None:
        self._forget(rid)
        self.routing.forget(rid)
        self.scheduler.abort_request(AbortReq(rid=rid))

    def _forget(self, rid: str) -> Chunk:
        if self._proposer is not None:
            self._proposer.close(rid)
        if self.pooling is not None:
            self.pooling.close(rid)
        return self.chunks.pop(rid)

    def _chunk(self, req: Req) -> Chunk:
        """Return a request's chunk; one that was aborted makes one more step without one."""
        found = self.chunks.get(req.rid)
        return found if found is not None else Chunk(req, ChunkState(ABORTED))


def _leave_prompts(batch: ScheduleBatch) -> None:
    """Ask for no more log-probs of prompts that are computed: SGLang would expect some of each new token."""
    for req in batch.reqs:
        if req.logprob.input_token_logprobs_val is not None:
            req.return_logprob, req.logprob_start_len = False, NO_LOGPROBS
    batch.return_logprob = any(req.return_logprob for req in batch.reqs)


def _possible(logprob: float) -> float:
    return max(logprob, LEAST_LOGPROB)


def _accepted(settings: Mapping[str, Any], **limit: int) -> ServerArgs:
    try:
        return ServerArgs(**settings, **limit)
    except (TypeError, ValueError, AssertionError) as error:
        raise EngineError(f"SGLang refuses its arguments: {error}") from error


def _parts_of(runner: ModelRunner, ranks: int) -> KvParts:
    """Return the parts of KV that ranks have.

    A model of fewer heads than ranks has each head on several of them, and latent KV (MLA) is on all.
    """
    config, dtype = runner.model_config, str(runner.kv_cache_dtype_str)
    if dtype == "auto":
        dtype = str(runner.kv_cache_dtype).removeprefix("torch.")
    heads = config.get_total_num_kv_heads() if config.attention_arch == AttentionArch.MHA else 1
    return KvParts("sglang", ranks, min(heads, ranks), dtype)


def _ports(port: int) -> PortArgs:
    """Return no names of sockets, and the port at which torch's process group is made."""
    names = dict.fromkeys(
        (
            "tokenizer_ipc_name",
            "scheduler_input_ipc_name",
            "detokenizer_ipc_name",
            "rpc_ipc_name",
            "metrics_ipc_name",
        ),
        "",
    )
    return PortArgs(**names, nccl_port=port, tokenizer_worker_ipc_name=None, decoupled_spec_ipc_config=None)
