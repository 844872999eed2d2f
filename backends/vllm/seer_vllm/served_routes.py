"""Seer's routes in a stock ``vllm serve``; vLLM adds them where ``VLLM_PLUGINS`` names ``seer``."""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from argparse import Namespace
from typing import Any

import msgspec
from fastapi import FastAPI, Request, Response
from seer_worker.served import CALL, INFO, LEASE_S, Detach, ServedCall

__all__ = ["SeerRoutes"]


class SeerRoutes:
    """vLLM's ``EndpointPlugin``.

    Its tokens are asked for here: vLLM itself guards only its own routes.
    """

    name = "seer"
    required_tasks = ("generate",)

    def __init__(self) -> None:
        self._engine: Any = None
        self._tokens: list[bytes] = []
        self._leases: dict[str, asyncio.TimerHandle] = {}
        self._leaving: set[asyncio.Task[Response]] = set()

    def attach_router(self, app: FastAPI) -> None:
        """Add the routes."""
        app.add_api_route(INFO, self._info, methods=["GET"], include_in_schema=False)
        app.add_api_route(CALL, self._call, methods=["POST"], include_in_schema=False)

    async def init_state(self, engine_client: Any, state: Any, args: Namespace) -> None:
        """Take the engine, and the tokens that its clients need."""
        from vllm import envs

        self._engine = engine_client
        tokens = [*(getattr(args, "api_key", None) or ()), envs.VLLM_API_KEY]
        self._tokens = [hashlib.sha256(token.encode()).digest() for token in tokens if token]

    async def _info(self, request: Request) -> Response:
        if not self._may(request):
            return Response(status_code=401)
        return await self._ask("seer_info")

    async def _call(self, request: Request) -> Response:
        if not self._may(request):
            return Response(status_code=401)
        body = await request.body()
        try:
            call = msgspec.json.decode(body, type=ServedCall)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            return Response(f"it is no call of Seer's: {error}", 400)
        self._renew(call.driver)
        return await self._ask("seer_call", body.decode())

    def _renew(self, driver: str) -> None:
        """Leave this runtime once it has not called for long."""
        if driver in self._leases:
            self._leases[driver].cancel()
        self._leases[driver] = asyncio.get_running_loop().call_later(LEASE_S, self._leave, driver)

    def _leave(self, driver: str) -> None:
        del self._leases[driver]
        body = msgspec.json.encode(ServedCall(driver, [Detach()])).decode()
        task = asyncio.ensure_future(self._ask("seer_call", body))
        self._leaving.add(task)
        task.add_done_callback(self._leaving.discard)

    async def _ask(self, method: str, *arguments: str) -> Response:
        try:
            answer = await self._engine.engine_core.call_utility_async(method, *arguments)
        except Exception as error:
            return Response(str(error), 400)
        return Response(answer, media_type="application/json")

    def _may(self, request: Request) -> bool:
        if not self._tokens:
            return True
        scheme, _, token = request.headers.get("Authorization", "").partition(" ")
        digest = hashlib.sha256(token.encode()).digest()
        found = False
        for each in self._tokens:
            found |= secrets.compare_digest(digest, each)
        return found and scheme.lower() == "bearer"
