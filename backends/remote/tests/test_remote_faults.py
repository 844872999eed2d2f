"""Servers that misbehave, against a stand-in in this process."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest
from aiohttp import web
from seer_host.tables import SeerTable
from seer_remote import fleet as fleet_module
from seer_remote import instance
from seer_remote.connection import Connection, Unreachable
from seer_session import Runtime
from seer_testing import EngineContract
from structlog.testing import capture_logs

from seer_core.errors import ConfigError, EngineError, PromptError
from seer_core.model import Sampling
from seer_core.plugins.slots import Assembly, Strategies
from seer_core.runtime.restarts import RestartsTable
from seer_core.scheduling.scheduler import Policies
from tests.support.eventually import aeventually

PROMPTS = [
    {"group_id": f"g{i}", "prompt_token_ids": [1, 2, 3, i + 4], "n": 4, "max_tokens": 40} for i in range(4)
]


def runtime_of(fleet, **settings):
    table = SeerTable(restarts=RestartsTable(attempts=2, backoff_s=0.0), **settings)
    return Runtime(Assembly(fleet, Strategies(Policies())), table)


async def roll_out(fleet, prompts=PROMPTS, **settings):
    async with runtime_of(fleet, **settings) as runtime:
        return await roll_out_in(runtime, prompts)


async def roll_out_in(runtime, prompts=PROMPTS):
    return await runtime.rollout(runtime.groups(prompts)).wait()


def responses(result):
    return {each.request_id: list(each.token_ids) for each in result.completions}


def refusal(fleet, **settings):
    with pytest.raises(EngineError) as error:
        asyncio.run(roll_out(fleet, **settings))
    return str(error.value)


class TestStandIn(EngineContract):
    """The dialect and the instance keep the contract over a server without an engine."""

    @pytest.fixture(autouse=True)
    def _servers(self, fake, fleet_of):
        servers = [fake(), fake()]
        self.make = lambda: fleet_of(*servers)


class TestCompletions(TestStandIn):
    """Also over OpenAI's route, where chunks cannot be ended early."""

    @pytest.fixture(autouse=True)
    def _servers(self, fake, fleet_of):
        servers = [fake(scale_out=False), fake(scale_out=False)]
        self.make = lambda: fleet_of(*servers)


def test_a_rollout_gives_the_same_on_one_server_and_on_two(fake, fleet_of):
    one, two = fake(), fake()
    alone = asyncio.run(roll_out(fleet_of(one)))
    both = asyncio.run(roll_out(fleet_of(one, two)))
    assert responses(alone) == responses(both)
    assert both.summary.exactness == "exact"
    assert {chunk.instance for each in both.completions for chunk in each.chunks} == {"remote-0", "remote-1"}


# Levels.


def test_a_server_whose_seed_repeats_its_noise_in_each_chunk_is_refused_by_default(fake, fleet_of):
    server = fake(noise="seeded")
    found = refusal(fleet_of(server))
    assert f"the server at {server.url} samples no better than 'reproducible'" in found
    assert "SEER_KEYED_SAMPLING=1" in found
    assert "require = 'reproducible'" in found


def test_it_serves_a_run_that_requires_less_with_a_seed_for_each_chunk(fake, fleet_of):
    server = fake(noise="seeded")
    result = asyncio.run(roll_out(fleet_of(server, require="reproducible")))
    assert result.summary.exactness == "reproducible"
    seeds = Counter(
        each["sampling_params"]["seed"] for each in server.requests if len(each["token_ids"]) == 4
    )
    assert set(seeds.values()) == {1}


def test_a_server_that_heeds_no_seed_is_sent_none(fake, fleet_of):
    server = fake(noise="free")
    assert "no better than 'distributed'" in refusal(fleet_of(server, require="reproducible"))
    server.requests.clear()
    result = asyncio.run(roll_out(fleet_of(server, require="distributed")))
    assert result.summary.exactness == "distributed"
    assert all(
        "seed" not in each["sampling_params"] for each in server.requests if len(each["token_ids"]) == 4
    )


TESTED = 17 + 13
"""Tokens of context of the second part of a test's response."""


def second_parts(server):
    """Return the contexts of the second parts that a server has written, with their seeds and lengths."""
    return [
        (tuple(each["token_ids"]), each["sampling_params"]["seed"], each["sampling_params"]["max_tokens"])
        for each in server.requests
        if len(each["token_ids"]) == TESTED
    ]


def test_the_second_part_of_a_test_s_response_is_written_by_another_server_too(fake, fleet_of):
    servers = fake(), fake(), fake()
    result = asyncio.run(roll_out(fleet_of(*servers)))
    assert result.summary.exactness == "exact"
    own = [{part for part in second_parts(each) if part[2] == 27} for each in servers]
    assert own[0] == own[1] == own[2] != set()
    others = Counter(part for each in servers for part in second_parts(each) if part[2] == 8)
    assert set(others) == {(context, seed, 8) for context, seed, _ in own[0]}
    assert set(others.values()) == {2}, "the first server in use has no other to ask"


def test_two_servers_that_draw_different_tokens_from_a_seed_are_not_exact_together(fake, fleet_of):
    one, two = fake(), fake(device=1)
    assert asyncio.run(roll_out(fleet_of(two))).summary.exactness == "exact"
    found = refusal(fleet_of(one, two))
    assert "draws other tokens from a seed than the one at" in found
    assert one.url in found
    assert two.url in found
    assert "require = 'reproducible'" in found


def test_servers_that_draw_differently_serve_a_run_that_requires_less(fake, fleet_of):
    one, two = fake(), fake(device=1)
    result = asyncio.run(roll_out(fleet_of(one, two, require="reproducible")))
    assert result.summary.exactness == "reproducible"
    assert Counter(each.finish_reason for each in result.completions) == {"length": 16}


def test_a_returning_server_is_compared_with_those_in_use_once_it_has_their_weights(fake, fleet_of):
    one, two = fake(), fake()
    fleet = fleet_of(one, two)

    async def play():
        async with runtime_of(fleet) as runtime:
            await runtime.weights_changed()
            for engine in fleet.engines:
                engine.most_pause_s = 0.0
            two.kill()
            await aeventually(lambda: "remote-1" not in runtime.alive)
            before = len(second_parts(one))
            two.revive()
            await aeventually(lambda: "remote-1" in runtime.alive)
            return second_parts(one)[before:]

    assert {length for _, _, length in asyncio.run(play())} == {8}


@pytest.mark.parametrize(
    ("servers", "require"),
    [
        ([{}], "exact"),
        ([{}, {}], "exact"),
        ([{"noise": "free"}] * 2, "distributed"),
        ([{}, {"device": 1}], "reproducible"),
    ],
    ids=["one alone", "two alike", "two that heed no seed", "two that draw differently"],
)
def test_new_weights_are_no_reason_for_another_test_where_no_server_can_be_compared(
    fake, fleet_of, servers, require
):
    fakes = [fake(**each) for each in servers]

    async def play():
        async with runtime_of(fleet_of(*fakes, require=require)) as runtime:
            before = [len(second_parts(each)) for each in fakes]
            for _ in range(2):
                await runtime.weights_changed()
            return before, [len(second_parts(each)) for each in fakes]

    before, after = asyncio.run(play())
    assert min(before) > 0
    assert after == before


@pytest.fixture
def listing(fleet_of, tmp_path):
    """Return a function that lists a server in a file; it returns the file and the fleet of its servers."""

    def listing(server):
        file = tmp_path / "servers"
        file.write_text(f"{server.url}\n")
        return file, fleet_of(urls_file="servers", base_dir=tmp_path)

    return listing


def test_a_server_that_joins_is_compared_with_one_that_has_joined(fake, listing):
    one, two, three = fake(), fake(), fake(device=1)
    file, fleet = listing(one)

    async def play():
        async with runtime_of(fleet) as runtime:
            file.write_text(f"{one.url}\n{two.url}\n")
            await aeventually(lambda: "remote-1" in runtime.alive)
            file.write_text(f"{two.url}\n")
            await aeventually(lambda: set(runtime.alive) == {"remote-1"})
            with capture_logs() as logs:
                file.write_text(f"{two.url}\n{three.url}\n")
                await aeventually(lambda: any(each["event"] == "server_not_joined" for each in logs))
            return [each["error"] for each in logs if each["event"] == "server_not_joined"]

    refused, *_ = asyncio.run(play())
    assert f"draws other tokens from a seed than the one at {two.url}" in refused


def test_a_server_that_is_just_joining_keeps_none_from_sleeping_and_joins_once_they_wake(fake, listing):
    one, two = fake(), fake(token_s=3600.0)  # whose test never ends
    file, fleet = listing(one)

    async def play():
        async with runtime_of(fleet) as runtime:
            file.write_text(f"{one.url}\n{two.url}\n")
            await aeventually(lambda: two.running, "the second server is tested")
            await runtime.sleep()
            await aeventually(lambda: not two.running, "its test is broken off")
            two.token_s = 0.0
            await runtime.wake()
            await aeventually(lambda: "remote-1" in runtime.alive)
            await roll_out_in(runtime)

    asyncio.run(play())


def test_a_server_that_joins_without_the_weights_of_the_others_is_looked_at_again_with_new_ones(
    fake, listing, monkeypatch
):
    monkeypatch.setattr(fleet_module, "FIRST_WAIT_S", 3600.0)
    one, two = fake(label="step 1"), fake()
    file, fleet = listing(one)

    async def play():
        async with runtime_of(fleet) as runtime:
            await runtime.weights_changed()
            file.write_text(f"{one.url}\n{two.url}\n")
            await aeventually(lambda: any(each["event"] == "server_not_joined" for each in logs))
            one.label = two.label = "step 2"
            await runtime.weights_changed()
            await aeventually(lambda: "remote-1" in runtime.alive)

    with capture_logs() as logs:
        asyncio.run(play())


@pytest.mark.parametrize("busy", ["refuses", "has no place"])
def test_a_server_that_cannot_be_compared_is_used_all_the_same(fake, fleet_of, monkeypatch, busy):
    """The other one may have gone meanwhile, or have too much to do; a warning says so."""
    monkeypatch.setattr(instance, "COMPARE_S", 0.0 if busy == "has no place" else 30.0)
    one, two = fake(), fake()

    async def before(body):
        if len(body["token_ids"]) == TESTED and body["sampling_params"]["max_tokens"] == 8:
            if busy == "has no place":
                await asyncio.Event().wait()
            raise web.HTTPTooManyRequests

    one.before = two.before = before
    with capture_logs() as logs:
        result = asyncio.run(roll_out(fleet_of(one, two)))
    assert result.summary.exactness == "exact"
    assert [each["event"] for each in logs].count("servers_not_compared") == 1


def test_exactness_is_tested_with_the_run_s_own_sampling(fake, fleet_of):
    server = fake()

    async def before(body):
        server.noise = "seeded" if body["sampling_params"]["top_p"] < 1 else "keyed"

    server.before = before
    assert asyncio.run(roll_out(fleet_of(server))).summary.exactness == "exact"
    found = refusal(fleet_of(server, sampling=Sampling(1.0, top_p=0.9)))
    assert "samples with top_p no better than 'reproducible'" in found


def test_a_prompt_s_own_sampling_is_tested_before_its_first_chunk(fake, fleet_of):
    server = fake()

    async def before(body):
        server.noise = "seeded" if body["sampling_params"]["top_p"] < 1 else "keyed"

    server.before = before
    prompts = [PROMPTS[0], PROMPTS[1] | {"top_p": 0.9}]
    result = asyncio.run(roll_out(fleet_of(server), prompts))
    assert Counter(each.finish_reason for each in result.completions) == {"length": 4, "error": 4}


KV = 'vllm:cache_config_info{block_size="%s",kv_cache_size_tokens="%s"} 1.0'


@pytest.mark.parametrize(
    ("path", "body", "reason"),
    [
        (
            "/v1/models",
            '{"data": [{"id": "a", "max_model_len": -1}]}',
            "Expected `int` >= 1 - at `$.data[0].",
        ),
        ("/v1/models", '{"data": [{"id": "a", ', "its answer to /v1/models is none: it ends within a value"),
        ("/v1/models", "", "its answer to /v1/models is none: it is empty"),
        ("/version", '{"version": "\\ud83d"}', "/version is none: \\ud83d is half of a character"),
        ("/metrics", KV % (0, 4112), "does not say how much KV it has"),
        ("/metrics", KV % (16, 3), "does not say how much KV it has"),
    ],
)
def test_a_server_that_describes_itself_as_none_can_be_is_named_for_that(fake, fleet_of, path, body, reason):
    async def control(request):
        return web.Response(text=body) if request.path == path else None

    server = fake(control=control)
    found = refusal(fleet_of(server))
    assert reason in found
    assert server.url in found


def test_a_limit_of_running_requests_that_can_be_none_is_left_out(fake, fleet_of):
    async def control(request):
        if request.path == "/server_info":
            return web.json_response({"vllm_config": {"scheduler_config": {"max_num_seqs": -1}}})
        return None

    result = asyncio.run(roll_out(fleet_of(fake(control=control))))
    assert responses(result) == responses(asyncio.run(roll_out(fleet_of(fake()))))


# Siblings.


@pytest.mark.parametrize(
    ("attribute", "value", "reason"),
    [
        ("model", "large", "has the model large, and the one at"),
        ("version", "0.33.0", "has the engine vLLM 0.33.0, and the one at"),
        ("max_model_len", 256, "has the longest context 256, and the one at"),
        ("vocab", 80, "has the vocabulary 80, and the one at"),
        ("text_tokens", [3, 2, 1], "have different tokenizers"),
        ("weights", 5, "serve other weights or other models"),
        ("label", "17", "'17'"),
    ],
)
def test_a_sibling_that_serves_something_else_is_refused_by_name(fake, fleet_of, attribute, value, reason):
    first, second = fake(), fake(**{attribute: value})
    found = refusal(fleet_of(first, second))
    assert reason in found
    assert first.url in found
    assert second.url in found


# Deaths and returns.


def test_a_server_that_dies_is_missed_and_taken_in_again_when_it_returns(fake, fleet_of):
    one, two = fake(token_s=0.005), fake(token_s=0.005)
    fleet = fleet_of(one, two)
    whole = responses(asyncio.run(roll_out(fleet_of(one, two))))

    async def play():
        async with runtime_of(fleet) as runtime:
            two.token_s = 60.0  # so that it ends no chunk
            rollout = runtime.rollout(runtime.groups(PROMPTS))
            await aeventually(lambda: two.running, "the second server runs chunks")
            two.kill()
            await aeventually(lambda: "remote-1" not in runtime.alive, "the loss is noticed")
            two.token_s = 0.005
            two.revive()
            result = await rollout.wait()
            await aeventually(lambda: "remote-1" in runtime.alive, "the server is back")
            return result

    result = asyncio.run(play())
    assert responses(result) == whole
    assert result.summary.instances_lost == 1


def test_deaths_use_up_no_restarts(fake, fleet_of):
    one, two = fake(token_s=0.002), fake(token_s=0.002)
    fleet = fleet_of(one, two)

    async def play():
        async with runtime_of(fleet) as runtime:
            fleet.engines[1].most_pause_s = 0.0
            for _ in range(4):
                two.kill()
                await aeventually(lambda: "remote-1" not in runtime.alive)
                two.revive()
                await aeventually(lambda: "remote-1" in runtime.alive)

    asyncio.run(play())


def test_a_run_begins_without_a_server_that_is_away(fake, fleet_of):
    one, two = fake(), fake()
    two.kill()
    fleet = fleet_of(one, two)

    async def play():
        async with runtime_of(fleet) as runtime:
            assert set(runtime.alive) == {"remote-0"}
            two.revive()
            await aeventually(lambda: len(runtime.alive) == 2)

    asyncio.run(play())


@pytest.mark.parametrize(
    ("version", "reason"),
    [
        (0, "does not serve the weights that others do"),
        (1, "came up with other weights than version 1 of the others"),
    ],
)
def test_a_server_that_returns_with_other_weights_waits_for_those_of_the_others_without_limit(
    fake, fleet_of, version, reason
):
    one, two = fake(), fake()
    fleet = fleet_of(one, two)

    async def play():
        async with runtime_of(fleet) as runtime:
            if version:
                await runtime.weights_changed()
            two.kill()
            await aeventually(lambda: "remote-1" not in runtime.alive)
            two.weights = 3
            two.revive()
            await aeventually(lambda: len(refusals()) > runtime._fleet._policy.attempts)
            await roll_out_in(runtime)
            await runtime.sleep()  # it is not waited for
            await runtime.wake()
            two.weights = one.weights
            await aeventually(lambda: "remote-1" in runtime.alive)

    def refusals():
        return [each for each in logs if each["event"] == "instance_awaits_weights"]

    with capture_logs() as logs:
        asyncio.run(play())
    assert {each["instance"] for each in refusals()} == {"remote-1"}
    assert all(reason in each["reason"] for each in refusals())


def test_new_weights_of_all_servers_have_one_that_waits_for_them_looked_at_at_once(fake, fleet_of):
    one, two = fake(), fake()
    fleet = fleet_of(one, two)
    table = SeerTable(restarts=RestartsTable(backoff_s=3600.0))

    async def play():
        async with Runtime(Assembly(fleet, Strategies(Policies())), table) as runtime:
            await runtime.weights_changed()
            two.kill()
            await aeventually(lambda: "remote-1" not in runtime.alive)
            two.weights = 3
            two.revive()
            await aeventually(lambda: any(each["event"] == "instance_awaits_weights" for each in logs))
            one.weights = 3
            await runtime.weights_changed()
            await aeventually(lambda: "remote-1" in runtime.alive)

    with capture_logs() as logs:
        asyncio.run(play())


def test_where_all_servers_have_other_weights_in_mid_rollout_it_ends(fake, fleet_of):
    servers = fake(token_s=0.005), fake(token_s=0.005)
    fleet = fleet_of(*servers)

    async def play():
        async with runtime_of(fleet) as runtime:
            await runtime.weights_changed()
            rollout = runtime.rollout(runtime.groups(PROMPTS))
            await aeventually(lambda: all(each.running for each in servers), "both run chunks")
            for engine, server in zip(fleet.engines, servers, strict=True):
                engine.most_pause_s = 0.0
                server.label, server.token_s = "step 2", 0.0
            with pytest.raises(EngineError, match="came up with other weights than version 1"):
                await rollout.wait()

    asyncio.run(play())


def test_an_answer_by_other_weights_is_not_taken(fake, fleet_of):
    one, two = fake(), fake()
    whole = responses(asyncio.run(roll_out(fleet_of(one, two))))
    seen = asyncio.Event()

    async def before(body):
        if len(body["token_ids"]) == 4 and not seen.is_set():
            seen.set()
            two.label, two.weights = "18", 9

    fleet = fleet_of(one, two)
    two.before = before
    result = asyncio.run(roll_out(fleet))
    assert responses(result) == whole
    assert result.summary.instances_lost == 1


def test_a_paused_server_is_left_alone_until_its_owner_resumes_it(fake, fleet_of):
    one, two = fake(token_s=0.002), fake(token_s=0.002)
    fleet = fleet_of(one, two)
    whole = responses(asyncio.run(roll_out(fleet_of(one, two))))

    async def play():
        async with runtime_of(fleet) as runtime:
            two.token_s = 60.0  # so that it ends no chunk
            rollout = runtime.rollout(runtime.groups(PROMPTS))
            await aeventually(lambda: two.running)
            two.paused = True
            await aeventually(lambda: "remote-1" not in runtime.alive)
            two.token_s = 0.002
            result = await rollout.wait()
            two.paused = False
            await aeventually(lambda: "remote-1" in runtime.alive)
            return result

    result = asyncio.run(play())
    assert responses(result) == whole
    assert result.summary.instances_lost == 0


def paused(server):
    """Pause a server; requests wait there until it is resumed."""

    async def before(body):
        await aeventually(lambda: not server.paused)

    server.paused, server.before = True, before


def test_a_run_begins_without_a_server_that_is_paused_which_joins_once_it_is_resumed(fake, fleet_of):
    one, two = fake(), fake()
    paused(two)

    async def play():
        async with runtime_of(fleet_of(one, two)) as runtime:
            assert set(runtime.alive) == {"remote-0"}
            two.paused = False
            await aeventually(lambda: "remote-1" in runtime.alive)

    asyncio.run(play())


def test_a_server_that_returns_does_not_wait_for_another_that_is_paused(fake, fleet_of):
    one, two = fake(), fake()
    fleet = fleet_of(one, two)

    async def play():
        async with runtime_of(fleet) as runtime:
            fleet.engines[1].most_pause_s = 0.0
            paused(one)
            await aeventually(lambda: "remote-0" not in runtime.alive)
            two.kill()
            await aeventually(lambda: "remote-1" not in runtime.alive)
            two.revive()
            await aeventually(lambda: "remote-1" in runtime.alive)
            one.paused = False
            await aeventually(lambda: "remote-0" in runtime.alive)

    asyncio.run(play())


@pytest.mark.parametrize("figure", ["many", "NaN", "+Inf"])
def test_figures_that_are_no_numbers_cost_no_response(fake, fleet_of, figure):
    server = fake()
    whole = responses(asyncio.run(roll_out(fleet_of(server))))
    fleet = fleet_of(server)

    async def play():
        async with runtime_of(fleet) as runtime:
            server.figure, looks = figure, server.looks
            await aeventually(lambda: server.looks > looks + 2)
            return await runtime.rollout(runtime.groups(PROMPTS)).wait()

    assert responses(asyncio.run(play())) == whole


def test_a_completion_without_the_most_probable_tokens_costs_a_chunk_and_not_the_rollout(fake, fleet_of):
    server = fake(scale_out=False)
    lacks = iter([True])

    def spoil(answer):
        scores = answer["choices"][0]["logprobs"]
        tops = [{"token_id:1": -0.5, "token_id:2": -0.7}] * len(scores["token_logprobs"])
        if not next(lacks, False):
            scores["top_logprobs"] = tops
        return answer

    async def play():
        async with runtime_of(fleet_of(server)) as runtime:
            server.spoil = spoil
            return await roll_out_in(runtime, [PROMPTS[0] | {"top_logprobs": 2}])

    result = asyncio.run(play())
    assert Counter(each.finish_reason for each in result.completions) == {"length": 4}
    assert all(len(each.top_logprobs) == 40 for each in result.completions)


def test_servers_join_and_leave_with_their_lines_of_a_file(fake, fleet_of, tmp_path):
    one, two = fake(), fake()
    file = tmp_path / "servers"
    file.write_text(f"# first\n{one.url}\n")
    fleet = fleet_of(urls_file="servers", base_dir=tmp_path)

    async def play():
        async with runtime_of(fleet) as runtime:
            assert set(runtime.alive) == {"remote-0"}
            file.write_text(f"{one.url}\n{two.url}\n")
            await aeventually(lambda: set(runtime.alive) == {"remote-0", "remote-1"})
            file.write_text("")  # it is being written
            with capture_logs() as logs:
                await aeventually(lambda: any(each["event"] == "addresses_unread" for each in logs))
            assert set(runtime.alive) == {"remote-0", "remote-1"}
            file.write_text(f"{two.url}\n")
            await aeventually(lambda: set(runtime.alive) == {"remote-1"})

    asyncio.run(play())


# Weights.


def test_new_weights_of_the_owner_s_are_looked_at(fake, fleet_of):
    one, two = fake(), fake()
    fleet = fleet_of(one, two)

    async def play():
        async with runtime_of(fleet) as runtime:
            for server in (one, two):
                server.weights, server.label = 2, "step 2"
            assert await runtime.weights_changed() == 1
            result = await runtime.rollout(runtime.groups(PROMPTS)).wait()
            assert result.summary.weight_version == 1
            one.weights, one.label = 3, "step 3"  # the other was left out
            assert await runtime.weights_changed() == 2
            assert len(runtime.alive) == 1

    asyncio.run(play())


def test_servers_that_were_left_out_of_an_update_are_outvoted(fake, fleet_of):
    one, two, three = fake(), fake(), fake()
    fleet = fleet_of(one, two, three)

    async def play():
        async with runtime_of(fleet) as runtime:
            for server in (two, three):
                server.weights = 2
            await runtime.weights_changed()
            left = set(runtime.alive)
            one.weights = 2
            await aeventually(lambda: len(runtime.alive) == 3)
            return left

    assert asyncio.run(play()) == {"remote-1", "remote-2"}


def test_a_server_that_cannot_load_weights_names_what_is_missing(fake, fleet_of, tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"")
    fleet = fleet_of(fake(developer=False))

    async def play():
        async with runtime_of(fleet, weights_dir="none") as runtime:
            await runtime.update_weights(tmp_path)

    with pytest.raises(EngineError, match="VLLM_SERVER_DEV_MODE=1"):
        asyncio.run(play())


def test_a_server_is_given_no_adapter_in_the_place_of_whole_weights(fake, fleet_of, tmp_path):
    server = fake()
    (tmp_path / "adapter_model.safetensors").write_bytes(b"")
    (tmp_path / "adapter_config.json").write_text('{"r": 4}')

    async def play():
        async with runtime_of(fleet_of(server), weights_dir="none") as runtime:
            await runtime.update_weights(tmp_path)

    with pytest.raises(EngineError, match=r"would not load .* as an adapter; merge it with its model"):
        asyncio.run(play())


# Answers.


def spoil(change):
    """Return what spoils the first answer to a prompt, and no other."""
    done = []

    def spoiled(answer):
        [choice] = answer["choices"]
        if len(choice["token_ids"]) == 40 and choice["weight_versions"][0]["version"] == "spoil" and not done:
            done.append(True)
            choice["weight_versions"][0]["version"] = "default"
            return change(answer, choice) or answer
        choice["weight_versions"][0]["version"] = "default"
        return answer

    return spoiled


def shorten(choice):
    choice["token_ids"].pop()
    choice["logprobs"]["content"].pop()


CHANGES = {
    "another request's": lambda answer, choice: answer.update(request_id="generate-tokens-other"),
    "too many tokens": lambda answer, choice: choice["token_ids"].append(1),
    "no log-probs": lambda answer, choice: choice.update(logprobs=None),
    "a token beyond the vocabulary": lambda answer, choice: choice["token_ids"].__setitem__(0, 4096),
    "a negative token": lambda answer, choice: choice["token_ids"].__setitem__(0, -1),
    "a strange end": lambda answer, choice: choice.update(finish_reason="tired"),
    "a full chunk that is not": lambda answer, choice: shorten(choice),
    "two responses": lambda answer, choice: answer["choices"].append(choice),
    "no response": lambda answer, choice: answer.update(choices=[]),
    "half of it": lambda answer, choice: web.Response(
        body=b'{"request_id": "gen', content_type="application/json"
    ),
    "no text": lambda answer, choice: web.Response(
        body=b'{"request_id": "\xff"}', content_type="application/json"
    ),
    "too deep": lambda answer, choice: web.Response(
        body=b'{"more": ' + b"[" * 100_000, content_type="application/json"
    ),
    "an error": lambda answer, choice: web.Response(status=500, text="out of memory"),
    "too busy": lambda answer, choice: web.Response(status=503, text="later"),
    "no such route": lambda answer, choice: web.Response(status=404, text="Not Found"),
    "a redirection": lambda answer, choice: web.Response(
        status=307, headers={"Location": "http://example.com/"}
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_an_answer_that_is_none_costs_a_chunk_and_no_response(fake, fleet_of, change):
    server = fake()
    whole = responses(asyncio.run(roll_out(fleet_of(server))))
    fleet = fleet_of(server)

    async def play():
        async with runtime_of(fleet) as runtime:
            server.label = "spoil"
            server.spoil = spoil(CHANGES[change])
            return await runtime.rollout(runtime.groups(PROMPTS)).wait()

    assert responses(asyncio.run(play())) == whole


IMPOSSIBLE = {
    "fewer cached tokens than none": lambda answer, token: answer.update(
        usage={"prompt_tokens_details": {"cached_tokens": -5}}
    ),
    "drafts without their acceptance": lambda answer, token: answer.update(
        kv_transfer_params={"seer": {"steps": 40, "drafted_at": [-2]}}
    ),
    "a probable token that is none": lambda answer, token: token["top_logprobs"][1].update(token_id=-7),
    "a probable token beyond all": lambda answer, token: token["top_logprobs"][1].update(token_id=10**30),
}


@pytest.mark.parametrize("change", IMPOSSIBLE)
def test_a_count_or_token_that_cannot_be_costs_a_chunk_and_no_response(fake, fleet_of, change):
    server = fake()
    prompts = [PROMPTS[0] | {"top_logprobs": 2}]
    whole = asyncio.run(roll_out(fleet_of(server), prompts))

    def spoiled(answer, choice):
        IMPOSSIBLE[change](answer, choice["logprobs"]["content"][0])

    async def play():
        async with runtime_of(fleet_of(server)) as runtime:
            server.label = "spoil"
            server.spoil = spoil(spoiled)
            return await runtime.rollout(runtime.groups(prompts)).wait()

    result = asyncio.run(play())
    assert result.summary.drafted_tokens == result.summary.pool_tokens == 0
    assert {each.request_id: each.top_logprobs for each in result.completions} == {
        each.request_id: each.top_logprobs for each in whole.completions
    }
    assert all(chunk.cached_tokens >= 0 for each in result.completions for chunk in each.chunks)


def test_a_connection_that_breaks_is_made_again(fake, fleet_of):
    server = fake()
    whole = responses(asyncio.run(roll_out(fleet_of(server))))
    broken = []

    async def before(body):
        if len(body["token_ids"]) == 4 and len(broken) < 3:
            broken.append(body["request_id"])
            raise ConnectionResetError

    fleet = fleet_of(server)

    async def play():
        async with runtime_of(fleet) as runtime:
            server.before = before
            return await runtime.rollout(runtime.groups(PROMPTS)).wait()

    result = asyncio.run(play())
    assert len(broken) == 3
    assert responses(result) == whole


def test_a_silent_server_counts_as_lost(fake, fleet_of):
    one, two = fake(others_write=True), fake(others_write=True)
    whole = responses(asyncio.run(roll_out(fleet_of(one, two))))
    hung = []

    async def before(body):
        if len(body["token_ids"]) == 4 and not hung:
            hung.append(True)
            two.others_write = False
            try:
                await asyncio.Event().wait()
            finally:
                two.others_write = True

    fleet = fleet_of(one, two, silence_timeout_s=0.3)
    two.before = before
    result = asyncio.run(roll_out(fleet))
    assert responses(result) == whole
    assert result.summary.instances_lost == 1


# Controls.


def test_controls_that_hold_over_chunks_are_sent_with_what_they_need(fake, fleet_of):
    server = fake(keyed_package=True)
    fleet = fleet_of(server)
    prompt = PROMPTS[0] | {"n": 1, "min_tokens": 10, "logit_bias": {"5": 1.5}, "presence_penalty": 0.5}
    asyncio.run(roll_out(fleet, [prompt]))
    [sent] = [each for each in server.requests if len(each["token_ids"]) == 4]
    how = sent["sampling_params"]
    assert how["min_tokens"] == 10
    assert how["logit_bias"] == {"5": 1.5}
    assert how["presence_penalty"] == 0.5
    assert how["extra_args"] == {"context_tokens": 4}


def test_controls_of_our_sampler_are_refused_where_it_is_not(fake, fleet_of):
    with pytest.raises(PromptError, match="bad_words"):
        asyncio.run(roll_out(fleet_of(fake()), [PROMPTS[0] | {"bad_words": [[5]]}]))


def test_a_server_with_our_sampler_and_one_without_are_no_siblings(fake, fleet_of):
    assert "has the controls" in refusal(fleet_of(fake(keyed_package=True), fake()))


def test_the_most_probable_tokens_come_without_the_token_itself(fake, fleet_of):
    result = asyncio.run(roll_out(fleet_of(fake()), [PROMPTS[0] | {"top_logprobs": 2}]))
    for completion in result.completions:
        assert completion.top_logprobs is not None
        for token, pairs in zip(completion.token_ids, completion.top_logprobs, strict=True):
            assert [each for each, _ in pairs] == [each for each in range(3) if each != token][:2]


# Settings.


def test_a_token_that_is_missing_or_wrong_is_named(fake, fleet_of, tmp_path, monkeypatch):
    server = fake(token="secret")
    assert "it wants a token: name it in token_env or token_file" in refusal(fleet_of(server))
    file = tmp_path / "tokens"
    file.write_text("wrong\n")
    assert "it refuses the token that it was given" in refusal(
        fleet_of(server, token_file="tokens", base_dir=tmp_path)
    )
    file.write_text(f"wrong\n{server.url} secret\n")
    asyncio.run(roll_out(fleet_of(server, token_file="tokens", base_dir=tmp_path)))
    monkeypatch.setenv("ENGINES", "secret")
    asyncio.run(roll_out(fleet_of(server, token_env="ENGINES")))
    with pytest.raises(ConfigError, match="the variable NONE is not set"):
        fleet_of(server, token_env="NONE")


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"urls": ()}, "names no server"),
        ({"urls": ("http://a:1", "http://a:1/")}, "is named twice"),
        ({"urls": ("localhost:8000",)}, "is no address"),
        ({"urls": ("ftp://a:1",)}, "is no address"),
        ({"urls": ("http://user:word@a:1",)}, "more than host, port and path"),
        ({"urls": ("http://a:99999",)}, "is no address"),
        ({"urls": ("https://a:1",), "ca_file": "nowhere.pem"}, "cannot be read"),
    ],
)
def test_settings_that_cannot_be_are_refused_before_anything_is_asked(fleet_of, settings, reason):
    with pytest.raises(ConfigError, match=reason):
        fleet_of(**settings)


def test_no_server_at_all_is_named(fleet_of, fake):
    server = fake()
    server.kill()
    found = refusal(fleet_of(server))
    assert f"no server answers: {server.url}" in found
    assert "raise start_timeout_s there if it is still starting" in found


def test_a_server_that_hides_its_kv_is_refused(fake, fleet_of):
    assert "set kv_tokens" in refusal(fleet_of(fake(kv=False)))
    asyncio.run(roll_out(fleet_of(fake(kv=False), kv_tokens=4096)))


def test_kv_of_servers_is_overcommitted(fake, fleet_of):
    class Silent:
        def reported(self, report):
            pass

    async def play():
        [engine] = fleet_of(fake()).engines
        info = await engine.start(Silent())
        await engine.stop()
        return info

    assert asyncio.run(play()).overcommits


def test_a_server_that_starts_anew_with_other_weights_in_mid_chunk_writes_no_token(fake, fleet_of):
    one, two = fake(), fake()
    whole = responses(asyncio.run(roll_out(fleet_of(one, two))))
    struck = []

    async def before(body):
        if len(body["token_ids"]) == 4 and not struck:
            struck.append(True)
            two.weights = 5
            raise ConnectionResetError  # as of a process that ended, and another began at once

    fleet = fleet_of(one, two)

    async def play():
        async with runtime_of(fleet) as runtime:
            two.before = before
            return await runtime.rollout(runtime.groups(PROMPTS)).wait()

    result = asyncio.run(play())
    assert struck
    assert responses(result) == whole
    assert result.summary.instances_lost == 1


def test_an_idle_server_that_starts_anew_with_other_weights_between_two_looks_writes_no_token(fake, fleet_of):
    one, two = fake(), fake()
    whole = responses(asyncio.run(roll_out(fleet_of(one, two))))

    async def play():
        async with runtime_of(fleet_of(one, two, poll_s=60.0)) as runtime:
            two.kill()
            two.weights = 5  # under the same label, and it says that it has written as much as before
            two.revive()
            return await runtime.rollout(runtime.groups(PROMPTS)).wait()

    result = asyncio.run(play())
    assert responses(result) == whole
    assert result.summary.instances_lost == 1


def test_a_server_that_takes_no_connection_is_lost_and_held_again_when_it_is_back(
    fake, fleet_of, monkeypatch
):
    one, two = fake(), fake()
    whole = responses(asyncio.run(roll_out(fleet_of(one, two))))
    hold = Connection.hold

    async def play():
        async with runtime_of(fleet_of(one, two, poll_s=60.0)) as runtime:
            engine = runtime._fleet.engines["remote-1"]
            refused = asyncio.Event()

            async def refuse_once(connection):
                if connection.url == two.url and not refused.is_set():
                    refused.set()
                    raise Unreachable("it takes no connection")
                return await hold(connection)

            monkeypatch.setattr(Connection, "hold", refuse_once)
            two.kill()
            two.revive()
            await aeventually(lambda: refused.is_set() and engine._doubted is None)
            await aeventually(lambda: "remote-1" in runtime.alive)
            two.kill()
            two.weights = 5
            two.revive()
            return await runtime.rollout(runtime.groups(PROMPTS)).wait()

    result = asyncio.run(play())
    assert responses(result) == whole
    assert result.summary.instances_lost == 1


def test_a_server_that_has_written_less_than_before_is_looked_at_again(fake, fleet_of):
    one, two = fake(), fake()
    whole = responses(asyncio.run(roll_out(fleet_of(one, two))))

    async def play():
        async with runtime_of(fleet_of(one, two)) as runtime:
            before = two.looks
            await aeventually(lambda: two.looks >= before + 2, "its figures have been read once and again")
            two.written, two.weights = 0, 5
            await aeventually(lambda: runtime._fleet.engines["remote-1"]._unsure)
            return await runtime.rollout(runtime.groups(PROMPTS)).wait()

    result = asyncio.run(play())
    assert responses(result) == whole
    assert result.summary.instances_lost == 1


def test_a_server_that_wants_another_token_is_lost_and_costs_no_response(fake, fleet_of):
    one, two = fake(), fake()
    whole = responses(asyncio.run(roll_out(fleet_of(one, two))))

    async def before(body):
        if len(body["token_ids"]) == 4:
            two.token = "another"

    two.spoil = lambda answer: web.Response(status=401) if two.token else answer
    two.before = before
    result = asyncio.run(roll_out(fleet_of(one, two)))
    assert responses(result) == whole
    assert result.summary.instances_lost == 1
