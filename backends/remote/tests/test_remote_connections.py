"""Names, certificates and tokens that are wrong, a hundred servers, and two runs on the same ones."""

from __future__ import annotations

import asyncio

import pytest
from aiohttp import web
from seer_host.tables import SeerTable
from seer_remote.connection import Connection, Unreachable
from seer_remote.sglang import Sglang
from seer_session import Runtime

from seer_core.errors import EngineError
from seer_core.plugins.slots import Assembly, Strategies
from seer_core.runtime.restarts import RestartsTable
from seer_core.scheduling.scheduler import Policies
from tests.support.certificates import certify
from tests.support.eventually import aeventually


def prompts(groups):
    """Return prompts of so many groups of four."""
    return [
        {"group_id": f"g{i}", "prompt_token_ids": [1, 2, 3, i % 90 + 4], "n": 4, "seed": i, "max_tokens": 40}
        for i in range(groups)
    ]


def runtime_of(fleet):
    table = SeerTable(restarts=RestartsTable(attempts=2, backoff_s=0.0))
    return Runtime(Assembly(fleet, Strategies(Policies())), table)


async def roll_out(fleet, groups=4):
    async with runtime_of(fleet) as runtime:
        return responses(await runtime.rollout(runtime.groups(prompts(groups))).wait())


def responses(result):
    return {each.request_id: list(each.token_ids) for each in result.completions}


def refusal(fleet):
    with pytest.raises(EngineError) as error:
        asyncio.run(roll_out(fleet))
    return str(error.value)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory):
    """An authority's certificate, a server's context that it has signed, and one of another authority."""
    return certify(tmp_path_factory.mktemp("certificates"))


def test_the_pause_of_an_sglang_server_is_seen_and_does_not_count_as_its_end():
    """A paused server answers ``/ping`` and not ``/ready``; one that ends answers neither."""
    states = {"serving": (200, 200), "paused": (503, 200), "ending": (503, 503)}

    async def ask(state):
        ready, ping = states[state]
        app = web.Application()

        def answering(status, **body):
            async def answer(_):
                return web.json_response(body, status=status)

            return answer

        app.add_routes(
            [
                web.get("/ready", answering(ready)),
                web.get("/ping", answering(ping)),
                web.get("/v1/loads", answering(200, loads=[{"num_running_reqs": 3, "token_usage": 0.5}])),
            ]
        )
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        connection = Connection(f"http://127.0.0.1:{runner.addresses[0][1]}")
        connection.open()
        dialect = Sglang(connection)
        try:
            load = await dialect.load()
            assert (load.running, load.kv_usage) == (3, 0.5)
            if state == "paused":  # its first request would wait for the end of the pause
                with pytest.raises(Unreachable, match="its owner has paused it"):
                    await dialect.facts()
            return await dialect.healthy(), load.paused
        finally:
            await connection.close()
            await runner.cleanup()

    assert {state: asyncio.run(ask(state)) for state in states} == {
        "serving": (True, False),
        "paused": (True, True),
        "ending": (False, False),
    }


def test_a_certificate_is_trusted_by_the_authority_that_is_named(fake, fleet_of, certificates):
    authority, tls, other = certificates
    whole = asyncio.run(roll_out(fleet_of(fake())))
    server, stranger = fake(tls=tls), fake(tls=other)
    assert asyncio.run(roll_out(fleet_of(server, ca_file=str(authority)))) == whole
    for found in (refusal(fleet_of(server)), refusal(fleet_of(stranger, ca_file=str(authority)))):
        assert "its certificate is not trusted here" in found
        assert "ca_file of [engine.remote]" in found


def test_an_address_that_says_https_where_there_is_none_is_named(fake, fleet_of, certificates):
    server = fake()
    server.url = server.url.replace("http:", "https:")
    assert "it does not speak TLS" in refusal(fleet_of(server))
    secure = fake(tls=certificates[1])
    secure.url = secure.url.replace("https:", "http:")
    assert f"no server answers: {secure.url}" in refusal(fleet_of(secure))


def test_a_certificate_that_is_changed_in_mid_run_costs_no_response(fake, fleet_of, certificates):
    authority, tls, other = certificates
    one, two = fake(tls=tls), fake(tls=tls)
    whole = asyncio.run(roll_out(fleet_of(fake())))

    async def play():
        async with runtime_of(fleet_of(one, two, ca_file=str(authority))) as runtime:
            two.token_s = 60.0  # so that it ends no chunk
            rollout = runtime.rollout(runtime.groups(prompts(4)))
            await aeventually(lambda: two.running, "the second server runs chunks")
            two.kill()
            two.tls = other
            two.revive()
            await aeventually(lambda: "remote-1" not in runtime.alive, "the loss is noticed")
            result = await rollout.wait()
            two.kill()
            two.tls, two.token_s = tls, 0.0
            two.revive()
            await aeventually(lambda: "remote-1" in runtime.alive, "the server is back")
            return responses(result)

    assert asyncio.run(play()) == whole


def test_a_name_that_no_one_has_is_missed_and_taken_once_it_is_there(fake, fleet_of, tmp_path):
    server = fake()
    file = tmp_path / "servers"
    file.write_text("http://no-such-host.invalid:1\n")
    found = refusal(fleet_of(urls_file="servers", base_dir=tmp_path))
    assert "no server answers: http://no-such-host.invalid:1: " in found
    file.write_text(f"http://no-such-host.invalid:1\n{server.url}\n")
    assert len(asyncio.run(roll_out(fleet_of(urls_file="servers", base_dir=tmp_path)))) == 16


def test_two_runs_on_the_same_servers_at_once_disturb_each_other_in_nothing(fake, fleet_of):
    servers = [fake(token_s=0.001) for _ in range(2)]
    whole = asyncio.run(roll_out(fleet_of(*servers)))

    async def play():
        async with runtime_of(fleet_of(*servers)) as one, runtime_of(fleet_of(*servers)) as two:
            rollouts = [each.rollout(each.groups(prompts(4))) for each in (one, two)]
            await aeventually(lambda: len(servers[0].running) > 8, "both have chunks there")
            await rollouts[0].abort()
            return responses(await rollouts[1].wait())

    assert asyncio.run(play()) == whole
    requests = [each for server in servers for each in server.requests]
    assert len({each["request_id"] for each in requests}) == len(requests)


@pytest.mark.long
def test_a_hundred_servers_of_which_ten_flap_lose_no_response(fake, fleet_of):
    groups, servers = 50, [fake() for _ in range(100)]
    flapping = servers[::10]
    whole = asyncio.run(roll_out(fleet_of(servers[0]), groups))

    async def flap(runtime, server):
        name = f"remote-{servers.index(server)}"
        server.kill()
        await aeventually(lambda: name not in runtime.alive, "the loss is noticed")
        server.revive()
        await aeventually(lambda: name in runtime.alive, "the server is back")

    async def flap_in_turn(runtime):
        for server in flapping:
            await flap(runtime, server)

    async def play():
        fleet = fleet_of(*servers, poll_s=1.0)
        for engine in fleet.engines:
            engine.most_pause_s = 0.0
        found = []
        async with runtime_of(fleet) as runtime:
            await aeventually(lambda: len(runtime.alive) == 100, "all servers are in use")
            changing = asyncio.create_task(flap_in_turn(runtime))
            while not changing.done():
                result = await runtime.rollout(runtime.groups(prompts(groups))).wait()
                found.append(responses(result))
            await changing
            assert len(runtime.alive) == 100
        return found

    assert all(each == whole for each in asyncio.run(play()))
