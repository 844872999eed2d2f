"""The plug-in: what it refuses, when it starts servers, and two instances that learn from each other."""

import asyncio
import json
import socket
import subprocess
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest
from seer_grouped_spec.plugin import Settings, seer_make_drafter
from seer_grouped_spec.source import GroupedSource
from seer_grouped_spec.testing import FLAT

from seer_core.drafting import DraftBatch, Drafter, DraftHost
from seer_core.errors import ConfigError, PluginError
from seer_core.hookspecs import Startup
from seer_core.model import Sampling
from seer_core.ports import ChunkJob

PROMPT = [1, 2, 3, 4]
PHRASE = list(range(100, 160))
OTHER = list(range(130, 100, -1))


def make(base_dir=Path(), **settings):
    return seer_make_drafter(Settings(**settings), Startup(0, Path(base_dir)))


def test_it_is_a_drafter_with_both_halves():
    drafter = make(draft_tokens=4)
    assert isinstance(drafter, Drafter)
    assert (drafter.source().path, drafter.source().draft_tokens) == (
        "seer_grouped_spec.source:GroupedSource",
        4,
    )
    assert drafter.policy(FLAT).lengths(1, 1) != (0, 0)


def test_a_profile_goes_to_the_workers(tmp_path):
    (tmp_path / "profile.json").write_bytes(msgspec.json.encode(FLAT))
    assert make(tmp_path, profile="profile.json").source().step_times == FLAT
    assert make(tmp_path).source().step_times is None


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"profile": "nowhere.json"},
            r"profile: .*nowhere.json is no profile: .*`seer profile`",
        ),
        ({"profile": "bad.json"}, r"bad.json is no profile"),
        ({"lookup_min": 9, "lookup_max": 4}, r"lookup_min = 9 exceeds lookup_max = 4"),
        ({"endpoints": ("h:1",)}, r"endpoints: 'h:1' is no tcp://HOST:PORT; write it as"),
        ({"endpoints": ("tcp://h",)}, r"endpoints: 'tcp://h' is no tcp://HOST:PORT"),
        ({"endpoints": ("tcp://h:70000",)}, r"endpoints: Port out of range 0-65535"),
        ({"token_file": "token"}, r"token_file is of no use without endpoints"),
        ({"token_file": "token", "endpoints": ("tcp://h:1",)}, r"token_file: .*cannot be read"),
        ({"token_file": "empty", "endpoints": ("tcp://h:1",)}, r"token_file: .*is empty"),
    ],
)
def test_what_cannot_work_is_refused_at_the_start(tmp_path, settings, message):
    (tmp_path / "bad.json").write_text('{"batch": []}')
    (tmp_path / "empty").write_text("\n")
    with pytest.raises(ConfigError, match=message):
        make(tmp_path, **settings)


def test_one_instance_needs_no_server_and_no_servers_means_none():
    async def endpoints(drafter, instances):
        await drafter.start(instances)
        try:
            return drafter.source().settings["endpoints"]
        finally:
            await drafter.stop()

    assert asyncio.run(endpoints(make(), 1)) == ()
    assert asyncio.run(endpoints(make(servers=0), 4)) == ()
    assert len(asyncio.run(endpoints(make(servers=2), 2))) == 2


def test_servers_that_run_already_are_joined_also_by_one_instance(tmp_path, start_server):
    (tmp_path / "token").write_text("secret\n")
    server = start_server(token="secret")
    drafter = make(tmp_path, endpoints=(server.endpoint,), token_file="token")
    asyncio.run(drafter.start(1))
    settings = drafter.source().settings
    assert (settings["endpoints"], settings["token"]) == ((server.endpoint,), "secret")


def test_a_server_that_is_not_there_or_has_another_token_is_refused_in_one_sentence(tmp_path, start_server):
    (tmp_path / "token").write_text("a guess\n")
    server = start_server()
    told = {}
    with socket.create_server(("127.0.0.1", 0)) as silent:
        nowhere = f"tcp://127.0.0.1:{silent.getsockname()[1]}"
    for endpoint, token_file in ((nowhere, ""), (server.endpoint, ""), (server.endpoint, "token")):
        drafter = make(tmp_path, endpoints=(endpoint,), token_file=token_file)
        with pytest.raises(PluginError) as error:
            asyncio.run(drafter.start(2))
        told[endpoint, token_file] = str(error.value)
    wrong = (
        f"plug-in 'grouped_spec': the draft server {server.endpoint}: the token is wrong or missing; name the"
        " file with its token as token_file"
    )
    assert told == {
        (nowhere, ""): f"plug-in 'grouped_spec': the draft server {nowhere}: it cannot be reached: Connection"
        " refused; start it, or correct endpoints",
        (server.endpoint, ""): wrong,
        (server.endpoint, "token"): wrong,
    }


def test_servers_of_a_run_have_a_token_that_nobody_else_knows():
    async def tokens():
        found = []
        drafter = make(servers=2)
        for _ in range(2):
            await drafter.start(2)
            found.append(drafter.source().settings["token"])
        await drafter.stop()
        return found

    first, second = asyncio.run(tokens())
    assert len(first) == len(second) == 64
    assert first != second


def test_what_one_instance_writes_is_drafted_on_another():
    async def main():
        drafter = make(flush_s=0.01, fetch_s=0.01)
        await drafter.start(2)
        try:
            settings = msgspec.to_builtins(drafter.source().settings)
            here, there = (
                GroupedSource(settings, DraftHost(name, 4, 256, 1000, 8, FLAT)) for name in ("a", "b")
            )
            try:
                here.close(here.open(job("g/0", [])))
                there.close(there.open(job("g/1", [])))
                handle = here.open(job("g/0", []))
                written = rows(PHRASE)
                here.propose(batch(handle, written))
                here.close(handle)
                handle = there.open(job("g/1", PHRASE[:6]))
                return await drafted(there, handle, PHRASE[:6])
            finally:
                here.stop()
                there.stop()
        finally:
            await drafter.stop()

    assert asyncio.run(main()) == PHRASE[6:14]


INSTANCE = """
import json, sys, time
from seer_core.drafting import DraftHost
from seer_core.model import Sampling
from seer_core.ports import ChunkJob
from seer_grouped_spec.source import GroupedSource
from seer_grouped_spec.testing import FLAT
settings, text = json.loads(sys.stdin.readline())
source = GroupedSource(settings, DraftHost("b", 4, 256, 1000, 8, FLAT))
for request in ("g/0", "g/1"):
    job = ChunkJob(request, request, "g", [1, 2, 3, 4, *text], 4, 9, Sampling(), 7, 0, rollout_id="first")
    source.close(source.open(job))
time.sleep(600)
"""


def test_ids_that_come_again_after_an_instance_was_killed_are_drafted_as_if_it_had_not_been():
    """The dead instance's texts lie on the server and with the other, under the ids of the next rollout."""

    async def main():
        drafter = make(flush_s=0.01, fetch_s=0.01)
        await drafter.start(2)
        settings = msgspec.to_builtins(drafter.source().settings)
        hosts = [DraftHost(name, 4, 256, 1000, 8, FLAT) for name in ("a", "b")]
        here = GroupedSource(settings, hosts[0])
        sources = [here]
        try:
            handle = here.open(job("g/2", PHRASE[:6], "first"))
            with subprocess.Popen([sys.executable, "-c", INSTANCE], stdin=subprocess.PIPE) as killed:
                killed.stdin.write(json.dumps((settings, PHRASE)).encode() + b"\n")
                killed.stdin.flush()
                try:
                    assert await drafted(here, handle, PHRASE[:6]) == PHRASE[6:14]
                finally:
                    killed.kill()
            here.close(handle)
            there = GroupedSource(settings, hosts[1])
            sources.append(there)
            handle = there.open(job("g/0", [], "second"))
            there.propose(batch(handle, rows(OTHER)))
            there.close(handle)
            handle = here.open(job("g/1", OTHER[:6], "second"))
            assert await drafted(here, handle, OTHER[:6]) == OTHER[6:14]
            assert [source.stats()["index_mismatched"] for source in sources] == [0, 0]
            assert [source.stats()["client_disagreements"] for source in sources] == [0, 0]
        finally:
            for source in sources:
                source.stop()
            await drafter.stop()

    asyncio.run(main())


def test_sharing_that_is_off_is_told_to_the_runtime(start_server, wait_for):
    told = []
    server = start_server(token="secret")
    settings = msgspec.to_builtins(make(endpoints=(server.endpoint,)).source().settings)
    host = DraftHost("a", 4, 256, 1000, 8, FLAT, tell=told.append)
    source = GroupedSource({**settings, "endpoints": [server.endpoint], "token": "another"}, host)
    try:
        wait_for(lambda: source.stats() and told)
        assert told == [f"draft server {server.endpoint}: the token is wrong or missing"]
    finally:
        source.stop()


async def drafted(source, handle, response):
    """Ask until there is a draft, and return it."""
    async with asyncio.timeout(20):
        while True:
            asked = batch(handle, rows(response))
            source.propose(asked)
            if asked.counts[0]:
                return asked.drafts[0, : asked.counts[0]].tolist()
            await asyncio.sleep(0.01)


def job(request, response, rollout=""):
    tokens = [*PROMPT, *response]
    return ChunkJob(f"{request}#0", request, "g", tokens, 4, 200, Sampling(), 7, 0, rollout_id=rollout)


def rows(response):
    tokens = np.zeros((4, 256), np.int32)
    tokens[0, : 4 + len(response)] = [*PROMPT, *response]
    return tokens, 4 + len(response)


def batch(handle, written):
    tokens, length = written
    return DraftBatch(
        handles=np.array([handle], np.int32),
        rows=np.zeros(1, np.int32),
        lengths=np.array([length], np.int32),
        sampled=np.ones(1, np.int32),
        limits=np.full(1, 8, np.int32),
        tokens=tokens,
        drafts=np.zeros((1, 8), np.int32),
        counts=np.zeros(1, np.int32),
    )
