"""SkyRL keeps its servers: its client at the address of Seer, in front of two real vLLM servers.

A prompt and a seed have the tokens that one of the servers alone gives them, also after other weights, an
adapter, and sleep.
"""

from __future__ import annotations

import asyncio
import re
import sys
from functools import partial

import aiohttp
import httpx
import pytest
from skyrl.backends.skyrl_train.inference_servers.remote_inference_client import RemoteInferenceClient

from backends.tests.peft_files import RANK, adapter_of, save
from tests.soak.real_servers import server_processes, two_checkpoints
from tests.support.patience import PATIENCE_S

pytestmark = [pytest.mark.engine, pytest.mark.long, pytest.mark.filterwarnings("ignore")]

TOKEN = "a-secret-of-these-tests"
FRONT = """
[seer]
engine = "remote"
plugins = ["divided_rollout", "context_sched"]
[engine.remote]
urls = URLS
[plugin.divided_rollout]
chunk_tokens = CHUNK
"""
CHUNK = 16
MAIN = "from seer_main import main; main()"
PROMPTS = [[3 + (7 * i + j) % 90 for j in range(12)] for i in range(6)]
SAMPLING = {
    "min_tokens": 1,
    "skip_special_tokens": True,
    "include_stop_str_in_output": True,
    "max_tokens": 96,
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "logprobs": 1,
    "stop": None,
    "seed": 5,
}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    return two_checkpoints(tmp_path_factory.mktemp("checkpoints"))


@pytest.fixture(scope="module")
def pair(checkpoints, tmp_path_factory):
    """Two servers as SkyRL starts them, which take adapters, and sample by key."""
    folder = tmp_path_factory.mktemp("pair")
    flags = ["--enable-scale-out", "--enable-prompt-tokens-details", "--max-num-batched-tokens=256"]
    flags += ["--enable-lora", f"--max-lora-rank={max(8, RANK)}", "--served-model-name=policy"]
    variables = {"SEER_KEYED_SAMPLING": "1", "VLLM_PLUGINS": "seer", "VLLM_SERVER_DEV_MODE": "1"}
    variables |= {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True"}
    servers = [
        server_processes.vllm_server(folder, checkpoints[0], folder / f"log-{number}", *flags, **variables)
        for number in range(2)
    ]
    for server in servers:
        server.start()
    for server in servers:
        server.await_ready()
    yield servers
    for server in servers:
        server.close()


@pytest.fixture(scope="module")
def address(pair, tmp_path_factory):
    """The address of ``seer serve`` in front of both, with its token as a password."""
    folder = tmp_path_factory.mktemp("front")
    urls = ", ".join(f'"{server.url}"' for server in pair)
    (folder / "front.toml").write_text(FRONT.replace("URLS", f"[{urls}]").replace("CHUNK", str(CHUNK)))
    (folder / "token.txt").write_text(TOKEN)
    (folder / "token.txt").chmod(0o600)
    command = [sys.executable, "-c", MAIN, "serve", str(folder / "front.toml")]
    command += ["--token-file", str(folder / "token.txt")]
    front = server_processes.ServerProcess(command, {}, folder / "log")
    front.start()
    front.await_ready()
    yield front.url.replace("http://", f"http://any:{TOKEN}@")
    front.close()


@pytest.fixture
def ask(address, pair):
    """Return a function that gives a client to a coroutine: Seer's, or that of one server alone."""

    def run(story, *, of_one=False):
        url = pair[0].url if of_one else address
        return asyncio.run(with_client(url, story))

    return run


async def with_client(url, story):
    client = RemoteInferenceClient(url, [url], data_parallel_size=1, model_name="policy")
    try:
        return await story(client)
    finally:
        await client.teardown()


async def alone_on(server, model=None):
    """Return the answers of one server, without Seer."""
    return await with_client(server.url, partial(rollout, model=model))


async def rollout(client, model=None, **more):
    """Return the answers to the prompts."""
    return await client.generate(
        {"prompt_token_ids": PROMPTS, "sampling_params": SAMPLING} | more, model=model
    )


def require_same(found, wanted):
    """Require the same tokens, texts and ends, and log-probs that differ by rounding alone."""
    for name in ("response_ids", "responses", "stop_reasons"):
        assert found[name] == wanted[name]
    for mine, theirs in zip(found["response_logprobs"], wanted["response_logprobs"], strict=True):
        assert mine == pytest.approx(theirs, abs=1e-4)


def kept_trajectories(address):
    [line] = re.findall(r"^seer_trajectories (.*)$", httpx.get(f"{address}/metrics").text, re.M)
    return float(line)


def test_responses_over_both_servers_are_those_of_one_alone(ask):
    async def over_both(client):
        assert await client.get_world_size() == (2, 2)
        return await rollout(client), await rollout(client, cache_salt="2")

    async def alone(client):
        assert await client.get_world_size() == (1, 1)
        return await rollout(client)

    wanted = ask(alone, of_one=True)
    for found in ask(over_both):
        require_same(found, wanted)
    assert max(map(len, wanted["response_ids"])) > CHUNK, "no response has a second chunk"


def test_a_session_of_an_agent_loop_is_kept_until_it_is_finished(ask, address):
    sessions = [f"trajectory_{number}" for number in range(len(PROMPTS))]

    async def loops(client):
        await rollout(client, session_ids=sessions)
        assert kept_trajectories(address) == len(sessions)
        for each in (*sessions, "of another router"):
            await client.finish_session(each)
        assert kept_trajectories(address) == 0

    ask(loops)


def test_new_weights_reach_both_servers_and_no_response_is_of_two(ask, checkpoints, pair):
    async def step(client):
        found = []
        for folder in (checkpoints[1], checkpoints[0]):
            await client.pause_generation()
            kwargs = {"weights_path": str(folder)}
            body = {"method": "reload_weights", "kwargs": kwargs}
            await client._call_all_servers("/collective_rpc", body)
            await client.reset_prefix_cache()
            await client.resume_generation()
            found.append((await rollout(client), *[await alone_on(each) for each in pair]))
        return found

    (other, *others), (first, *firsts) = ask(step)
    for found, wanted in ((other, others), (first, firsts)):
        for each in wanted:
            require_same(found, each)
    assert other["response_ids"] != first["response_ids"]


def test_requests_wait_while_the_servers_sleep(ask):
    async def colocated(client):
        before = await rollout(client)
        await client.sleep(level=0)
        waiting = asyncio.ensure_future(rollout(client))
        await client.wake_up(tags=["scheduling"])
        return before, await waiting

    before, after = ask(colocated)
    require_same(after, before)


def test_an_adapter_is_loaded_by_both_servers_in_place_of_the_one_before(
    ask, address, checkpoints, pair, tmp_path
):
    folders = [tmp_path / f"adapter-{number}" for number in range(2)]
    for number, folder in enumerate(folders):
        save(folder, adapter_of(checkpoints[0], number))

    async def steps(client):
        with pytest.raises(aiohttp.ClientResponseError, match="404"):  # a route of SkyRL's own servers
            await client.load_lora_adapter("tuned", str(folders[0]))
        plain, found = await rollout(client), []
        for number, folder in enumerate(folders):
            body = {"lora_name": "tuned", "lora_path": str(folder), "load_inplace": number > 0}
            httpx.post(f"{address}/v1/load_lora_adapter", json=body, timeout=PATIENCE_S).raise_for_status()
            await client.reset_prefix_cache()
            found.append(await rollout(client, model="tuned"))
            require_same(found[-1], await alone_on(pair[1], model="tuned"))
        return plain, *found

    plain, first, second = ask(steps)
    assert len({str(each["response_ids"]) for each in (plain, first, second)}) == 3
