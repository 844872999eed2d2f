"""The plug-in: what it refuses, when it starts servers, and two instances that learn from each other."""

import asyncio
from pathlib import Path

import msgspec
import numpy as np
import pytest
from seer_grouped_spec.plugin import Settings, seer_make_drafter
from seer_grouped_spec.source import GroupedSource
from seer_grouped_spec.testing import FLAT

from seer_core.drafting import DraftBatch, Drafter, DraftHost
from seer_core.errors import ConfigError
from seer_core.hookspecs import Startup
from seer_core.model import Sampling
from seer_core.ports import ChunkJob

PROMPT = [1, 2, 3, 4]
PHRASE = list(range(100, 160))


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
    assert asyncio.run(endpoints(make(endpoints=("tcp://h:1",)), 1)) == ("tcp://h:1",)
    assert len(asyncio.run(endpoints(make(servers=2), 2))) == 2


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
                async with asyncio.timeout(20):
                    while True:
                        asked = batch(handle, rows(PHRASE[:6]))
                        there.propose(asked)
                        if asked.counts[0]:
                            return asked.drafts[0, : asked.counts[0]].tolist()
                        await asyncio.sleep(0.01)
            finally:
                here.stop()
                there.stop()
        finally:
            await drafter.stop()

    assert asyncio.run(main()) == PHRASE[6:14]


def job(request, response):
    return ChunkJob(f"{request}#0", request, "g", [*PROMPT, *response], 4, 200, Sampling(), 7, 0)


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
