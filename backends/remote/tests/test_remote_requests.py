"""Prompts that ask a server for more than tokens: what is passed on to a stand-in, and what is refused."""

from __future__ import annotations

import asyncio
from collections import Counter

import attrs
import pytest
from aiohttp import web
from fake_servers import Thread
from seer_host.tables import SeerTable
from seer_remote import handles
from seer_remote.handles import Handle, HandleRequest, of_actor
from seer_session import Runtime
from test_remote_faults import PROMPTS, refusal, responses, roll_out, runtime_of

from seer_core.errors import ConfigError, EngineError
from seer_core.model import Sampling
from seer_core.plugins.slots import Assembly, Strategies
from seer_core.scheduling.scheduler import Policies, Slot
from tests.support.eventually import aeventually


class Tens:
    """Chunks of ten tokens."""

    def split(self, request):
        return min(10, request.remaining_tokens)


async def divide(fleet, prompts):
    policies = attrs.evolve(Policies(), splitter=Slot("splitter", "mine", Tens()))
    async with Runtime(Assembly(fleet, Strategies(policies)), SeerTable()) as runtime:
        return await runtime.rollout(runtime.groups(prompts)).wait()


def sent(server):
    """The requests for the test's prompts, without those for tests of the server."""
    return [each for each in server.requests if each["token_ids"][:3] == [1, 2, 3]]


# Fields that Seer has none for.


def test_a_prompt_s_own_fields_go_to_the_server_with_each_chunk_and_its_own_come_back(fake, fleet_of):
    server = fake()
    server.spoil = lambda answer: (
        answer
        | {
            "choices": [answer["choices"][0] | {"routed_experts": "AAEC"}],
            "kv_transfer_params": None,
        }
    )
    features = {"mm_hashes": {"image": ["abc"]}, "mm_placeholders": {"image": [{"offset": 1, "length": 2}]}}
    attachments = {
        "features": features,
        "model": "an-adapter",
        "cache_salt": "mine",
        "sampling_params": {"skip_reading_prefix_cache": True},
    }
    prompt = PROMPTS[0] | {"n": 1, "attachments": attachments}
    result = asyncio.run(divide(fleet_of(server), [prompt]))
    assert len(sent(server)) == 4
    for each in sent(server):
        assert (each["features"], each["model"]) == (features, "an-adapter")
        assert each["cache_salt"].endswith(" mine")
        assert each["cache_salt"].startswith("seer-")
        assert each["sampling_params"]["skip_reading_prefix_cache"]
    [completion] = result.completions
    assert [chunk.attachments for chunk in completion.chunks] == [{"routed_experts": "AAEC"}] * 4


@pytest.mark.parametrize(
    ("attachments", "name"),
    [({"stream": True}, "stream"), ({"token_ids": [1]}, "token_ids"), ({"sampling_params": {"n": 2}}, "n")],
)
def test_fields_that_are_seer_s_are_refused_by_name(fake, fleet_of, attachments, name):
    prompt = PROMPTS[0] | {"n": 1, "attachments": attachments}
    found = refusal(fleet_of(fake()), prompts=[prompt])
    assert f"attachments name {name!r}, which Seer sends itself; leave it out" in found


def test_no_request_s_id_begins_with_another_s(fake, fleet_of):
    """With one of them SGLang would end the other, too."""
    server = fake()
    asyncio.run(divide(fleet_of(server), PROMPTS))
    names = {each["request_id"] for each in server.requests}
    assert len(names) == len(server.requests) > 20
    assert not any(name != other and other.startswith(name) for name in names for other in names)


# Controls that hold within one request.


def test_responses_whose_controls_hold_within_one_request_are_not_divided(fake, fleet_of):
    server = fake()
    prompts = [
        PROMPTS[0] | {"n": 1, "stop": ["x"]},
        PROMPTS[1] | {"n": 1, "structured_outputs": {"regex": "[a-z]+"}},
        PROMPTS[2] | {"n": 1, "presence_penalty": 0.5},
        PROMPTS[3] | {"n": 1},
    ]
    asyncio.run(divide(fleet_of(server), prompts))
    assert Counter(each["token_ids"][3] for each in sent(server)) == {4: 1, 5: 1, 6: 1, 7: 4}
    [stop, form, *_] = sorted(sent(server), key=lambda each: each["token_ids"][3])
    assert (stop["sampling_params"]["stop"], stop["sampling_params"]["detokenize"]) == (["x"], True)
    assert form["sampling_params"]["structured_outputs"] == {"regex": "[a-z]+"}


def test_one_whose_owner_ends_it_begins_anew(fake, fleet_of):
    server = fake(token_s=0.002)
    whole = responses(asyncio.run(roll_out(fleet_of(server), PROMPTS[:1])))

    async def play():
        async with runtime_of(fleet_of(server)) as runtime:
            server.requests.clear()
            rollout = runtime.rollout(runtime.groups([PROMPTS[0] | {"stop": ["x"]}]))
            await aeventually(lambda: server.running)
            server.aborted |= server.running
            return await rollout.wait()

    assert responses(asyncio.run(play())) == whole
    assert len(sent(server)) > 4


# Log-probs.


def test_a_prompt_s_own_log_probs_come_with_the_first_chunk(fake, fleet_of):
    server = fake()
    prompt = PROMPTS[0] | {"n": 1, "prompt_logprobs": 2}
    [completion] = asyncio.run(divide(fleet_of(server), [prompt])).completions
    found = completion.prompt_logprobs
    assert list(found.logprobs) == [-1.5, -1.5, -1.5]
    assert [token for token, _ in found.top_logprobs[2]] == [4, 0]
    assert ["prompt_logprobs" in each["sampling_params"] for each in sent(server)] == [True] + [False] * 3


def test_log_probs_after_temperature_and_cuts_are_refused_unless_the_user_takes_them(fake, fleet_of):
    server = fake(processed=True)
    plain = asyncio.run(roll_out(fleet_of(server)))  # for which they are the model's
    assert plain.summary.exactness == "exact"
    cut = Sampling(top_p=0.9)
    found = refusal(fleet_of(server, sampling=cut))
    assert "reports log-probs after temperature 1.0, top_p 0.9, top_k 0, not the model's; start it" in found
    asyncio.run(roll_out(fleet_of(server, sampling=cut, processed_logprobs=True)))


# Other lists of servers.


@pytest.fixture
def serve_router():
    """Return a function that serves a router's list at a path."""
    thread, runners = Thread(), []

    async def start(path, listed):
        async def answer(request):
            return web.json_response(listed())

        app = web.Application()
        app.add_routes([web.get(path, answer)])
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        runners.append(runner)
        return f"http://127.0.0.1:{runner.addresses[0][1]}"

    yield lambda path, listed: thread.call(start(path, listed))
    for runner in runners:
        thread.call(runner.cleanup())
    thread.stop()


@pytest.mark.parametrize("path", ["/workers", "/list_workers"])
def test_a_router_lists_servers_that_join_and_leave(fake, fleet_of, serve_router, path, monkeypatch):
    monkeypatch.setattr("seer_remote.fleet.LOOK_S", 0.05)
    servers = [fake(), fake()]
    urls = [servers[0].url]

    def listed():
        return {"urls": urls} if path == "/list_workers" else {"workers": [{"url": each} for each in urls]}

    fleet = fleet_of(router=serve_router(path, listed))

    async def play():
        async with runtime_of(fleet) as runtime:
            assert [engine.address for engine in fleet.engines] == urls
            urls.append(servers[1].url)
            await aeventually(lambda: set(runtime.alive) == {"remote-0", "remote-1"})
            del urls[0]
            await aeventually(lambda: set(runtime.alive) == {"remote-1"})

    asyncio.run(play())


def test_a_router_that_lists_nothing_is_named(fake, fleet_of):
    with pytest.raises(EngineError, match="does not list its servers"):
        fleet_of(router=fake().url)


class Object:
    """A server as an object, whose tokens follow from seed and place."""

    async def facts(self):
        return {
            "engine": "mine 1",
            "model": "tiny",
            "directory": "/no/tiny",
            "max_model_tokens": 512,
            "vocab_size": 96,
            "kv_tokens": 4096,
            "block_tokens": 16,
        }

    async def load(self):
        return {"running": 0, "waiting": 0, "kv_usage": 0.0}

    async def generate(self, request):
        tokens = list(request.token_ids)
        for _ in range(request.max_tokens):
            seed = request.seed if request.sampling["temperature"] else 0
            tokens.append(hash((seed, len(tokens), tokens[-1])) % 96)
        new = tokens[len(request.token_ids) :]
        return {"token_ids": new, "logprobs": [-2.5] * len(new), "ended": "length"}

    async def abort(self, request_ids):
        """Do nothing: each request is over at once."""


class Actor:
    """An actor as Ray has them: each method has ``remote``, whose answer is awaited."""

    def __init__(self):
        server = Object()

        async def generate(fields):
            return await server.generate(HandleRequest(**fields))

        for name in ("facts", "load", "abort"):
            setattr(self, name, type("Method", (), {"remote": staticmethod(getattr(server, name))}))
        self.generate = type("Method", (), {"remote": staticmethod(generate)})


def two_handles():
    return {"one": Object(), "two": of_actor(Actor())}


def test_servers_may_be_objects_such_as_a_framework_s_actors(fleet_of):
    assert isinstance(Object(), Handle)
    fleet = fleet_of(handles=f"{__name__}:two_handles")
    assert [engine.address for engine in fleet.engines] == ["handle://one", "handle://two"]
    divided = asyncio.run(divide(fleet, PROMPTS))
    whole = asyncio.run(roll_out(fleet_of(handles=f"{__name__}:two_handles")))
    assert responses(divided) == responses(whole)
    assert divided.summary.exactness == "exact"


class Remote:
    """A method of an actor: it begins when it is called, and a wait that ends does not end it."""

    def __init__(self, calls, name):
        self.calls, self.name = calls, name

    def remote(self, value):
        self.calls.append((self.name, value))
        return asyncio.get_running_loop().create_future()


def test_an_actor_is_asked_to_abort_a_chunk_that_is_not_wanted_any_more():
    calls = []
    actor = type("Actor", (), {name: Remote(calls, name) for name in ("generate", "abort")})

    async def play():
        request = HandleRequest("mine", [1], 8, 7, {}, "", 1, {})
        writing = asyncio.create_task(of_actor(actor).generate(request))
        await aeventually(lambda: calls)
        writing.cancel()
        await asyncio.gather(writing, return_exceptions=True)

    asyncio.run(play())
    assert [name for name, _ in calls] == ["generate", "abort"]
    assert calls[-1][1] == ["mine"]


def no_handles():
    return {"one": 1}


def raising():
    raise SystemExit(3)


@pytest.mark.parametrize(
    "name",
    ["no_such_module:make", "json", "json:loads_of", f"{__name__}:no_handles", f"{__name__}:raising"],
)
def test_a_function_that_returns_no_handles_is_refused(name):
    with pytest.raises(ConfigError, match=r"engine\.remote\.handles"):
        handles.load_handles(name)


# Figures.


async def started(fleet, work=None):
    async with runtime_of(fleet) as runtime:
        if work is not None:
            await work(runtime)
        return dict(runtime.alive)


def test_servers_that_share_kv_are_found_out_and_use_one_salt(fake, fleet_of):
    one, two = fake(), fake()
    apart = asyncio.run(started(fleet_of(one, two)))
    assert [info.fetch_s_per_token for info in apart.values()] == [None, None]
    assert all(info.step_s >= 0 and info.prefill_s_per_token >= 0 for info in apart.values())
    two.store = one.store

    async def roll(runtime):
        await runtime.rollout(runtime.groups(PROMPTS)).wait()

    together = asyncio.run(started(fleet_of(one, two), roll))
    infos = list(together.values())
    assert all(info.fetch_s_per_token is not None for info in infos)
    assert infos[0].kv_domain == infos[1].kv_domain
    assert len({each["cache_salt"] for each in [*sent(one)[-8:], *sent(two)[-8:]]}) == 1


@pytest.mark.parametrize("shared", [True, False])
def test_the_owner_may_say_whether_kv_is_shared(fake, fleet_of, shared):
    one, two = fake(), fake()
    if not shared:
        two.store = one.store
    infos = asyncio.run(started(fleet_of(one, two, shared_kv=shared))).values()
    assert {info.fetch_s_per_token is not None for info in infos} == {shared}
