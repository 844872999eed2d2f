"""The replacement of verl's client of its servers: each request is a row of a reserved group."""

from __future__ import annotations

import asyncio
from base64 import b64encode
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray
from seer_client import AsyncClient, Completion
from seer_host.images import png_of
from seer_host.routed_experts import ROUTED_EXPERTS, unpacked
from verl.utils import normalize_token_ids
from verl.utils.rollout_trace import rollout_trace_op
from verl.workers.rollout.replica import TokenOutput

from seer_verl.rows import ROW
from seer_verl.sampling import STOPS, record_fields
from seer_verl.settings import VerlSettings, settings_of

__all__ = ["LLMClient", "step_of", "version_of"]

CONTROLS = (
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "allowed_token_ids",
    "bad_words",
    "structured_outputs",
    "min_tokens",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "include_stop_str_in_output",
)
"""Sampling parameters of vLLM's that Seer has by the same names."""


def version_of(step: int) -> int:
    """Return the version of the weights after a step; 0 are those that the server began with."""
    return step + 1


def step_of(version: int) -> int:
    """Return the step whose weights a version is, -1 for those that the server began with."""
    return version - 1


class LLMClient:
    """Sends the requests of verl's agent loops to Seer's server, from each worker's process."""

    def __init__(self, config: Any) -> None:
        rollout = config.actor_rollout_ref.rollout
        self.settings: VerlSettings = settings_of(rollout)
        self.prompt_length: int = rollout.prompt_length
        self.response_length: int = rollout.response_length
        self.usual_agent: str = rollout.agent.default_agent_loop
        self.replays_routing: bool = rollout.enable_rollout_routing_replay
        self._client: tuple[asyncio.AbstractEventLoop, AsyncClient] | None = None

    def connect(self) -> AsyncClient:
        """Return a client for the event loop that runs."""
        return AsyncClient(**self.settings.connection)

    @property
    def client(self) -> AsyncClient:
        """The client of this process; a worker's agent loops share an event loop."""
        loop = asyncio.get_running_loop()
        if self._client is None or self._client[0] is not loop:
            self._client = loop, self.connect()
        return self._client[1]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_client": None}

    @asynccontextmanager
    async def reserved(self, groups: Sequence[Mapping[str, Any]], iteration: int) -> AsyncIterator[str]:
        """Reserve groups until this is left, and let the server drop the KV of their trajectories then.

        Raises:
            ClientError: the server refuses them, or is gone.
        """
        async with self.connect() as client:
            async with client.reserve(groups, iteration=iteration, prompt_wait_s=self.settings.prompt_wait_s):
                yield ""
            for group in groups:
                if "family" in group:
                    await client.end_family(group["family"])

    @rollout_trace_op
    async def generate(
        self,
        request_id: str,
        *,
        prompt_ids: Sequence[int],
        sampling_params: Mapping[str, Any],
        image_data: Any = None,
        video_data: Any = None,
        audio_data: Any = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
        **_: Any,
    ) -> TokenOutput:
        """Roll out the next turn of the row that runs, as verl's client does for ``request_id``.

        Raises:
            ValueError: it asks for something that Seer's rollouts do not support.
            ConfigError: an image is none of PIL's.
            RuntimeError: the response has failed.
            ClientError: the server refuses it, or is gone.
        """
        if video_data or audio_data:
            raise ValueError("Seer rolls out text and images; leave videos and audio out of the data")
        if image_data and mm_processor_kwargs:
            raise ValueError(
                "data.mm_processor_kwargs changes what verl makes of an image, and Seer's engines do not get"
                " it; leave it out"
            )
        row = ROW.get()
        if row is None:
            raise ValueError(
                "a request came from outside an agent loop of Seer's workers; name Seer's manager in"
                " rollout.agent.agent_loop_manager_class"
            )
        ids = list(normalize_token_ids(prompt_ids))
        wanted = self.sampling(sampling_params, len(ids))
        if image_data:
            wanted["images"] = [await asyncio.to_thread(_data_url, image) for image in image_data]
            wanted["bad_words"] = [*wanted.get("bad_words", ()), *([each] for each in row.never_written)]
        later = row.next_turn() if row.turns else None
        row.turns += 1
        if later is None:
            completion = await self.client.rollout_row(row.group, row.index, prompt_token_ids=ids, **wanted)
        else:
            record = {**later, "prompt_token_ids": ids, **wanted}
            (completion,) = [each async for each in self.client.rollout([record], iteration=row.iteration)]
        if completion.finish_reason not in STOPS:
            raise RuntimeError(f"the response {completion.request_id} has failed; the server's log says why")
        step = step_of(completion.weight_version)
        return TokenOutput(
            token_ids=list(completion.token_ids),
            log_probs=list(completion.logprobs) if sampling_params.get("logprobs") else None,
            routed_experts=_experts(completion, len(ids)) if self.replays_routing else None,
            stop_reason=STOPS[completion.finish_reason],
            extra_fields={"global_steps": step, "min_global_steps": step, "max_global_steps": step},
        )

    def sampling(self, params: Mapping[str, Any], prompt_tokens: int) -> dict[str, Any]:
        """Return verl's sampling parameters as Seer's; the length is bounded as verl's servers do it.

        Raises:
            ValueError: they ask for something that Seer's rollouts do not support.
        """
        room = self.prompt_length + self.response_length - prompt_tokens
        found, left = record_fields(params, min(self.response_length, room), CONTROLS)
        found["max_tokens"] = max(1, found["max_tokens"])
        unknown = [name for name, value in left.items() if value]
        if unknown:
            raise ValueError(
                f"Seer's rollouts do not support {unknown[0]}; leave it out of the sampling parameters"
            )
        return found


def _data_url(image: Any) -> str:
    return f"data:image/png;base64,{b64encode(png_of(image)).decode()}"


def _experts(completion: Completion, prompt_tokens: int) -> NDArray[np.int16]:
    """Return the experts of all tokens but the last, int16 [positions, layers, experts per token]."""
    found = completion.attachments.get(ROUTED_EXPERTS)
    if not isinstance(found, Mapping):
        raise RuntimeError(
            "enable_rollout_routing_replay: Seer's engines do not answer the experts that they take; write"
            " engine_args = { enable_return_routed_experts = true } into [engine.sglang] or [engine.vllm] of"
            " the server's config"
        )
    _, experts = unpacked(found)
    positions = prompt_tokens + len(completion.token_ids) - 1
    if len(experts) < positions:
        raise RuntimeError(
            f"the response {completion.request_id} has experts of {len(experts)} positions in place of"
            f" {positions}; a chunk was answered without them"
        )
    return experts[:positions].astype(np.int16)
