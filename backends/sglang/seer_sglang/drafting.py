"""Drafts of a ``DraftSource`` where SGLang verifies those of its own n-grams: as trees, and by key.

SGLang's n-gram worker asks for a tree before each decoding step, runs its nodes through the model in one
step, and hands the logits to a function that says which were accepted.  ``TreeWorker`` asks a source for the
trees, as large as this step's largest, and ``KeyedVerifier`` samples by key at every node that it comes
to.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from seer_worker.sampling.keyed import rows_at_once
from sglang.srt.managers import schedule_batch
from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
from sglang.srt.speculative import eagle_utils, ngram_worker
from sglang.srt.speculative.ngram_worker import NGRAMWorker

from seer_sglang.sampling import ChunkState, SglangSampler

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["DraftBudget", "KeyedVerifier", "TreeWorker", "install", "put_in_place"]

Trees = tuple[list[list[int]], list[list[int]]]
"""For each request its draft, and each token's parent in it: -1 is the last token written."""


class NoCorpus:
    """Stands where SGLang keeps its n-grams, which are not used."""

    def __init__(self, **_: Any) -> None:
        pass

    def reset(self) -> None:
        """Do nothing."""

    def erase_match_state(self, req_ids: Any) -> None:
        """Do nothing."""


class TreeWorker(NGRAMWorker):
    """Verifies trees that it is given."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.propose: Callable[[Sequence[Req]], Trees] = _no_drafts
        self.width: Callable[[Trees], int] = width_of
        self._trees: tuple[NDArray[np.int64], NDArray[np.bool_]] | None = None

    def forward_batch_generation(self, batch: ScheduleBatch, *arguments: Any, **named: Any) -> Any:
        """Verify drafts, or prefill; what is kept of it between two steps does not depend on trees' sizes."""
        self._set_nodes(1)
        result = super().forward_batch_generation(batch, *arguments, **named)
        carried = result.next_draft_input
        carried.draft_token_num = 1
        carried.accept_tokens = torch.zeros(len(batch.reqs), dtype=torch.int32, device=self.device)
        return result

    def _prepare_for_speculative_decoding(self, batch: ScheduleBatch) -> None:
        if batch.forward_mode.is_decode():
            tokens, parents = trees = self.propose(batch.reqs)
            self._set_nodes(self.width(trees))
            self._make_room(len(batch.reqs))
            last = [req.output_ids[-1] for req in batch.reqs]
            self._trees = as_nodes(last, tokens, parents, self.draft_token_num)
        super()._prepare_for_speculative_decoding(batch)

    def _prepare_draft_tokens(self, batch: ScheduleBatch) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        assert self._trees is not None
        tokens, mask = self._trees
        return tokens.flatten(), mask.flatten()

    def _update_ngram_corpus(self, batch: ScheduleBatch) -> None:
        """Do nothing: SGLang would collect each request's last tokens, for n-grams that are not used."""

    def _set_nodes(self, nodes: int) -> None:
        """Have trees of so many nodes in this step, the last token written included."""
        self.draft_token_num = nodes
        self.speculative_num_draft_tokens = nodes

    def _make_room(self, requests: int) -> None:
        """Give the step tensors of its own size, where SGLang has some of one size for each batch."""
        nodes = requests * self.draft_token_num

        def room(*shape: int, dtype: torch.dtype = torch.int64) -> dict[int, torch.Tensor]:
            return {requests: torch.empty(shape, dtype=dtype, device=self.device)}

        self.retrieve_indexes_batch = room(requests, self.draft_token_num)
        self.retrieve_next_token_batch = room(requests, self.draft_token_num)
        self.retrieve_next_sibling_batch = room(requests, self.draft_token_num)
        self.positions_batch = room(nodes)
        self.tree_mask_batch = room(nodes * self.draft_token_num, dtype=torch.bool)
        self.draft_tokens_batch = room(nodes)


def as_nodes(
    last: Sequence[int], tokens: Sequence[Sequence[int]], parents: Sequence[Sequence[int]], nodes: int
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Return trees as SGLang has them: tokens [requests, nodes], and who descends from whom, [.., nodes].

    Node 0 is the last token written.  What a smaller tree lacks has no parent, so nothing leads there.
    """
    made = np.zeros((len(last), nodes), np.int64)
    mask = np.zeros((len(last), nodes, nodes), np.bool_)
    mask[:, range(nodes), range(nodes)] = True
    made[:, 0] = last
    for request, (draft, links) in enumerate(zip(tokens, parents, strict=True)):
        made[request, 1 : len(draft) + 1] = draft
        for node, parent in enumerate(links, 1):
            mask[request, node] |= mask[request, parent + 1]
    return made, mask


class KeyedVerifier:
    """Follows each tree as far as its drafts are what is sampled; stands in for SGLang's ``eagle_sample``."""

    def __init__(self, sampler: SglangSampler, ends: Collection[int]) -> None:
        self._sampler = sampler
        self._ends = ends
        self.deepest: list[int] = []
        self.accepted: list[int] = []
        self.kept: list[int] = []

    def __call__(
        self, verify_input: Any, batch: ScheduleBatch, logits_output: Any, *_: Any, **named: Any
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return what was sampled at each node, how many nodes were passed, and which."""
        logits = logits_output.next_token_logits
        nodes, requests, device = verify_input.draft_token_num, len(batch.reqs), logits.device
        tokens = verify_input.draft_token.view(requests, nodes).tolist()
        links = (verify_input.retrieve_next_token.tolist(), verify_input.retrieve_next_sibling.tolist())
        positions = verify_input.positions.view(requests, nodes)
        self.deepest = (positions.max(dim=1).values - positions[:, 0]).tolist()
        paths = Paths(tokens, *links)
        sampler = NodeSampler(self._sampler, logits, nodes, positions.flatten().tolist(), paths)
        writings = self._sampler.batch
        self.accepted, self.kept = [0] * requests, [0] * requests
        predicted = np.zeros(requests * nodes, np.int32)
        passed = np.full((requests, nodes), -1, np.int32)
        here = dict.fromkeys(range(requests), 0)
        while here:
            rows = [request * nodes + node for request, node in here.items()]
            chosen = sampler.tokens_at(rows)
            predicted[rows] = chosen
            going = {}
            for (request, node), row, token in zip(here.items(), rows, chosen, strict=True):
                passed[request, self.kept[request]] = row
                self.kept[request] += 1
                child = _child(tokens[request], links[0][request], links[1][request], node, token)
                if child >= 0:
                    self.accepted[request] += 1
                    if token not in self._ends or writings[request].to_the_end:
                        going[request] = child
            here = going
        arrays = (predicted, np.array(self.kept, np.int32), passed)
        found, lengths, index = (torch.from_numpy(array).to(device) for array in arrays)
        return found, lengths, index


class Paths:
    """The drafts that lead to a node: all from the last token written, which is node 0, to the node itself.

    Args:
        tokens: the nodes' tokens, of each request.
        first: each node's first child, -1 for none.
        sibling: each node's next sibling, likewise.
    """

    def __init__(
        self,
        tokens: Sequence[Sequence[int]],
        first: Sequence[Sequence[int]],
        sibling: Sequence[Sequence[int]],
    ) -> None:
        self._tokens, self._first, self._sibling = tokens, first, sibling
        self._parents: dict[int, list[int]] = {}

    def to(self, request: int, node: int) -> list[int]:
        """Return the tokens of the drafts on the way, in order."""
        if request not in self._parents:
            self._parents[request] = self._parents_of(request)
        path = []
        while node > 0:
            path.append(self._tokens[request][node])
            node = self._parents[request][node]
        return path[::-1]

    def _parents_of(self, request: int) -> list[int]:
        first, sibling = self._first[request], self._sibling[request]
        parents = [-1] * len(first)
        for node, child in enumerate(first):
            while child >= 0:
                parents[child] = node
                child = sibling[child]
        return parents


class NodeSampler:
    """Samples at nodes: at all of them at once where that wastes little, else as they are asked for.

    Row r of ``logits`` is a node of request ``r // nodes``.
    """

    def __init__(
        self, sampler: SglangSampler, logits: torch.Tensor, nodes: int, positions: list[int], paths: Paths
    ) -> None:
        self._sampler, self._logits, self._nodes, self._paths = sampler, logits, nodes, paths
        self._places = [position + 1 for position in positions]
        self._tokens: list[int] | None = None
        self._logprobs: list[float] = []
        # Who watches wants the rows that count alone.
        if len(logits) <= rows_at_once(logits) and not sampler.watch.on:
            self._tokens, self._logprobs = self._sample(range(len(logits)))

    def tokens_at(self, rows: Sequence[int]) -> list[int]:
        """Return the tokens of these rows, and keep their log-probs and the most probable tokens."""
        if self._tokens is None:
            tokens, logprobs = self._sample(rows)
        else:
            tokens, logprobs = [self._tokens[row] for row in rows], [self._logprobs[row] for row in rows]
        self._sampler.keep(*self._texts(rows), logprobs, lambda: self._rows(rows))
        return tokens

    def _sample(self, rows: Sequence[int]) -> tuple[list[int], list[float]]:
        def drafts(place: int) -> list[int]:
            return self._paths.to(*divmod(rows[place], self._nodes))

        return self._sampler.sample(self._rows(rows), *self._texts(rows), drafts)

    def _rows(self, rows: Sequence[int]) -> torch.Tensor:
        logits = self._logits
        if rows == range(len(logits)):
            return logits
        return logits[torch.tensor(rows, dtype=torch.int64, device=logits.device)]

    def _texts(self, rows: Sequence[int]) -> tuple[list[ChunkState], list[int]]:
        """Return the text that each row goes on with, and how many tokens it has."""
        writings = self._sampler.batch
        return [writings[row // self._nodes] for row in rows], [self._places[row] for row in rows]


class DraftBudget:
    """For how many nodes of a tree SGLang takes KV memory ahead of a step, for each request that decodes.

    It takes them before there are trees, and keeps what they leave over for the next step.  Here it takes
    what the largest tree may need, and gives back what is left over as soon as a request waits or memory runs
    short.  If that is not enough, there is room for smaller trees only, down to the last token written.  So
    drafts never take what a chunk has been promised, and SGLang never puts one back for them.
    """

    def __init__(self, nodes: int, *, uniform: bool = False) -> None:
        self.most = nodes
        self.nodes = nodes
        self._uniform = uniform

    def __call__(self) -> int:
        """Return how many; stands in for SGLang's ``get_alloc_reserve_per_decode``."""
        return self.nodes

    def width(self, trees: Trees) -> int:
        """Return how many nodes each request has in a step with these trees."""
        return self.nodes if self._uniform else width_of(trees)

    def make(self, scheduler: Any) -> None:
        """Decide it for the next step."""
        last = scheduler.last_batch
        joining = last.reqs if last is not None and last.forward_mode.is_extend() else []
        running = {req.rid: req for req in [*scheduler.running_batch.reqs, *joining] if not req.finished()}
        if not running:
            return
        wanted = self.most * len(running)
        if scheduler.waiting_queue or _free(scheduler) < wanted:
            _give_back(scheduler, running.values())
        self.nodes = max(1, min(wanted, _free(scheduler)) // len(running))


def _free(scheduler: Any) -> int:
    """Return how many KV slots no request holds."""
    return int(
        scheduler.token_to_kv_pool_allocator.available_size() + scheduler.tree_cache.full_evictable_size()
    )


def _give_back(scheduler: Any, reqs: Iterable[Req]) -> None:
    """Free the KV slots that requests hold beyond their tokens."""
    rows = scheduler.tree_cache.req_to_token_pool.req_to_token
    ahead = [req.kv for req in reqs if req.kv.kv_allocated_len > req.kv.kv_committed_len]
    if ahead:
        slots = [rows[kv.req_pool_idx, kv.kv_committed_len : kv.kv_allocated_len] for kv in ahead]
        scheduler.token_to_kv_pool_allocator.free(torch.cat(slots).long())
    for kv in ahead:
        kv.kv_allocated_len = kv.kv_committed_len


def install(
    scheduler: Any,
    verifier: KeyedVerifier,
    propose: Callable[[Sequence[Req]], Trees],
    width: Callable[[Trees], int],
) -> None:
    """Have a scheduler's ``TreeWorker`` verify what ``propose`` returns, in ``width`` nodes for a request."""
    ngram_worker.eagle_sample = verifier
    scheduler.draft_worker.propose, scheduler.draft_worker.width = propose, width


def put_in_place(room: DraftBudget) -> None:
    """Have SGLang make a ``TreeWorker`` where its arguments name NGRAM, and take KV memory for ``room``."""
    ngram_worker.NgramCorpus = NoCorpus
    ngram_worker.NGRAMWorker = TreeWorker
    schedule_batch.get_alloc_reserve_per_decode = room
    eagle_utils.get_alloc_reserve_per_decode = room


def width_of(trees: Trees) -> int:
    """Return the nodes of the largest tree, the last token written included."""
    return 1 + max(map(len, trees[0]))


def _child(tokens: Sequence[int], first: Sequence[int], sibling: Sequence[int], node: int, token: int) -> int:
    """Return the child of a node that is this token; -1 if there is none."""
    child = first[node]
    while child != -1 and tokens[child] != token:
        child = sibling[child]
    return child


def _no_drafts(reqs: Sequence[Req]) -> Trees:
    return [[] for _ in reqs], [[] for _ in reqs]
