"""TRL's own client at the address of Seer, before stand-ins."""

from functools import partial

import pytest
from aiohttp import web
from seer_host.config_files import make_config
from seer_server import make_app
from seer_session.runtime import Runtime

from tests.support.installed import skip_without

pytestmark = pytest.mark.filterwarnings("ignore")  # TRL imports what it finds, vLLM too, which warns of much
skip_without("vllm", reason="vLLM is not installed: `make setup` installs it")
skip_without("trl")

TOKEN = "a-secret-of-these-tests"
PROMPTS = [[3 + (7 * i + j) % 90 for j in range(12)] for i in range(3)]


@pytest.fixture
def calls():
    return []


@pytest.fixture
def front(fake, serving, tmp_path, calls):
    """The address of Seer, with the token in it as TRL sends it."""
    fakes = [fake() for _ in range(2)]

    async def control(request):
        match request.path:
            case "/get_world_size":
                return web.json_response({"world_size": 1})
            case "/server_info":
                modes = {"model_config": {"logprobs_mode": "processed_logprobs"}}
                weights = {"weight_transfer_config": {"backend": "nccl"}}
                return web.json_response({"vllm_config": modes | weights})
            case "/reset_prefix_cache":
                return web.json_response({"success": True})
            case "/start_weight_update" | "/update_weights" | "/finish_weight_update":
                if request.method == "POST":
                    calls.append((request.path, await request.json()))
                return web.json_response({}, status=200 if request.method == "POST" else 405)
        return None

    for each in fakes:
        each.control = control
    config = make_config(
        {
            "seer": {"engine": "remote", "plugins": ["divided_rollout", "context_sched"]},
            "plugin": {"divided_rollout": {"chunk_tokens": 16}},
            "engine": {"remote": {"urls": [each.url for each in fakes]}},
        },
        base_dir=tmp_path,
        origin="a test",
    )
    with serving.Served(make_app(partial(Runtime.from_config, config), token=TOKEN)) as served:
        yield served.url.replace("http://", f"http://trl:{TOKEN}@")


def test_the_client_generates_and_sends_weights(front, calls):
    from trl.generation import vllm_client

    client = vllm_client.VLLMClient(base_url=front)
    found = client.generate(PROMPTS, n=2, max_tokens=40, generation_kwargs={"seed": 5})
    assert found["prompt_ids"] == PROMPTS
    assert [len(each) for each in found["completion_ids"]] == [40] * 6
    assert [[place[0] for place in each] for each in found["logprob_token_ids"]] == found["completion_ids"]
    assert client.get_world_size() == 2
    assert client.get_server_info()["weight_transfer_config"] == {"backend": "nccl"}
    client.reset_prefix_cache()
    with client.weight_update():
        client._post(f"{client.base_url}/update_weights", json={"update_info": {"names": ["a"]}})
    update = ["/start_weight_update", "/update_weights", "/finish_weight_update"]
    assert [path for path, _ in calls] == [path for path in update for _ in range(2)]
    assert client.generate(PROMPTS, n=2, max_tokens=40, generation_kwargs={"seed": 5}) == found
