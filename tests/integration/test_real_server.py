"""The server on real vLLM: two instances, OpenAI's client and ours, the library's tokens."""

import asyncio
import json
import os
import warnings
from collections import defaultdict
from functools import partial
from pathlib import Path
from unittest.mock import patch

import pytest
from seer_session import Runtime, load_config

from seer_core.ports.policy import Observer
from tests.support.eventually import aeventually
from tests.support.installed import skip_without

CONTROLS = {
    "stop": [" be", "the an", "."],
    "min_tokens": 3,
    "min_p": 0.01,
    "presence_penalty": 0.2,
    "repetition_penalty": 1.05,
    "top_k": 40,
}
EXAMPLE = Path(__file__).parents[2] / "examples" / "tiny_reasoner"

pytestmark = pytest.mark.engine
skip_without("vllm", reason="vLLM is not installed: `make setup` installs it")


class Completed(Observer):
    """An observer that keeps the completions."""

    def __init__(self):
        self.completions = []

    def observe(self, now, event, commands): ...

    def completed(self, now, completion):
        self.completions.append(completion)


def test_clients_of_the_server_get_the_tokens_of_the_library():
    import httpx
    import openai
    import uvicorn
    from pydantic import TypeAdapter
    from safetensors.torch import load_file
    from seer_client import Client, ClientError
    from seer_server import make_app

    with warnings.catch_warnings(), patch.dict(os.environ):  # or engines would have vLLM's variables
        warnings.simplefilter("ignore")  # vLLM's own imports
        from vllm.entrypoints.scale_out.token_in_token_out.protocol import GenerateResponse

    lines = (EXAMPLE / "prompts.jsonl").read_text("utf-8").splitlines()[:3]
    prompts = [json.loads(line)["prompt"] for line in lines]
    overrides = ["engine.vllm.start_timeout_s=600", "plugin.divided_rollout.chunk_tokens=32"]
    config = load_config(EXAMPLE / "demo.toml", overrides, without=["grouped_spec"])
    alone = load_config(
        EXAMPLE / "demo.toml", [*overrides, "engine.vllm.instances=1"], without=["grouped_spec"]
    )
    records = [
        {"prompt": prompt, "n": 2, "max_tokens": 96, "group_id": f"g{number}"}
        for number, prompt in enumerate(prompts)
    ]
    chats = [
        {"messages": [{"role": "user", "content": prompts[0]}], "n": 2, "max_tokens": 32, "group_id": "c"}
    ]
    controlled = [
        {"prompt": prompts[1], "n": 4, "max_tokens": 96, "group_id": f"s{number}", **CONTROLS, "seed": 7}
        for number in range(2)  # one is asked for as a whole, and one as a stream
    ]
    found, streamed, reasons, first_prompt = {}, [], {}, []
    watch = Completed()
    watched = watch.completions

    async def roll_out():
        async with Runtime.from_config(alone) as runtime:
            every = runtime.groups(records + chats + controlled, iteration=0)
            first_prompt.extend(every[-1].prompt_token_ids)
            return await runtime.rollout(every).wait()

    def ask(client, number):
        asked = {"model": "seer", "prompt": prompts[number], "n": 2, "max_tokens": 96}
        more = {"return_token_ids": True, "group": f"g{number}"}
        if number:
            answer = client.completions.create(**asked, extra_body=more)
            for each in answer.choices:
                found[f"g{number}/{each.index}"] = (each.token_ids, each.text)
            return
        tokens, texts = [[], []], ["", ""]
        for piece in client.completions.create(**asked, extra_body=more, stream=True):
            (each,) = piece.choices
            streamed.append(len(each.token_ids))
            tokens[each.index] += each.token_ids
            texts[each.index] += each.text
        found.update({f"g0/{index}": (tokens[index], texts[index]) for index in range(2)})
        more = {"return_token_ids": True, "group": "c"}
        asked = {"model": "seer", "messages": chats[0]["messages"], "n": 2, "max_tokens": 32}
        for each in client.chat.completions.create(**asked, extra_body=more).choices:
            found[f"c/{each.index}"] = (each.token_ids, each.message.content)

    def ask_controlled(client):
        extra = {name: value for name, value in CONTROLS.items() if name not in ("stop", "presence_penalty")}
        plain = {"stop": CONTROLS["stop"], "presence_penalty": CONTROLS["presence_penalty"], "seed": 7}
        asked = {"model": "seer", "prompt": prompts[1], "n": 4, "max_tokens": 96, **plain}
        for number in range(2):
            more = {"return_token_ids": True, "group": f"s{number}", **extra}
            tokens, texts = defaultdict(list), defaultdict(str)
            answer = client.completions.create(**asked, extra_body=more, stream=bool(number))
            for each in answer if number else [answer]:
                for choice in each.choices:
                    name = f"s{number}/{choice.index}"
                    tokens[name] += choice.token_ids
                    texts[name] += choice.text
                    reasons[name] = choice.stop_reason
            found.update({name: (tokens[name], texts[name]) for name in tokens})

    def ask_for_tokens(url):
        """Ask as clients of vLLM's own route do, and read the answer by vLLM's own schema."""
        [first] = [each for each in result.completions if each.request_id == "s0/0"]
        body = {
            "token_ids": first_prompt,
            "sampling_params": {**CONTROLS, "n": 4, "max_tokens": 96, "seed": 7, "logprobs": 1},
            "group": "s0",
            "output_mode": "text",
        }
        answer = httpx.post(f"{url}/inference/v1/generate", json=body, timeout=240)
        assert answer.status_code == 200, answer.text
        for choice in TypeAdapter(GenerateResponse).validate_json(answer.content).choices:
            assert (choice.token_ids, choice.text) == found[f"s0/{choice.index}"]
            assert choice.stop_reason == reasons[f"s0/{choice.index}"]
            if choice.index == 0:
                logprobs = [each.logprob for each in choice.logprobs.content]
                assert logprobs == pytest.approx(list(first.logprobs), abs=1e-4)

    def ask_for_scores(url):
        """Ask for log-likelihoods as lm-eval does: of what the library has drawn, as if it were a prompt."""
        written = [each for each in result.completions if each.group_id == "s0"]
        body = {
            "model": "seer",
            "prompt": [[*first_prompt, *each.token_ids] for each in written],
            "temperature": 0,
            "max_tokens": 1,
            "logprobs": 1,
            "seed": 1234,
            "echo": True,
        }
        answer = httpx.post(f"{url}/v1/completions", json=body, timeout=240)
        assert answer.status_code == 200, answer.text
        greedy = set()
        for choice, each in zip(answer.json()["choices"], written, strict=True):
            scores = choice["logprobs"]["token_logprobs"]
            assert scores[0] is None
            assert scores[len(first_prompt) : -1] == pytest.approx(list(each.logprobs), abs=1e-4)
            for score, top in zip(scores[1:], choice["logprobs"]["top_logprobs"][1:], strict=True):
                assert score in top.values()
                greedy.add(score == max(top.values()))
            assert scores[-1] == max(choice["logprobs"]["top_logprobs"][-1].values())
        assert greedy == {True, False}
        alone = httpx.post(f"{url}/v1/completions", json={**body, "max_tokens": 0}, timeout=240).json()
        for with_one, without in zip(answer.json()["choices"], alone["choices"], strict=True):
            assert without["logprobs"]["tokens"] == with_one["logprobs"]["tokens"][:-1]
            assert with_one["text"].startswith(without["text"])

    def take_turns(url):
        """Take turns as an agent does; the second one finds the KV of the first, and ids change no token."""
        prompt, ids = first_prompt, {"trajectory": "agent", "group": "task"}
        for number in range(3):
            turns = []
            for more in (ids, {}):
                body = {"token_ids": prompt, "sampling_params": {"max_tokens": 96, "seed": 5}, **more}
                answer = httpx.post(f"{url}/inference/v1/generate", json=body, timeout=240)
                assert answer.status_code == 200, answer.text
                turns.append(answer.json()["choices"][0]["token_ids"])
            assert turns[0] == turns[1]
            chunk = watched[-2].chunks[0]
            found = chunk.cached_tokens + chunk.pool_tokens
            print(f"turn {number}: {found} of {len(prompt)} tokens found, {chunk.prefilled_tokens} prefilled")
            assert number == 0 or chunk.prefilled_tokens <= 64
            assert found + chunk.prefilled_tokens == len(prompt)
            prompt = [*prompt, *turns[0], *first_prompt[:20]]
        assert len({each.chunks[0].instance for each in watched[-6::2]}) == 1
        answer = httpx.delete(f"{url}/v1/groups/task", timeout=240)
        assert answer.json() == {"ended": 1}

    def train(url):
        """Hand in all as a batch, with the first weights, with others, and with the first again."""
        weights = load_file(EXAMPLE / "weights" / "model.safetensors")
        other = weights | {"model.norm.weight": -weights["model.norm.weight"]}
        with Client(url) as client:
            batches = [list(client.rollout(records + chats))]
            assert client.share_weights(other.items()) == 1
            batches.append(list(client.rollout(records + chats, weight_version=1)))
            with pytest.raises(ClientError, match="version"):
                list(client.rollout(records, weight_version=0))
            client.sleep()
            client.wake()
            assert client.send_weights(weights.items()) == 2
            batches.append(list(client.rollout(records + chats)))
        assert [{each.weight_version for each in batch} for batch in batches] == [{0}, {1}, {2}]
        return [{each.request_id: (list(each.token_ids), each.text) for each in batch} for batch in batches]

    async def serve():
        app = make_app(partial(Runtime.from_config, config), observers=[watch])
        server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning", lifespan="on"))
        serving = asyncio.create_task(server.serve())
        await aeventually(lambda: server.started or serving.done())
        assert not serving.done(), "the server did not start"
        port = server.servers[0].sockets[0].getsockname()[1]
        url = f"http://127.0.0.1:{port}"
        with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=240) as client:
            await asyncio.gather(*(asyncio.to_thread(ask, client, number) for number in range(len(prompts))))
            await asyncio.to_thread(ask_controlled, client)
        await asyncio.to_thread(ask_for_tokens, url)
        await asyncio.to_thread(ask_for_scores, url)
        await asyncio.to_thread(take_turns, url)
        batches = await asyncio.to_thread(train, url)
        server.should_exit = True
        await serving
        return batches

    result = asyncio.run(asyncio.wait_for(roll_out(), 280))
    first, other, again = asyncio.run(asyncio.wait_for(serve(), 280))
    wanted = {each.request_id: (list(each.token_ids), each.text) for each in result.completions}
    assert len(wanted) == 16
    assert found == wanted
    assert {
        each.request_id: each.stop_reason for each in result.completions if each.group_id[0] == "s"
    } == reasons
    assert " be" in reasons.values()
    assert not any(
        stop in text for name, (_, text) in wanted.items() if name[0] == "s" for stop in CONTROLS["stop"]
    )
    wanted = {name: each for name, each in wanted.items() if name[0] != "s"}
    chunks = [len(each.chunks) for each in result.completions if each.group_id == "g0"]
    assert len(streamed) > sum(chunks)
    assert first == again == wanted
    assert all(other[name] != wanted[name] for name in wanted)
