"""Stand-ins for slime's router and its SGLang servers, with tokens that follow from seed and place."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import threading
from typing import Any

import numpy as np
from aiohttp import web

from tests.support.patience import PATIENCE_S

VOCAB = 96


def experts_of(tokens: list[int]) -> Any:
    """Return the experts of all tokens but the last, int32 [positions, 3 layers, 2 experts per token]."""
    each = np.asarray(tokens[:-1], np.int32)[:, None, None]
    return each * 7 % 64 + np.arange(6, dtype=np.int32).reshape(3, 2)


def nucleus_of(tokens: list[int]) -> tuple[list[int], list[int]]:
    """Return the tokens from which each of these was drawn, and where they begin."""
    each = [[token + place for place in range(1 + token % 3)] for token in tokens]
    return [found for some in each for found in some], [0, *np.cumsum([len(some) for some in each]).tolist()]


def packed(numbers: Any) -> str:
    """Return numbers as SGLang writes them."""
    return base64.b64encode(np.asarray(numbers, np.int32).tobytes()).decode()


class StandInServers:
    """A router and the servers that it lists, in a thread of their own.

    ``weights`` decide tokens, ``label`` is their name; ``requests`` are those of each server, which has so
    many ``groups`` of ranks for attention.  The router sends its own requests to the first; ``routed`` are
    those.  With ``patched`` servers answer the tokens from which they draw.
    What the router asks for has other tokens with ``astray``.
    """

    def __init__(self, count: int = 2) -> None:
        self.weights, self.label = 0, "default"
        self.groups = 1
        self.patched = True
        self.astray = 0
        self.routed: list[dict[str, Any]] = []
        self.requests: list[list[dict[str, Any]]] = [[] for _ in range(count)]
        self._held: asyncio.Event | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._runners: list[web.AppRunner] = []
        self.urls = [self._call(self._serve(self._server(number))) for number in range(count)]
        self.router = self._call(self._serve(self._router()))

    def hold(self) -> None:
        """Never answer requests that are divided, from now on."""
        self._held = asyncio.Event()

    def release(self) -> None:
        """Answer what is held."""
        if self._held is not None:
            self._loop.call_soon_threadsafe(self._held.set)

    def close(self) -> None:
        """End all."""
        for runner in self._runners:
            self._call(runner.cleanup())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _call(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(PATIENCE_S)

    async def _serve(self, routes: list[Any]) -> str:
        app = web.Application()
        app.add_routes(routes)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        self._runners.append(runner)
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        return f"http://127.0.0.1:{runner.addresses[0][1]}"

    def _router(self) -> list[Any]:
        async def workers(_: web.Request) -> web.Response:
            return web.json_response({"workers": [{"url": each} for each in self.urls]})

        async def generate(request: web.Request) -> web.Response:
            self.routed.append(await request.json())
            return self._generate(0, self.routed[-1], self.astray)

        return [web.get("/workers", workers), web.post("/generate", generate)]

    def _server(self, number: int) -> list[Any]:
        def answering(answer: Any) -> Any:
            async def handle(_: web.Request) -> web.Response:
                return web.json_response(answer)

            return handle

        async def generate(request: web.Request) -> web.Response:
            body = await request.json()
            if self._held is not None and body["sampling_params"]["max_new_tokens"] == 4:
                await self._held.wait()
            return self._generate(number, body)

        async def server_info(_: web.Request) -> web.Response:
            info = {"version": "0.5.23", "model_path": "/no/tiny", "max_total_num_tokens": 4096}
            info |= {"enable_deterministic_inference": True, "attn_dp_size": self.groups}
            return web.json_response(info)

        loads = {"loads": [{"num_running_reqs": 0, "num_waiting_reqs": 0, "token_usage": 0.1}]}
        return [
            web.get("/server_info", server_info),
            web.get("/v1/models", answering({"data": [{"id": "tiny", "max_model_len": 256}]})),
            web.get("/ready", answering({})),
            web.get("/v1/loads", answering(loads)),
            web.post("/tokenize", answering({"tokens": [1, 2, 3]})),
            web.post("/abort_request", answering({})),
            web.post("/generate", generate),
        ]

    def _generate(self, number: int, body: dict[str, Any], astray: int = 0) -> web.Response:
        if max(body.get("token_ids_logprob", [0])) >= VOCAB:
            return web.json_response({"error": f"the valid range is [0, {VOCAB})"}, status=400)
        how = body["sampling_params"]
        context = body.get("input_ids") or [1]  # slime's own client may send the text beside images
        self.requests[number].append(body)
        tokens: list[int] = []
        for _ in range(how["max_new_tokens"]):
            seed = how.get("sampling_seed") if how["temperature"] else 0
            place = len(context) + len(tokens)
            key = f"{seed} {place} {[*context, *tokens][-1]} {self.weights + astray}".encode()
            tokens.append(3 + int.from_bytes(hashlib.sha256(key).digest()[:4]) % (VOCAB - 3))
        meta = {
            "id": body.get("rid", "own"),
            "finish_reason": {"type": "length"},
            "output_token_logprobs": [(-0.5 - self.weights / 7, token, None) for token in tokens],
            "cached_tokens": 0,
            "weight_version": self.label,
        }
        if body.get("return_routed_experts"):
            experts = experts_of([*context, *tokens])
            meta["routed_experts"] = packed(experts)
        if self.patched and (how.get("custom_params") or {}).get("return_top_p_token_ids"):
            meta["top_p_token_ids"], meta["top_p_token_offsets"] = map(packed, nucleus_of(tokens))
        return web.json_response({"text": "", "output_ids": tokens, "meta_info": meta})
