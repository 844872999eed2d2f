"""KV in and out of a pool, where vLLM lets a connector in.

vLLM makes one connector for its scheduler, which has the pool's store, and one for each worker, which has the
KV, or with tensor parallelism a part of it.  Blocks are copied out of the store before the scheduler is
promised any of them, because vLLM's own way back from a failed load lets another request of the same step
read the block before it is computed again.

A request with few blocks to load is let in at once, and its step begins with them.  One with many waits,
while a thread of the scheduler copies them out of the store, and then, as ``WAITING_FOR_REMOTE_KVS``, while a
thread of each worker copies them to the device; steps go on meanwhile.

Blocks are saved while their chunk runs.  Once steps have filled half as many as a request may load without a
wait, a step begins to copy out what the workers' buffers hold, and it is put into the store during the next:
a copy costs a launch for each layer, however few its blocks.  What is left at the end of a chunk is saved
there, before the end is reported.

A model whose KV is in several groups goes on only where all of them have what it needs.  So their blocks for
one such place are promised together or not at all, and the last place that a chunk leaves is saved.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import attrs
import torch
from seer_worker.process.copy_buffers import STAGED_BYTES
from seer_worker.process.pooling import FetchedBlocks, PooledRequests
from seer_worker.process.shared_blocks import SharedBlocks
from seer_worker.process.stores import FailsafeStore
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)
from vllm.platforms import current_platform
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig, MLAAttentionSpec
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request, RequestStatus

from seer_core.errors import EngineError
from seer_core.ports.kv import KEY_BYTES, Bytes, KVStore
from seer_vllm.blocks import VllmLayers
from seer_vllm.kv_groups import NO_POOL, KvGroup, is_computed, kv_groups, pages_of
from seer_vllm.parts import parts_of
from seer_vllm.routing import bytes_of_experts, experts_move

if TYPE_CHECKING:
    from vllm.config import VllmConfig

__all__ = ["BlockLoad", "Loads", "StoreConnector"]


@attrs.frozen(eq=False)
class BlockLoad:
    """Blocks for a request, and the rows that they belong to, as ``VllmLayers`` numbers them.

    Its step begins with them, unless it ``waits`` for them.
    """

    request_id: str
    rows: list[int]
    fetched: FetchedBlocks
    waits: bool


@attrs.define(eq=False)
class Loads(KVConnectorMetadata):
    """The loads of all workers, and in ``staged`` the blocks that they copy out during this step.

    Several workers write them ``into`` memory that they share.
    """

    loads: list[BlockLoad] = attrs.field(factory=list)
    staged: list[int] = attrs.field(factory=list)
    into: Bytes | SharedBlocks | None = None


@attrs.define(eq=False)
class RunningSave:
    """A chunk that runs and is saved; of its blocks the first ``saved`` were found, or are on their way."""

    request: Request
    saved: int


@attrs.frozen
class KvPlace:
    """Where a request with several groups of KV goes on: after ``tokens``, by blocks under these ``keys``.

    ``cached_tokens`` are those that vLLM's own cache has, and ``blocks`` are those of each group behind them.
    """

    cached_tokens: int
    tokens: int
    keys: list[bytes]
    blocks: list[tuple[KvGroup, range]]


class StoreConnector(KVConnectorBase_V1, SupportsHMA):
    """Loads what the store has of a request when it is let in; saves full blocks when its chunk ends.

    Requests carry ``group``, ``prompt_tokens`` and ``last`` in ``extra_args``; one without is left alone.  A
    response goes on behind a chunk that ended early, though it was to be the last.
    """

    saves_aborted = False
    """Whether a chunk that was aborted goes on elsewhere, and is saved."""

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        groups = kv_cache_config.kv_cache_groups
        algorithm = vllm_config.cache_config.prefix_caching_hash_algo
        _, hash_tokens = resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)
        self.groups = kv_groups(kv_cache_config, hash_tokens)
        specs = [group.kv_cache_spec for group in groups]
        if current_platform.is_cpu() and any(isinstance(spec, MLAAttentionSpec) for spec in specs):
            raise EngineError(
                "on a CPU what vLLM computes of latent attention (MLA) depends on the batch, and so would"
                f" the KV in a pool: {NO_POOL}"
            )
        if not algorithm.startswith("sha256"):
            raise EngineError(
                f"prefix_caching_hash_algo = {algorithm!r} gives each instance keys of its own; drop it from"
                f" [engine.vllm.engine_args], or {NO_POOL}"
            )
        self.block_tokens = self.groups.first.block_tokens
        self.parts = parts_of(vllm_config, specs)
        more = self.block_tokens * bytes_of_experts(vllm_config) if experts_move(vllm_config) else 0
        self.block_bytes = self.parts.parts * max(
            group.kv_cache_spec.page_size_bytes * len(group.layer_names)
            + (more if number == self.groups.first.number else 0)
            for number, group in enumerate(groups)
        )
        """The bytes of a block, in all its parts."""
        self.apart = self.parts.ranks > 1
        """Whether the workers are other processes, with which blocks are shared."""
        self.saves = True
        """False after a step with log-probs that are not finite, whose KV is no better."""
        self._is_planning = False
        self._kv = kv_cache_config
        self.requests = PooledRequests(FailsafeStore(None), self.block_bytes)
        """Without a store, which ``attach`` gives, everything is a miss."""
        self._read: Callable[[list[int] | None], Bytes] | None = None
        self._running: dict[str, RunningSave] = {}
        self._cached_tokens: dict[str, int] = {}
        """Tokens of requests that are let in whose KV vLLM's own cache has."""
        self._places: dict[str, KvPlace] = {}
        """Where requests of a model with several groups go on, or have gone on."""
        self._staged_keys: list[bytes] = []
        self.most_staged = self.staged_from = self.awaited_blocks = 0
        """Set by ``use_block_bytes``."""
        self._awaited: dict[str, FetchedBlocks] = {}
        """What workers are loading for requests that wait, in memory that has to live until then."""
        self._loads = self._handed = Loads()
        self._layers: VllmLayers | None = None
        self._computed: torch.cuda.Event | None = None
        self._thread = ThreadPoolExecutor(1, "seer-kv-load")
        self._loading: dict[str, Future[None]] = {}
        self._columns = self.parts.columns(vllm_config.parallel_config.rank, self.block_bytes)
        self._is_first = self.parts.is_first(vllm_config.parallel_config.rank)

    @property
    def requires_kv_delivery(self) -> bool:
        """A block that is not saved is a miss, no more."""
        return False

    # In the scheduler.

    def use_block_bytes(self, block_bytes: int, awaited_bytes: int) -> None:
        """Copy as many blocks as fit if one has so many bytes.

        ``most_staged`` are copied out in a step, without those of chunks that end, once ``staged_from`` are
        full.  A request with more than ``awaited_blocks`` to load, which ``awaited_bytes`` hold, waits for
        them, and they come out of the store beside steps.
        """
        self.most_staged = max(1, STAGED_BYTES * self.parts.parts // block_bytes)
        self.awaited_blocks = awaited_bytes // block_bytes
        self.staged_from = min(self.most_staged, self.awaited_blocks) // 2

    def attach(
        self,
        store: KVStore,
        read: Callable[[list[int] | None], Bytes],
        report: Callable[[str], None],
        *,
        beside: bool,
    ) -> None:
        """Use a store; ``read`` returns the workers' blocks of these numbers, uint8 [n, block_bytes].

        Called with None it returns those that the workers have staged.  ``report`` gets the reason if the
        store is given up.  ``beside``: many blocks are copied out of it beside steps.
        """
        self.requests.store, self._read = FailsafeStore(store, report), read
        self.requests.awaited_blocks = self.awaited_blocks if beside else None
        self.requests.shared = self.apart

    def leave(self) -> None:
        """Close the store, and use none any more."""
        self.put_staged()
        store, self.requests.store, self._read = self.requests.store, FailsafeStore(None), None
        store.close()

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Copy out what the store has after the first ``num_computed_tokens``; one token stays to be run.

        Return for how many tokens that is, None while it is being copied, and whether the request waits.
        """
        self._cached_tokens[request.request_id] = num_computed_tokens
        if request.get_skip_reading_prefix_cache():  # every position is computed, for its log-prob
            return 0, False
        if self.groups.others:
            return self._match_place(request, num_computed_tokens)
        first = num_computed_tokens // self.block_tokens
        keys = self._keys(request)[first : (request.num_tokens - 1) // self.block_tokens]
        found = self.requests.stage(request.request_id, first, keys)
        if found is None:
            return None, False
        return found * self.block_tokens, found > self.awaited_blocks

    def _match_place(self, request: Request, cached_tokens: int) -> tuple[int | None, bool]:
        """Copy out what the store has for the last place where all groups can go on, as the caller does."""
        name = request.request_id
        place = self._places.get(name)
        if place is None or place.cached_tokens != cached_tokens:
            self.requests.take(name)
            place = self._places[name] = self._find_place(request, cached_tokens)
        if not place.keys:
            return 0, False
        found = self.requests.stage(name, 0, place.keys)
        if found is None:
            return None, False
        if found < len(place.keys):  # one has gone since
            self.requests.take(name)
            self._places[name] = KvPlace(cached_tokens, cached_tokens, [], [])
            return 0, False
        # A state is copied out of its block before a step's loads: what is loaded has to be there by then.
        waits = self.groups.recurrent or found > self.awaited_blocks
        return place.tokens - cached_tokens, waits

    def _find_place(self, request: Request, cached_tokens: int) -> KvPlace:
        """Return the last place whose blocks the store has, or that of vLLM's own cache."""
        groups, store = self.groups, self.requests.store
        last = request.num_tokens - 1
        begun = cached_tokens // self.block_tokens
        keys = self._block_keys(request, groups.first, range(begun, last // self.block_tokens))
        reached = (begun + store.find(keys)) * self.block_tokens
        for tokens in groups.rests(reached, cached_tokens):
            blocks = [(group, group.needed(tokens, cached_tokens)) for group in groups.all]
            wanted = keys[: len(blocks[0][1])]
            others = [key for group, needed in blocks[1:] for key in self._block_keys(request, group, needed)]
            if store.find(others) == len(others):
                return KvPlace(cached_tokens, tokens, [*wanted, *others], blocks)
        return KvPlace(cached_tokens, cached_tokens, [], [])

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        """Load what was promised into the blocks given for it; a second call, after a wait, does nothing."""
        name = request.request_id
        cached = self._cached_tokens.pop(name, None)
        if cached is None:
            return
        job = self._job(request)
        if "group" in job and not job["last"]:
            found = (cached + num_external_tokens) // self.block_tokens
            self._running[name] = RunningSave(request, found)
        staged = self.requests.take(name)
        if staged is None or not num_external_tokens:
            self._places.pop(name, None)
            return
        tables = blocks.get_block_ids()
        waits = staged.count > self.awaited_blocks
        if self.groups.others:
            place = self._places[name]
            assert place.tokens == cached + num_external_tokens
            assert len(place.keys) == staged.count
            rows = [row for group, needed in place.blocks for row in self._rows(tables, group, needed)]
            waits |= self.groups.recurrent
        else:
            assert staged.count * self.block_tokens == num_external_tokens
            needed = range(staged.first, staged.first + staged.count)
            rows = self._rows(tables, self.groups.first, needed)
        self._loads.loads.append(BlockLoad(name, rows, staged, waits))
        if waits:
            self._awaited[name] = staged

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> Loads:
        """Hand this step's loads to the workers; their memory lives until the next step, or a wait's end."""
        self.put_staged()  # of a step under way, which async scheduling has just begun
        staged = self._loads.staged = self._plan_staged(scheduler_output.num_scheduled_tokens)
        if staged and self.apart:
            self._loads.into = SharedBlocks(len(staged), self.block_bytes)
        self._handed, self._loads = self._loads, Loads()
        return self._handed

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Give up the memory of what all workers have loaded."""
        for name in connector_output.finished_recving or ():
            del self._awaited[name]

    @property
    def waits(self) -> bool:
        """Whether a request waits, or did when it was aborted, for what workers are loading."""
        return bool(self._awaited)

    def put_staged(self) -> None:
        """Begin to put into the store what the workers have copied out during the step just made."""
        keys, self._staged_keys = self._staged_keys, []
        if keys:
            assert self._read is not None
            into = self._handed.into
            blocks = into.blocks if isinstance(into, SharedBlocks) else self._read(None)
            self.requests.save_beside(keys if self.saves else [], blocks)

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Save the blocks of a chunk, or of a turn; drop those of a response that is over.

        The prompt of its group stays, and so does all of a trajectory.
        """
        self._running.pop(request.request_id, None)
        self._cached_tokens.pop(request.request_id, None)
        left = self._places.pop(request.request_id, None)
        self.requests.take(request.request_id)
        params = request.sampling_params
        job = self._job(request)
        if "group" not in job:
            return False, None
        self.put_staged()  # before any of it is dropped
        capped = request.status == RequestStatus.FINISHED_LENGTH_CAPPED
        aborted = request.status == RequestStatus.FINISHED_ABORTED
        of_prompt, written = self._all_keys(request, job["prompt_tokens"])
        if job["trajectory"]:
            self.requests.drop_with_group(job["trajectory"], [*of_prompt, *written])
            stopped = request.status == RequestStatus.FINISHED_STOPPED
            if capped or stopped or (aborted and self.saves_aborted):
                self._save(request, block_ids)
            return False, None
        written = [*self.requests.beyond_prompt(job["group"], [*of_prompt, *written], len(of_prompt))]
        last = job["last"] and request.num_output_tokens == (params.max_tokens if params else 0)
        turn = request.status == RequestStatus.FINISHED_STOPPED and job["turns"]
        if turn:
            self.requests.drop_with_group(job["group"], written)
        if turn or (capped and not last) or (aborted and self.saves_aborted):
            self._save_for(request, block_ids, left)
        elif capped or aborted or request.status == RequestStatus.FINISHED_STOPPED:
            self.requests.drop(written)
        return False, None

    def request_preempted(self, request: Request) -> None:
        """Save the blocks of a request that is about to lose them, while a step is being planned."""
        assert self._kv_cache_manager is not None
        tables = self._kv_cache_manager.get_block_ids(request.request_id)
        with self.planning():
            self._save_for(request, tables, self._places.pop(request.request_id, None))

    @contextmanager
    def planning(self) -> Iterator[None]:
        """Save nothing meanwhile that the step being planned may have yet to fill."""
        self._is_planning = True
        try:
            yield
        finally:
            self._is_planning = False

    def _plan_staged(self, scheduled: Iterable[str]) -> list[int]:
        """Return full blocks of running chunks that are not saved yet, if they are many; remember their keys.

        A step writes no block that was full before it, and takes none from a request that is in it.
        """
        assert self._kv_cache_manager is not None
        full: list[tuple[RunningSave, int]] = []
        for request_id in scheduled:
            running = self._running.get(request_id)
            if running is not None:
                request = running.request
                blocks = min(
                    request.num_computed_tokens // self.block_tokens,
                    self.groups.full_blocks(self._keys(request), self.groups.first),
                )
                if blocks > running.saved:
                    full.append((running, blocks))
        block_ids: list[int] = []
        if sum(blocks - running.saved for running, blocks in full) < self.staged_from:
            return block_ids
        for running, blocks in full:
            first, request = running.saved, running.request
            running.saved = end = min(blocks, first + self.most_staged - len(block_ids))
            tables = self._kv_cache_manager.get_block_ids(request.request_id)
            block_ids += self._rows(tables, self.groups.first, range(first, end))
            self._staged_keys += self._block_keys(request, self.groups.first, range(first, end))
        return block_ids

    def _job(self, request: Request) -> Mapping[str, Any]:
        """Return what a request carries of its chunk; nothing if it is to be left alone."""
        params = request.sampling_params
        return (params.extra_args if params else None) or {}

    def _keys(self, request: Request) -> Sequence[bytes]:
        keys: Sequence[bytes] = request.block_hashes
        assert not keys or len(keys[0]) == KEY_BYTES
        return keys

    def _block_keys(self, request: Request, group: KvGroup, blocks: Sequence[int]) -> list[bytes]:
        return self.groups.keys(self._keys(request), group, blocks)

    def _rows(self, tables: Sequence[Sequence[int]], group: KvGroup, blocks: Iterable[int]) -> list[int]:
        """Return the rows of a request's blocks, as ``VllmLayers`` numbers them."""
        base = self.groups.all.index(group) * self._kv.num_blocks
        return [base + tables[group.number][block] for block in blocks]

    def _all_keys(self, request: Request, prompt_tokens: int) -> tuple[list[bytes], list[bytes]]:
        """Return the keys of the blocks of a request that its prompt fills, and those of all others."""
        of_prompt: list[bytes] = []
        written: list[bytes] = []
        for group in self.groups.all:
            prompt = prompt_tokens // group.block_tokens
            end = self.groups.full_blocks(self._keys(request), group)
            of_prompt += self._block_keys(request, group, range(min(prompt, end)))
            written += self._block_keys(request, group, range(prompt, end))
        return of_prompt, written

    def _save_for(self, request: Request, tables: Sequence[Sequence[int]], left: KvPlace | None) -> None:
        """Save a request that goes on elsewhere or later, and drop the place that it has ``left`` behind.

        All of a trajectory stays.
        """
        saved, job = self._save(request, tables), self._job(request)
        if left is not None and "group" in job and not job["trajectory"] and saved > left.tokens:
            self._drop_place(request, left.tokens, saved, job["prompt_tokens"])

    def _drop_place(self, request: Request, tokens: int, later: int, prompt_tokens: int) -> None:
        """Drop what only a place would need that a request has left behind, for one that is saved now."""
        dropped: list[bytes] = []
        for group in self.groups.others:
            if group.reach is not None:
                kept = group.needed(later)
                behind = [
                    block
                    for block in group.needed(tokens)
                    if block < kept.start and (block + 1) * group.block_tokens > prompt_tokens
                ]
                dropped += self._block_keys(request, group, behind)
        self.requests.drop(dropped)

    def _save(self, request: Request, tables: Sequence[Sequence[int]]) -> int:
        """Put what the store lacks; return after how many tokens the request can go on by it."""
        self.put_staged()  # or the workers would copy these into the place of those
        if not self.saves or request.request_id in self._awaited:  # whose blocks are not there yet
            return 0
        computed = min(request.num_computed_tokens, request.num_tokens - 1)
        first = self.groups.first
        blocks = range(computed // first.block_tokens)
        keys, rows = self._block_keys(request, first, blocks), self._rows(tables, first, blocks)
        place = computed
        if self.groups.others:
            place, found = self._last_place(request, tables, computed)
            keys += [key for key, _ in found]
            rows += [row for _, row in found]

        def read(lacking: list[int]) -> Bytes:
            assert self._read is not None
            return self._read([rows[i] for i in lacking])

        self.requests.save(keys, read)
        return place

    def _last_place(
        self, request: Request, tables: Sequence[Sequence[int]], computed: int
    ) -> tuple[int, list[tuple[bytes, int]]]:
        """Return the last place whose blocks are here, and keys and rows of those of the other groups."""
        for tokens in self.groups.rests(computed, 0):
            found: list[tuple[bytes, int]] = []
            for group in self.groups.others:
                needed = group.needed(tokens)
                rows = [self._row_here(request, tables, group, block) for block in needed]
                found += [
                    (key, row)
                    for key, row in zip(self._block_keys(request, group, needed), rows, strict=True)
                    if row is not None
                ]
                if None in rows:
                    break
            else:
                return tokens, found
        return 0, []

    def _row_here(
        self, request: Request, tables: Sequence[Sequence[int]], group: KvGroup, block: int
    ) -> int | None:
        """Return the row of a full block that the request has, or has given up to vLLM's cache."""
        number = 0 if group.recurrent else tables[group.number][block]  # a table's last state goes on
        if not number:
            assert self._kv_cache_manager is not None
            each = group.block_tokens // self.groups.hash_tokens
            key = request.block_hashes[(block + 1) * each - 1]
            cached = self._kv_cache_manager.block_pool.get_cached_block(key, [group.number])
            if cached is None:
                return None
            if self._is_planning and not is_computed(cached[0], tables[group.number]):
                return None
            number = cached[0].block_id
        return self._rows([[number]] * len(tables), group, [0])[0]

    # In the worker.

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Take the KV of all layers."""
        pages = pages_of(self._kv, self.groups) if self.groups.others else None
        self._make_layers = partial(VllmLayers, kv_caches, self._kv.num_blocks, pages)
        self._layers = self._make_layers()

    def take_along(self, experts: torch.Tensor) -> None:
        """Have the experts of all slots, uint8 [blocks, ...], move with the KV of the first group."""
        self._layers = self._make_layers({"routed experts": experts})

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """Take what this step loads; it waits for what has been computed before the step."""
        super().bind_connector_metadata(connector_metadata)
        assert isinstance(connector_metadata, Loads)
        if connector_metadata.loads or connector_metadata.staged:
            assert self._layers is not None
            self._computed = self._layers.computed()

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Load what this step asks for, and begin to load what requests wait for."""
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, Loads)
        for load, write in self._writes(metadata):
            if not load.waits:
                write()
                continue
            self._loading[load.request_id] = self._thread.submit(write)
        self._stage(metadata)

    def load_now(self, metadata: Loads) -> None:
        """Load everything at once, and stage, where the time that takes is not the machine's."""
        for _, write in self._writes(metadata):
            write()
        self._stage(metadata)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Return of which requests that wait everything has been loaded here."""
        loaded = {name for name, load in self._loading.items() if load.done()}
        for name in loaded:
            self._loading.pop(name).result()
        return None, loaded or None

    def _writes(self, metadata: Loads) -> Iterator[tuple[BlockLoad, Callable[[], None]]]:
        """Yield each load, and the function that makes it."""
        assert self._layers is not None
        for load in metadata.loads:
            blocks = load.fetched.blocks[:, self._columns]
            yield load, partial(self._layers.write, load.rows, blocks, self._computed)

    def _stage(self, metadata: Loads) -> None:
        assert self._layers is not None
        self._layers.stage(metadata.staged, self._computed)

    def read(self, block_ids: list[int] | None) -> Bytes:
        """Return this worker's part of blocks, or without numbers of those staged, uint8 [n, its bytes]."""
        assert self._layers is not None
        return self._layers.take() if block_ids is None else self._layers.read(block_ids)

    def read_part(self, block_ids: list[int], into: Bytes) -> None:
        """Write this worker's part of blocks into uint8 [n, block_bytes], if no other does."""
        if self._is_first:
            into[:, self._columns] = self.read(block_ids)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Everything has been loaded by now."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Nothing is saved while the model runs."""

    def wait_for_save(self) -> None:
        """Write this worker's part of what it has staged, if there are several, and no other does."""
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, Loads)
        into = metadata.into
        if into is not None and self._is_first:
            assert self._layers is not None
            assert not isinstance(into, SharedBlocks)  # which is an array once it has come here
            into[:, self._columns] = self._layers.take()
