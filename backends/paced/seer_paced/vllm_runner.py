"""The runner behind vLLM's scheduler in place of a model's: books kept, emulated steps, tokens of a script.

Nothing is computed.  What the scheduler plans is compared with the books: tokens that count as computed,
blocks that count as found or loaded, and blocks that are in use.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from seer_vllm.connector import Loads, StoreConnector
from seer_vllm.proposer import Proposer
from seer_worker.process.adapter import ScriptedTokens
from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput
from vllm.v1.outputs import (
    DraftTokenIds,
    KVConnectorOutput,
    LogprobsLists,
    ModelRunnerOutput,
)

from seer_core.errors import EngineError
from seer_core.ports.kv import Bytes
from seer_paced.emulated_thread import INSTANT_S
from seer_paced.emulation import LOGPROB, Emulation
from seer_paced.fingerprints import Fingerprints
from seer_paced.slots import prints_of

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from vllm.config import VllmConfig

__all__ = ["EmulatedRunner"]


class _Request:
    """A request: its text, how far it is computed, its blocks, and how many of them are filled.

    ``prints`` are the fingerprints that its full blocks have, in order.
    """

    __slots__ = ("base", "blocks", "computed", "count", "filled", "name", "prints", "script", "tokens")

    def __init__(self, new: NewRequestData, version: int, block_tokens: int) -> None:
        prompt = new.prompt_token_ids
        assert prompt is not None
        assert new.sampling_params is not None
        assert new.sampling_params.extra_args is not None
        script: ScriptedTokens = new.sampling_params.extra_args["script"]
        self.name: str = new.sampling_params.extra_args["request"]
        self.base = self.count = len(prompt)
        self.script = script.token_ids
        self.tokens: NDArray[np.int32] = np.array([*prompt, *script.token_ids], np.int32)
        self.computed = new.num_computed_tokens
        self.blocks = list(new.block_ids[0])
        self.prints = prints_of(self.tokens, version)[block_tokens - 1 :: block_tokens]
        self.filled = self.computed // block_tokens

    def write(self, drafts: Sequence[int]) -> list[int]:
        """Return what this step gives: a token, and one more for each draft that is as in the script."""
        script, at = self.script, self.count - self.base
        kept = [script[at]]
        for draft in drafts:
            if draft != kept[-1] or at + len(kept) == len(script):
                break
            kept.append(script[at + len(kept)])
        self.count += len(kept)
        self.computed = self.count - 1
        return kept


class EmulatedRunner:
    """Keeps the books of one instance."""

    def __init__(
        self, vllm_config: VllmConfig, kv: Fingerprints, block_tokens: int, connector: StoreConnector | None
    ) -> None:
        emulation = vllm_config.additional_config
        assert isinstance(emulation, Emulation)
        self.speculative_config = vllm_config.speculative_config
        self._ids: list[str] = []
        self.drafting_s = 0.0
        self._emulation, self._cost = emulation, emulation.cost
        self._kv, self._block_tokens, self._connector = kv, block_tokens, connector
        self._requests: dict[str, _Request] = {}
        self._drafts: DraftTokenIds | None = None
        self._version = emulation.weight_version
        self._loading: dict[str, float] = {}
        self._loaded_until = 0.0
        if self.speculative_config is not None:
            self.drafter = Proposer(vllm_config)
            self.drafter.request_ids = lambda: self._ids

    def execute(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        """Make a step."""
        if self._version != self._emulation.weight_version:
            self._version = self._emulation.weight_version
            self._kv.clear()
        for copy in getattr(plan, "kv_cache_block_copies", None) or ():
            self._kv.copy(copy.src_block_id, copy.dst_block_id)
        for request_id in plan.finished_req_ids:
            self._requests.pop(request_id, None)
        moved_s = self._load(plan)
        if not plan.num_scheduled_tokens:
            self._emulation.time.spend(moved_s or self._next_load_s())
            return ModelRunnerOutput.with_kv_conn_output_only(self._loaded())
        found = self._admit(plan)
        self._emulation.time.admit([request.name for request, _ in found])
        ids = list(plan.num_scheduled_tokens)
        self._ids = ids
        sampled, step_s = self._write(plan, {id(request) for request, _ in found})
        for request, full in found:
            # Only now: a block that one request finds may be computed by another in this very step.
            self._kv.check(request.blocks[:full], request.prints[:full], request.name)
        self._emulation.time.spend(step_s + moved_s)
        if self.speculative_config is not None:
            self._draft(ids, sampled, bool(plan.scheduled_spec_decode_tokens))
        output = ModelRunnerOutput(
            ids, {name: row for row, name in enumerate(ids)}, sampled, _logprobs(sampled)
        )
        output.kv_connector_output = self._loaded()
        return output

    def take_drafts(self) -> DraftTokenIds | None:
        """Return the drafts for the next step, once."""
        drafts, self._drafts = self._drafts, None
        return drafts

    def read_kv(self, block_ids: list[int] | None) -> Bytes:
        """Return blocks for the KV pool, uint8 [n, block_bytes]; the step under way takes longer for it.

        None: those staged, which were copied out while it was computed.
        """
        assert self._connector is not None
        if block_ids is not None:
            self._emulation.time.spend(self._emulation.save_s(len(block_ids) * self._block_tokens))
        return self._connector.read(block_ids)

    def _load(self, plan: SchedulerOutput) -> float:
        """Load all at once, and return the seconds that this step takes longer for it.

        What a request waits for counts as loaded when its copy would have ended: one after the other.
        """
        if self._connector is None:
            return 0.0
        loads = plan.kv_connector_metadata
        assert isinstance(loads, Loads)
        now, blocks = self._emulation.time.now(), 0
        for load in loads.loads:
            if load.waits:
                load_s = self._emulation.load_s(len(load.rows) * self._block_tokens)
                self._loaded_until = max(self._loaded_until, now) + load_s
                self._loading[load.request_id] = self._loaded_until
            else:
                blocks += len(load.rows)
        self._connector.load_now(loads)
        return self._emulation.load_s(blocks * self._block_tokens)

    def _next_load_s(self) -> float:
        """Return the seconds until the next load ends, 0 without any."""
        now = self._emulation.time.now()
        return max(0.0, min(self._loading.values(), default=now) - now)

    def _loaded(self) -> KVConnectorOutput | None:
        """Return the requests that have waited until now."""
        if self._connector is None:
            return None
        now = self._emulation.time.now() + INSTANT_S
        loaded = {name for name, until in self._loading.items() if until <= now}
        for name in loaded:
            del self._loading[name]
        return KVConnectorOutput(finished_recving=loaded or None)

    def _admit(self, plan: SchedulerOutput) -> list[tuple[_Request, int]]:
        """Take over what the scheduler plans for requests.

        Returns those that it lets in, again or anew, each with the number of blocks that count as computed.
        """
        found = []
        for new in plan.scheduled_new_reqs:
            request = self._requests[new.req_id] = _Request(new, self._version, self._block_tokens)
            found.append(request)
        cached = plan.scheduled_cached_reqs
        for name, blocks, computed in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            request = self._requests[name]
            if name in cached.resumed_req_ids:
                assert blocks is not None
                request.blocks, request.computed = list(blocks[0]), computed
                request.filled = computed // self._block_tokens
                found.append(request)
                continue
            if blocks is not None:
                request.blocks += blocks[0]
            if request.computed != computed:
                raise EngineError(
                    f"vLLM counts {computed} tokens of request {name!r} as computed, and {request.computed}"
                    " are; this vLLM's scheduler is not the one that emulated instances were written for"
                )
        return [(request, request.filled) for request in found]

    def _write(self, plan: SchedulerOutput, found: set[int]) -> tuple[list[list[int]], float]:
        """Return each request's tokens, and the seconds that computing them takes."""
        cost, positions, chosen, attention_s = self._cost, 0, 0, 0.0
        sampled: list[list[int]] = []
        for name, tokens in plan.num_scheduled_tokens.items():
            request = self._requests[name]
            drafts = plan.scheduled_spec_decode_tokens.get(name, ())
            before, after = request.computed, request.computed + tokens
            positions += tokens
            chosen += 1 + len(drafts)
            if id(request) in found or tokens - len(drafts) > 1:
                attention_s += cost.prefill_attention_s(before, tokens)
            else:
                attention_s += after * cost.attention_s(tokens)
            if after - len(drafts) < request.count:  # in the midst of its context
                request.computed = after
                sampled.append([])
            else:
                sampled.append(request.write(drafts))
            self._fill(request, checked=id(request) not in found)
        return sampled, cost.pass_s(positions, len(sampled), chosen) + attention_s

    def _fill(self, request: _Request, *, checked: bool) -> None:
        """Write the blocks that are full now; with ``checked``, compare the one before them first."""
        first, full = request.filled, request.computed // self._block_tokens
        if full <= first:
            return
        if first and checked:
            self._kv.check(request.blocks[first - 1 : first], request.prints[first - 1 : first], request.name)
        self._kv.write(request.blocks[first:full], request.prints[first:full])
        request.filled = full

    def _draft(self, ids: list[str], sampled: list[list[int]], verified: bool) -> None:
        """Ask the drafter for the next step, and let the time pass that it takes."""
        requests = [self._requests[name] for name in ids]

        def text(row: int, start: int, stop: int) -> list[int]:
            tokens: list[int] = requests[row].tokens[start:stop].tolist()
            return tokens

        drafts = self.drafter.propose_for(sampled, [request.count for request in requests], text)
        self._drafts = DraftTokenIds(ids, drafts)
        drafting_s = self._emulation.draft_s(sum(map(bool, drafts)), verified)
        self.drafting_s += drafting_s
        self._emulation.time.spend(drafting_s)


def _logprobs(sampled: list[list[int]]) -> LogprobsLists:
    """Return the log-probs of a step, a row for each token."""
    tokens = [token for row in sampled for token in row]
    ends = np.cumsum([0, *map(len, sampled)]).tolist()
    return LogprobsLists(
        np.array(tokens, np.int32).reshape(-1, 1),
        np.full((len(tokens), 1), LOGPROB, np.float32),
        np.zeros(len(tokens), np.int32),
        ends,
    )
