"""The server on real vLLM: two instances, OpenAI's client, the library's tokens."""

import asyncio
import json
from functools import partial
from pathlib import Path

import pytest

from seer_core import Runtime, load_config

EXAMPLE = Path(__file__).parents[2] / "examples" / "tiny_reasoner"

pytestmark = pytest.mark.engine
pytest.importorskip("vllm", reason="vLLM is not installed: `make setup` installs it")


def test_clients_of_the_server_get_the_tokens_of_the_library():
    import openai
    import uvicorn
    from seer_server import make_app

    lines = (EXAMPLE / "prompts.jsonl").read_text("utf-8").splitlines()[:3]
    prompts = [json.loads(line)["prompt"] for line in lines]
    overrides = ["engine.vllm.start_timeout_s=600", "plugin.divided_rollout.chunk_tokens=32"]
    config = load_config(EXAMPLE / "demo.toml", overrides, without=["grouped_spec"])
    records = [
        {"prompt": prompt, "n": 2, "max_tokens": 96, "group_id": f"g{number}"}
        for number, prompt in enumerate(prompts)
    ]
    found = {}

    async def roll_out():
        async with Runtime.from_config(config) as runtime:
            return await runtime.rollout(runtime.groups(records, iteration=0)).wait()

    def ask(url, number):
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=240)
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
            tokens[each.index] += each.token_ids
            texts[each.index] += each.text
        found.update({f"g0/{index}": (tokens[index], texts[index]) for index in range(2)})

    async def serve():
        app = make_app(partial(Runtime.from_config, config))
        server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning", lifespan="on"))
        serving = asyncio.create_task(server.serve())
        while not server.started:
            assert not serving.done(), "the server did not start"
            await asyncio.sleep(0.05)
        port = server.servers[0].sockets[0].getsockname()[1]
        url = f"http://127.0.0.1:{port}"
        await asyncio.gather(*(asyncio.to_thread(ask, url, number) for number in range(len(prompts))))
        server.should_exit = True
        await serving

    result = asyncio.run(asyncio.wait_for(roll_out(), 280))
    asyncio.run(asyncio.wait_for(serve(), 280))
    wanted = {each.request_id: (list(each.token_ids), each.text) for each in result.completions}
    assert len(wanted) == 6
    assert found == wanted
