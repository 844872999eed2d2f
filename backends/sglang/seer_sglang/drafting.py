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
from seer_worker.sampling.sending import sent
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
        self.trees: Trees = [], []
        """Those of the step, with which it was begun."""
        self._nodes: tuple[NDArray[np.int64], NDArray[np.bool_]] | None = None

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
            self.trees = self.propose(batch.reqs)
            self._set_nodes(self.width(self.trees))
            self._make_room(len(batch.reqs))
            last = [req.output_ids[-1] for req in batch.reqs]
            self._nodes = as_nodes(last, *self.trees, self.draft_token_num)
        super()._prepare_for_speculative_decoding(batch)

    def _prepare_draft_tokens(self, batch: ScheduleBatch) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        assert self._nodes is not None
        tokens, mask = self._nodes
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
    """Follows each tree as far as its drafts are what is sampled; stands in for SGLang's ``eagle_sample``.

    What it asks of the device are tokens, log-probs and positions, once where all nodes are sampled together;
    the trees are in main memory.
    """

    def __init__(self, sampler: SglangSampler, ends: Collection[int]) -> None:
        self._sampler = sampler
        self._ends = ends
        self.trees: Callable[[], Trees] = lambda: ([], [])
        """Returns the trees of the step."""
        self.deepest: list[int] = []
        self.accepted: list[int] = []
        self.kept: list[int] = []

    def __call__(
        self, verify_input: Any, batch: ScheduleBatch, logits_output: Any, *_: Any, **named: Any
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return what was sampled at each node, how many nodes were passed, and which."""
        logits = logits_output.next_token_logits
        nodes, requests, device = verify_input.draft_token_num, len(batch.reqs), logits.device
        trees = [DraftTree(*each) for each in zip(*self.trees(), strict=True)]
        self.deepest = [tree.depth for tree in trees]
        sampler = NodeSampler(self._sampler, logits, nodes, verify_input.positions + 1, trees)
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
                child = trees[request].child(node, token)
                if child is not None:
                    self.accepted[request] += 1
                    if token not in self._ends or writings[request].to_the_end:
                        going[request] = child
            here = going
        arrays = (predicted, np.array(self.kept, np.int32), passed)
        found, lengths, index = (sent(array, device) for array in arrays)
        return found, lengths, index


class DraftTree:
    """A request's draft: node 0 is the last token written, and node n + 1 token n of the draft.

    Args:
        tokens: the draft's tokens.
        parents: each token's parent among them, -1 for the last token written.
    """

    def __init__(self, tokens: Sequence[int], parents: Sequence[int]) -> None:
        self._tokens, self._parents = tokens, parents
        self._children: dict[tuple[int, int], int] = {}
        depths = [0]
        for node, (token, parent) in enumerate(zip(tokens, parents, strict=True), 1):
            self._children.setdefault((parent + 1, token), node)
            depths.append(depths[parent + 1] + 1)
        self.depth = max(depths)
        """How many tokens the longest path has."""

    def child(self, node: int, token: int) -> int | None:
        """Return the child of a node that is this token, the first of several."""
        return self._children.get((node, token))

    def path(self, node: int) -> list[int]:
        """Return the tokens of the drafts that lead to a node, in order; of a node beyond the tree, none."""
        path = []
        while 0 < node <= len(self._tokens):
            path.append(self._tokens[node - 1])
            node = self._parents[node - 1] + 1
        return path[::-1]


class NodeSampler:
    """Samples at nodes: at all of them at once where that wastes little, else as they are asked for.

    Row r of ``logits`` is a node of request ``r // nodes``, of which ``places`` has the position.
    """

    def __init__(
        self,
        sampler: SglangSampler,
        logits: torch.Tensor,
        nodes: int,
        places: torch.Tensor,
        trees: Sequence[DraftTree],
    ) -> None:
        self._sampler, self._logits, self._nodes, self._trees = sampler, logits, nodes, trees
        self._places = places
        self._all: tuple[list[int], list[float], list[int]] | None = None
        # Who watches wants the rows that count alone.
        if len(logits) <= rows_at_once(logits) and not sampler.watch.on:
            self._all = self._sample(range(len(logits)))

    def tokens_at(self, rows: Sequence[int]) -> list[int]:
        """Return the tokens of these rows, and keep their log-probs and the most probable tokens."""
        if self._all is None:
            tokens, logprobs, positions = self._sample(rows)
        else:
            tokens, logprobs, positions = ([each[row] for row in rows] for each in self._all)  # type: ignore[assignment]
        self._sampler.keep(self._writings(rows), positions, logprobs, lambda: self._logits[self._at(rows)])
        return tokens

    def _sample(self, rows: Sequence[int]) -> tuple[list[int], list[float], list[int]]:
        def drafts(place: int) -> list[int]:
            request, node = divmod(rows[place], self._nodes)
            return self._trees[request].path(node)

        logits, places = self._logits, self._places
        if len(rows) < len(logits):
            at = self._at(rows)
            logits, places = logits[at], places[at]
        return self._sampler.sample(logits, self._writings(rows), places, drafts)

    def _at(self, rows: Sequence[int]) -> torch.Tensor:
        return sent(np.array(rows, dtype=np.int64), self._logits.device)

    def _writings(self, rows: Sequence[int]) -> list[ChunkState]:
        """Return the text that each row goes on with."""
        writings = self._sampler.batch
        return [writings[row // self._nodes] for row in rows]


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
    worker = scheduler.draft_worker
    worker.propose, worker.width, verifier.trees = propose, width, lambda: worker.trees


def put_in_place(room: DraftBudget) -> None:
    """Have SGLang make a ``TreeWorker`` where its arguments name NGRAM, and take KV memory for ``room``."""
    ngram_worker.NgramCorpus = NoCorpus
    ngram_worker.NGRAMWorker = TreeWorker
    schedule_batch.get_alloc_reserve_per_decode = room
    eagle_utils.get_alloc_reserve_per_decode = room


def width_of(trees: Trees) -> int:
    """Return the nodes of the largest tree, the last token written included."""
    return 1 + max(map(len, trees[0]))


def _no_drafts(reqs: Sequence[Req]) -> Trees:
    return [[] for _ in reqs], [[] for _ in reqs]
