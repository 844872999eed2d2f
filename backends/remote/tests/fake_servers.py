"""A stand-in for ``vllm serve`` in this process, and its thread; tokens follow from seed and place."""

from __future__ import annotations

import asyncio
import hashlib
import random
import ssl
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from contextlib import ExitStack
from typing import Any

import msgspec
from aiohttp import web
from seer_host.ports import reserved_port
from seer_worker.served import CALL, INFO, ServedAnswer, ServedCall, ServedInfo

from tests.support.patience import PATIENCE_S

VOCAB = 96
TURNS_TO_TAKE = 5
"""A socket is taken in one turn of the loop, has a transport in the next, and a protocol in the one after."""


class Thread:
    """An event loop in a thread of its own, where stand-ins serve."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()

    def call(self, work: Any) -> Any:
        future: Future[Any] = asyncio.run_coroutine_threadsafe(work, self.loop)
        return future.result(PATIENCE_S)

    def stop(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()


class FakeVllm:
    """Serves what the dialect asks for; attributes are what a test changes.

    ``noise`` is ``keyed``, ``seeded`` (the seed's noise begins anew with each request) or ``free``.
    ``spoil`` changes the answer to a chunk; ``before`` runs before one is written.
    """

    def __init__(self, name: str = "first") -> None:
        self.name = name
        self.noise = "keyed"
        self.device = 0
        """Two of different devices draw different tokens from a seed."""
        self.model = "tiny"
        self.adapters: list[str] = []
        self.version = "0.32.0"
        self.max_model_len = 512
        self.vocab = VOCAB
        self.text_tokens = [1, 2, 3]
        self.weights = 0
        self.label = "default"
        self.scale_out = True
        self.developer = True
        self.paused = False
        self.token = ""
        self.tls: ssl.SSLContext | None = None
        self.keyed_package = False
        self.processed = False
        """Whether its log-probs are those after temperature and cuts."""
        self.kv = True
        self.seer: ServedInfo | None = None
        """What Seer's half in it says, if it has one."""
        self.answer: Callable[[ServedCall], ServedAnswer] = lambda call: ServedAnswer()
        self.calls: list[ServedCall] = []
        self.store: set[tuple[Any, ...]] = set()
        """Contexts whose KV it has, by their salts; two that have one object share KV."""
        self.token_s = 0.0
        self.spoil: Callable[[dict[str, Any]], Any] = lambda answer: answer
        self.before: Callable[[dict[str, Any]], Awaitable[Any]] | None = None
        self.control: Callable[[web.Request], Awaitable[web.Response | None]] | None = None
        """Answers calls of the owner's, if it is one."""
        self.requests: list[dict[str, Any]] = []
        self.aborted: set[str] = set()
        self.running: set[str] = set()
        self.written = 0
        self.looks = 0
        """How often its figures have been read."""
        self.others_write = False
        self.figure = ""
        """Whether it writes for other clients too, each time that it is asked how much it has written."""
        self.backlog = 128
        self.url = ""
        self._runner: web.AppRunner | None = None
        self._reserved = ExitStack()
        self._port = self._reserved.enter_context(reserved_port())  # also while it is dead

    async def start(self) -> None:
        app = web.Application(middlewares=[self._guard])
        app.add_routes(
            [
                web.get("/health", self._empty),
                web.get("/version", self._version),
                web.get("/v1/models", self._models),
                web.get("/metrics", self._metrics),
                web.get("/is_paused", self._is_paused),
                web.get("/server_info", self._info),
                web.post("/tokenize", self._tokenize),
                web.post("/inference/v1/generate", self._generate),
                web.post("/inference/v1/abort_requests", self._abort),
                web.post("/v1/completions", self._complete),
                web.post("/collective_rpc", self._load),
                web.get(INFO, self._seer_info),
                web.post(CALL, self._seer_call),
                web.post("/update_weight_version", self._label),
            ]
        )
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        ways = {"ssl_context": self.tls, "backlog": self.backlog, "reuse_address": True}
        await web.TCPSite(self._runner, "127.0.0.1", self._port, **ways).start()
        self.url = f"https://localhost:{self._port}" if self.tls else f"http://127.0.0.1:{self._port}"

    async def stop(self) -> None:
        """End, with all connections; ``start`` serves at the same port again."""
        runner, self._runner = self._runner, None
        if runner is not None:
            for site in list(runner.sites):
                await site.stop()
            # A connection that asyncio is taking is the runner's some turns later; ``cleanup`` waits for one
            # turn, closes those that it has, and forgets those that come meanwhile.
            for _ in range(TURNS_TO_TAKE):
                await asyncio.sleep(0)
            await runner.cleanup()

    def release(self) -> None:
        """Give its port back."""
        self._reserved.close()

    @web.middleware
    async def _guard(self, request: web.Request, handler: Any) -> web.StreamResponse:
        if self.token and request.headers.get("Authorization") != f"Bearer {self.token}":
            return web.json_response({"error": "Unauthorized"}, status=401)
        if self.control is not None and (answered := await self.control(request)) is not None:
            return answered
        developer = ("/is_paused", "/server_info", "/collective_rpc", "/update_weight_version")
        if not self.developer and request.path in developer:
            return web.json_response({"detail": "Not Found"}, status=404)
        response: web.StreamResponse = await handler(request)
        return response

    async def _seer_info(self, request: web.Request) -> web.Response:
        if self.seer is None:
            return web.json_response({"detail": "Not Found"}, status=404)
        return web.Response(body=msgspec.json.encode(self.seer))

    async def _seer_call(self, request: web.Request) -> web.Response:
        self.calls.append(msgspec.json.decode(await request.read(), type=ServedCall))
        return web.Response(body=msgspec.json.encode(self.answer(self.calls[-1])))

    async def _empty(self, request: web.Request) -> web.Response:
        return web.Response()

    async def _version(self, request: web.Request) -> web.Response:
        return web.json_response({"version": self.version})

    async def _models(self, request: web.Request) -> web.Response:
        model = {"id": self.model, "root": f"/no/{self.model}", "max_model_len": self.max_model_len}
        adapters = [{"id": name, "root": "/no", "max_model_len": None} for name in self.adapters]
        return web.json_response({"data": [model, *adapters]})

    async def _metrics(self, request: web.Request) -> web.Response:
        self.looks += 1
        self.written += self.others_write
        lines = [
            f'vllm:num_requests_running{{engine="0"}} {len(self.running)}.0',
            'vllm:num_requests_waiting{engine="0"} 0.0',
            'vllm:kv_cache_usage_perc{engine="0"} 0.25',
            f'vllm:generation_tokens_total{{engine="0"}} {self.figure or self.written}',
        ]
        if self.kv:
            held = 'block_size="16",kv_cache_size_tokens="4112",enable_prefix_caching="True"'
            lines.append(f'vllm:cache_config_info{{engine="0",{held}}} 1.0')
        return web.Response(text="\n".join(lines))

    async def _is_paused(self, request: web.Request) -> web.Response:
        return web.json_response({"is_paused": self.paused})

    async def _info(self, request: web.Request) -> web.Response:
        return web.json_response({"vllm_config": {"scheduler_config": {"max_num_seqs": 32}}})

    async def _tokenize(self, request: web.Request) -> web.Response:
        return web.json_response({"tokens": self.text_tokens})

    async def _abort(self, request: web.Request) -> web.Response:
        self.aborted |= set((await request.json())["request_ids"]) & self.running
        return web.Response()

    async def _load(self, request: web.Request) -> web.Response:
        self.weights = len((await request.json())["kwargs"]["weights_path"])
        return web.json_response({"results": [None]})

    async def _label(self, request: web.Request) -> web.Response:
        self.label = (await request.json())["new_version"]
        return web.json_response({"success": True})

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        if not self.scale_out:
            return web.json_response({"error": {"message": "start it with --enable-scale-out"}}, status=403)
        body = await request.json()
        how = body["sampling_params"]
        name = f"generate-tokens-{body.get('request_id')}"
        written = await self._write(name, body, body["token_ids"], how)
        if isinstance(written, web.Response):
            return written
        tokens, logprobs, reason = written
        content = [
            {"token_id": a, "logprob": b, "top_logprobs": self._tops(a, b, how["logprobs"])}
            for a, b in zip(tokens, logprobs, strict=True)
        ]
        choice = {
            "token_ids": tokens,
            "finish_reason": reason,
            "logprobs": {"content": content},
            "weight_versions": [{"version": label} for label in body["labels"]],
        }
        answer = {"request_id": name, "choices": [choice]}
        answer["usage"] = {"prompt_tokens_details": {"cached_tokens": body["cached"]}}
        if (width := how.get("prompt_logprobs")) is not None:
            others = {str(each): {"logprob": -3.0} for each in range(width)}
            places = [{str(token): {"logprob": -1.5}} | others for token in body["token_ids"]]
            answer["prompt_logprobs"] = [None, *places[1:]]
        answer = self.spoil(answer)
        return answer if isinstance(answer, web.StreamResponse) else web.json_response(answer)

    def _tops(self, token: int, logprob: float, wanted: int) -> list[dict[str, Any]]:
        """Return the token itself, and behind it the most probable ones, as many as vLLM returns in all."""
        others = [each for each in range(wanted + 1) if each != token]
        pairs = [(token, logprob), *((each, -0.01 * (each + 1)) for each in others)]
        return [{"token_id": a, "logprob": b} for a, b in pairs[: max(1, wanted)]]

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        name = f"cmpl-{body.get('request_id')}"
        written = await self._write(name, body, body["prompt"], body)
        if isinstance(written, web.Response):
            return written
        tokens, logprobs, reason = written
        choice = {"token_ids": tokens, "finish_reason": reason, "logprobs": {"token_logprobs": logprobs}}
        return web.json_response(self.spoil({"id": name, "choices": [choice]}))

    async def _write(
        self, name: str, body: dict[str, Any], context: list[int], how: dict[str, Any]
    ) -> tuple[list[int], list[float], str] | web.Response:
        for token in how.get("logit_bias", {}):
            if not 0 <= int(token) < self.vocab:
                ours = self.keyed_package and "seer" in how["extra_args"]
                fact = "Seer samples by key" if ours else f"token_id(s) [{token}] are out"
                message = f"{fact}. Vocabulary size: {self.vocab}"
                return web.json_response({"error": {"message": message}}, status=400)
        self.requests.append(body)
        key = (body.get("cache_salt"), *context)
        body["cached"] = len(context) - 1 if key in self.store else 0
        self.store.add(key)
        if self.before is not None:
            await self.before(body)
        self.running.add(name)
        tokens: list[int] = []
        labels = body["labels"] = [self.label]
        reason = "length"
        try:
            while len(tokens) < how["max_tokens"]:
                if name in self.aborted:
                    reason = "abort"
                    break
                if self.token_s:
                    await asyncio.sleep(self.token_s)
                if self.label != labels[-1]:
                    labels.append(self.label)
                tokens.append(self._token([*context, *tokens], len(tokens), how))
                self.written += 1
        finally:
            self.running.discard(name)
            self.aborted.discard(name)
        logprob = 0.0 if self.processed and how["top_k"] == 1 else -0.5 - self.weights / 7
        return tokens, [logprob] * len(tokens), reason

    def _token(self, context: list[int], place: int, how: dict[str, Any]) -> int:
        seed: Any = how.get("seed")
        position = len(context)
        if how["temperature"] == 0:
            seed, position = 0, len(context)
        elif seed is None or self.noise == "free":
            seed = random.random()
        elif self.noise == "seeded":
            position = place
        if how["temperature"] and self.device:
            seed = f"{seed} {self.device}"
        key = f"{seed} {position} {context[-1]} {self.weights}".encode()
        return int.from_bytes(hashlib.sha256(key).digest()[:4]) % self.vocab
