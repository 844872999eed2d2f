"""verl's own client, untouched, with a record of the lengths and times of its requests: ``mode=shadow``."""

from __future__ import annotations

import os
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any
from uuid import uuid4

from seer_host.shadow_records import WatchedRequest, append_watched
from verl.workers.rollout.llm_server import LLMServerClient
from verl.workers.rollout.replica import TokenOutput

from seer_verl.rows import ROW
from seer_verl.settings import kept_settings_of

__all__ = ["ShadowClient"]

SERVER: ContextVar[str] = ContextVar("SERVER", default="")
"""The server that verl's balancer has chosen for the request that runs."""


class ShadowClient(LLMServerClient):
    """Answers as verl's client does; each process writes a file of its own for ``seer shadow``."""

    def __init__(self, config: Any, stock: LLMServerClient) -> None:
        """Take the balancer of verl's own client."""
        super().__init__(config, stock._load_balancer)
        rollout = config.actor_rollout_ref.rollout
        self.usual_agent: str = rollout.agent.default_agent_loop
        self._folder = Path(kept_settings_of(rollout).record)
        self._name = uuid4().hex

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_name": ""}

    @asynccontextmanager
    async def reserved(self, groups: Sequence[Mapping[str, Any]], iteration: int) -> AsyncIterator[str]:
        """Do nothing: verl schedules."""
        yield ""

    async def _acquire_server(self, request_id: str, **extra: Any) -> tuple[str, Any]:
        server, handle = await super()._acquire_server(request_id, **extra)
        SERVER.set(server)
        return server, handle

    async def generate(self, request_id: str, *, prompt_ids: Sequence[int], **more: Any) -> TokenOutput:
        """Return what verl's client does, and note how long it took; see its method."""
        began_s = time.time()
        output = await super().generate(request_id, prompt_ids=prompt_ids, **more)
        row = ROW.get()
        if row is not None:
            lengths = len(prompt_ids), len(output.token_ids)
            times = began_s, time.time()
            self._write(WatchedRequest(row.iteration, row.group, SERVER.get(), *lengths, *times))
        return output

    def _write(self, request: WatchedRequest) -> None:
        self._name = self._name or f"{os.getpid()}-{uuid4().hex}"
        self._folder.mkdir(parents=True, exist_ok=True)
        append_watched(self._folder / f"{self._name}.jsonl", request)
