"""The client of SkyRL's trainer to its servers, as small as it can be, for where SkyRL is not installed.

Paths, bodies and queries are those of its ``RemoteInferenceClient`` at a956457.
"""

import asyncio
from dataclasses import dataclass
from typing import Any

import aiohttp


@dataclass
class RemoteInferenceClient:
    proxy_url: str
    server_urls: list
    data_parallel_size: int
    model_name: str = "default"
    _session: Any = None

    async def _ask(self, url, method="POST", **more):
        if self._session is None:
            self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None))
        async with self._session.request(method, url, **more) as answer:
            answer.raise_for_status()
            return await answer.json() if answer.content_length else None

    async def _call_all_servers(self, endpoint, json=None, method="POST", params=None):
        asked = [self._ask(f"{url}{endpoint}", method, json=json, params=params) for url in self.server_urls]
        bodies = await asyncio.gather(*asked)
        return {url: {"body": body} for url, body in zip(self.server_urls, bodies, strict=True)}

    async def _generate_single(self, tokens, sampling_params, session_id, model, cache_salt):
        asked = {"sampling_params": sampling_params, "model": model, "token_ids": tokens}
        if cache_salt is not None:
            asked["cache_salt"] = cache_salt
        headers = {"X-Session-ID": str(session_id)} if session_id else {}
        url = f"{self.proxy_url}/inference/v1/generate"
        [choice] = (await self._ask(url, json=asked, headers=headers))["choices"]
        text = await self._ask(
            f"{self.proxy_url}/detokenize", json={"model": self.model_name, "tokens": choice["token_ids"]}
        )
        return choice, text["prompt"]

    async def generate(self, input_batch, model=None):
        prompts, sampling_params = input_batch["prompt_token_ids"], input_batch["sampling_params"]
        sessions = input_batch.get("session_ids") or [None] * len(prompts)
        model, salt = model or self.model_name, input_batch.get("cache_salt")
        found = await asyncio.gather(
            *(
                self._generate_single(prompt, sampling_params, session, model, salt)
                for prompt, session in zip(prompts, sessions, strict=True)
            )
        )
        return {
            "responses": [text for _, text in found],
            "response_ids": [choice["token_ids"] for choice, _ in found],
            "stop_reasons": [choice["finish_reason"] for choice, _ in found],
            "response_logprobs": [
                [place["logprob"] for place in choice["logprobs"]["content"]] for choice, _ in found
            ],
        }

    async def finish_session(self, session_id):
        await self._ask(f"{self.proxy_url}/finish_session", params={"session_id": session_id})

    async def pause_generation(self, clear_cache=False):
        params = {"mode": "keep", "clear_cache": str(clear_cache).lower()}
        return await self._call_all_servers("/pause", params=params)

    async def resume_generation(self):
        return await self._call_all_servers("/resume")

    async def sleep(self, level=2, tags=None):
        params = {"level": str(level)} | ({"tags": tags} if tags else {})
        return await self._call_all_servers("/sleep", params=params)

    async def wake_up(self, tags=None):
        return await self._call_all_servers("/wake_up", params={"tags": tags} if tags else {})

    async def reset_prefix_cache(self, reset_running_requests=False):
        body = {"reset_running_requests": reset_running_requests}
        return await self._call_all_servers("/reset_prefix_cache", body)

    async def load_lora_adapter(self, lora_name, lora_path):
        body = {"lora_name": lora_name, "lora_path": lora_path}
        return await self._call_all_servers("/skyrl/v1/load_lora_adapter", body)

    async def get_world_size(self):
        answers = await self._call_all_servers("/get_world_size", {}, method="GET")
        [each] = {answer["body"]["world_size"] for answer in answers.values()}
        return each * len(self.server_urls) // self.data_parallel_size, each

    async def teardown(self):
        await self._session.close()
