"""Seer's half in a server, as the driver uses it: against a stand-in that notes what it is sent."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from msgspec import structs
from seer_grouped_spec.plugin import Settings, seer_make_drafter
from seer_host.tables import SeerTable
from seer_kv_local import LocalPool
from seer_session import Runtime
from seer_worker.seer_version import seer_version
from seer_worker.served import (
    JOB,
    AddText,
    Attach,
    Detach,
    ServedAnswer,
    ServedInfo,
    ServedJob,
    ServedKv,
    ShareAs,
    read_job,
)
from seer_worker.wire import ForgetGroup

from backends.tests.mover import Mover
from seer_core.errors import EngineError
from seer_core.plugins.hookspecs import Startup
from seer_core.plugins.slots import Assembly, Strategies
from seer_core.ports.policy import Splitter
from seer_core.scheduling.scheduler import Policies, Slot

KV = ServedKv(16, 64, "served-vllm", 0.001)
SEER = ServedInfo(seer_version(), "node-1", True, "first", KV, "", 8, "")
PROMPTS = [
    {"group_id": f"g{i}", "prompt_token_ids": [1, 2, 3, i + 4], "n": 4, "max_tokens": 40} for i in range(2)
]


def attach_answer(call):
    return ServedAnswer(kv=KV, shares=True)


class Halves(Splitter):
    """Divides each response in two."""

    def split(self, request):
        return min(20, request.remaining_tokens)


async def roll_out(fleet):
    """Roll out with a pool and a drafter, and move each chunk."""
    drafter = Slot("drafter", "grouped_spec", seer_make_drafter(Settings(), Startup(0, Path())))
    pool = Slot("kv_pool", "local", LocalPool(1 << 20))
    halves = Slot("splitter", "halves", Halves())
    strategies = Strategies(Policies(halves, placer=Slot("placer", "mover", Mover())), drafter=drafter)
    async with Runtime(Assembly(fleet, strategies, pool), SeerTable()) as runtime:
        return await runtime.rollout(runtime.groups(PROMPTS)).wait()


def refusal(fleet):
    with pytest.raises(EngineError) as error:
        asyncio.run(roll_out(fleet))
    return str(error.value)


def test_a_server_that_lacks_what_the_run_wants_is_refused_with_the_flag(fake, fleet_of):
    assert "VLLM_PLUGINS=seer" in refusal(fleet_of(fake()))
    lacking = structs.replace(SEER, kv=None, kv_lack="start it with --kv-transfer-config X")
    assert "--kv-transfer-config X" in refusal(fleet_of(fake(seer=lacking)))
    lacking = structs.replace(SEER, draft_tokens=0, drafts_lack="start it with --speculative-config Y")
    assert "--speculative-config Y" in refusal(fleet_of(fake(seer=lacking)))
    assert "Seer 0.0.9" in refusal(fleet_of(fake(seer=structs.replace(SEER, seer="0.0.9"))))
    refusing = fake(seer=SEER, answer=lambda call: ServedAnswer("it is out of memory"))
    assert "it is out of memory" in refusal(fleet_of(refusing))


def test_a_server_is_attached_sent_what_siblings_write_and_left(fake, fleet_of):
    servers = [fake(seer=SEER, answer=attach_answer) for _ in range(2)]
    result = asyncio.run(roll_out(fleet_of(*servers)))
    assert len(result.completions) == 8
    names = set()
    for server in servers:
        messages = [message for call in server.calls for message in call.messages]
        first, *_, last = messages
        assert isinstance(first, Attach)
        assert first.store.path.startswith("seer_kv_local")
        assert first.source.path.startswith("seer_grouped_spec")
        assert isinstance(last, Detach)
        names |= {each.weights for each in messages if isinstance(each, ShareAs)}
        assert {each.group_id for each in messages if isinstance(each, ForgetGroup)} >= {"g0", "g1"}
        jobs = [read_job(each["sampling_params"]["extra_args"]) for each in server.requests]
        assert {"g0", "g1"} <= {job.group for job in jobs}
    assert len(names) == 1
    texts = [each for server in servers for call in server.calls for each in call.messages]
    written = {each.request_id: list(each.token_ids) for each in result.completions}
    for text in (each for each in texts if isinstance(each, AddText)):
        assert written[text.request_id][text.start :][: len(text.token_ids)] == text.token_ids


def test_a_server_that_another_run_has_taken_goes_on_without_pool_and_drafts(fake, fleet_of):
    def taken(call):
        attached = isinstance(call.messages[:1] and call.messages[0], Attach)
        return attach_answer(call) if attached else ServedAnswer("it serves another run")

    server = fake(seer=structs.replace(SEER, serves=True), answer=taken)
    result = asyncio.run(roll_out(fleet_of(server)))
    assert len(result.completions) == 8
    assert result.summary.degradations == {"kv_pool": 1}
    assert JOB not in server.requests[-1]["sampling_params"].get("extra_args", {})  # it is not the other's


def test_a_server_that_was_started_anew_is_attached_again(fake, fleet_of):
    """Its first life ends in mid-rollout; nothing but its answer to a call shows that."""
    attached, asked, gone = [], asyncio.Event(), asyncio.Event()

    def answer(call):
        if isinstance(call.messages[:1] and call.messages[0], Attach):
            attached.append(call.driver)
        if asked.is_set() and not gone.is_set():
            gone.set()
            return ServedAnswer("it serves no run")
        return attach_answer(call)

    async def wait(body):
        if len(body["token_ids"]) == 4:  # of the rollout
            asked.set()
            await gone.wait()

    server = fake(seer=SEER, answer=answer, before=wait)
    result = asyncio.run(roll_out(fleet_of(server)))
    assert len(result.completions) == 8
    assert result.summary.degradations == {"kv_pool": 1}
    assert len(set(attached)) == 2
    assert read_job(server.requests[-1]["sampling_params"]["extra_args"])


def test_a_server_that_fails_at_a_call_is_sent_the_ends_of_groups_again(fake, fleet_of):
    failed, sent = [], []

    def answer(call):
        ended = [each.group_id for each in call.messages if isinstance(each, ForgetGroup)]
        if "g0" in ended and not failed:
            failed.append(call)
            raise OSError("the answer is lost")
        sent.extend(ended)
        return attach_answer(call)

    result = asyncio.run(roll_out(fleet_of(fake(seer=SEER, answer=answer))))
    assert len(result.completions) == 8
    assert failed
    assert {"g0", "g1"} <= set(sent)


def test_jobs_are_read_as_they_were_written_and_other_clients_have_none():
    assert read_job(None) is None
    assert read_job({JOB: "{"}) is None
    assert read_job({JOB: 3}) is None
    assert read_job({JOB: '{"response": "g/0", "group": "g", "prompt_tokens": 4}'}) == ServedJob(
        "g/0", "g", 4
    )
