"""verl's manager, workers, client and balancer over stand-ins of its servers, in one process without Ray."""

import asyncio
import dataclasses
import json
import subprocess
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import seer_verl.kept_client
from batches import batch, responses
from seer_verl.agent_loop import AgentLoopManager, AgentLoopWorker
from seer_verl.kept_client import KeptClient
from seer_verl.rows import ROW, BatchRow
from verl.workers.rollout.llm_server import LLMServerClient
from verl.workers.rollout.replica import TokenOutput
from verl.workers.rollout.router import GlobalRequestLoadBalancer
from verl_standin import Here, StandInServer

from conftest import SEER, START_S

TOOLS = Path(__file__).with_name("doubling.py")
CONFIG = """
[engine.remote]
require = "exact"
poll_s = 0.05
[plugin.divided_rollout]
chunk_tokens = 4
"""
ROLLOUT = "actor_rollout_ref.rollout"


class Answer:
    """In the place of a reference of Ray's."""

    def __init__(self, value):
        self.value = value

    def __await__(self):
        return self._found().__await__()

    async def _found(self):
        return await self.value if asyncio.iscoroutine(self.value) else self.value


class Local:
    """An object of this process, called as an actor of Ray's."""

    def __init__(self, found):
        self.found = found

    def __getattr__(self, name):
        method = getattr(self.found, name)
        return SimpleNamespace(remote=lambda *args, **more: Answer(method(*args, **more)))

    @property
    def __ray_call__(self):
        return SimpleNamespace(remote=lambda function, *args: Answer(function(self.found, *args)))


def get(found, timeout=None):
    return [get(each) for each in found] if isinstance(found, list) else found.value


@pytest.fixture
def start(monkeypatch, configure, tmp_path):
    """Return a function that makes a manager, the stand-ins, and Seer's scheduler."""
    schedulers = []

    def remote(**options):
        def actor(kind):
            def make(*args):
                schedulers.append(kind(*args))
                return Local(schedulers[-1])

            return SimpleNamespace(remote=make)

        return actor

    ray = SimpleNamespace(get=get, put=lambda value: value, remote=remote, kill=None, exceptions=None)
    ray.exceptions = seer_verl.kept_client.ray.exceptions
    monkeypatch.setattr(seer_verl.kept_client, "ray", ray)
    path = tmp_path / "seer.toml"
    path.write_text(CONFIG, "utf-8")

    def make(*settings, token_s=0.0, rollout=()):
        config = configure(
            None,
            f"{ROLLOUT}.name=vllm",
            f"{ROLLOUT}.engine_kwargs.seer.config={path}",
            f"{ROLLOUT}.engine_kwargs.seer.look_s=0.05",
            *(f"{ROLLOUT}.engine_kwargs.seer.{each}" for each in settings),
            *(f"{ROLLOUT}.{each}" for each in rollout),
            workers=2,
        )
        servers = [StandInServer(str(number), token_s, make=TokenOutput) for number in range(2)]
        balancer = GlobalRequestLoadBalancer({each.name: Here(each) for each in servers})
        manager = AgentLoopManager(config, LLMServerClient(config, Local(balancer)))
        workers = [AgentLoopWorker(config, manager.llm_client) for _ in range(2)]
        manager.agent_loop_workers = [
            SimpleNamespace(generate_sequences=SimpleNamespace(remote=each.generate_sequences))
            for each in workers
        ]
        return manager, servers, schedulers[-1] if schedulers else None

    return make


def test_a_batch_is_divided_over_both_servers(start, tmp_path):
    manager, servers, scheduler = start(f"report={tmp_path / 'reports'}")
    assert isinstance(manager.llm_client, KeptClient)
    output = manager.generate_sequences(batch(groups=4, step=1))
    assert set(output.non_tensor_batch["seer_fallback"]) == {False}
    assert scheduler.metrics()["seer/requests"] == 12
    manager.generate_sequences(batch(groups=4, step=2))
    pages = {each.name: each.read_text("utf-8") for each in (tmp_path / "reports").iterdir()}
    assert sorted(pages) == ["step-1.html", "step-2.html"]
    assert all('"requests":12' in each for each in pages.values())
    for server in servers:
        assert any(each["sampling"]["max_tokens"] == 4 for each in server.requests)


def test_where_seer_answers_no_more_verls_own_client_goes_on_behind_the_tokens_so_far(start):
    manager, servers, scheduler = start(token_s=0.1)
    progress, seen = scheduler.progress, set()

    def failing(wanted):
        if len(seen) == 12:
            raise RuntimeError("it is dead")
        found = progress(wanted)
        seen.update(found["written"])
        return found

    scheduler.progress = failing
    output = manager.generate_sequences(batch(groups=4, step=1))
    marks = output.non_tensor_batch["seer_fallback"]
    assert any(marks)
    assert manager.llm_client._figures()["seer/fallbacks"] == sum(marks)
    stock = [each for server in servers for each in server.requests if "seed" not in each["sampling"]]
    assert {len(each["prompt"]) for each in stock} <= {8, 12}  # four of the prompt, and chunks
    assert all(len(tokens) == 12 or tokens[-1] == 7 for tokens, _ in responses(output))


async def never(*_):
    await asyncio.Event().wait()


def test_where_seer_is_asked_and_never_answers_verls_own_client_goes_on(start):
    manager, _, scheduler = start("stall_s=0.3", token_s=0.1)
    scheduler.progress = never
    output = manager.generate_sequences(batch(groups=4, step=1))
    marks = output.non_tensor_batch["seer_fallback"]
    assert any(marks)
    assert manager.llm_client._figures()["seer/fallbacks"] == sum(marks)
    assert all(len(tokens) == 12 or tokens[-1] == 7 for tokens, _ in responses(output))


@pytest.mark.parametrize("comes_back", [True, False])
def test_a_scheduler_that_does_not_begin_is_started_anew_and_else_a_batch_goes_without_it(
    start, monkeypatch, comes_back
):
    manager, _, scheduler = start("wait_s=0.3")
    client, killed = manager.llm_client, []

    def kill(actor, no_restart):
        killed.append((actor.found, no_restart))
        if comes_back:
            del scheduler.begin
            client.settings = dataclasses.replace(client.settings, wait_s=600.0)

    monkeypatch.setattr(seer_verl.kept_client.ray, "kill", kill)
    scheduler.begin = never
    output = manager.generate_sequences(batch(groups=4, step=1))
    marks = output.non_tensor_batch["seer_fallback"].tolist()
    assert marks == [not comes_back] * 12
    assert killed == [(scheduler, False)] * (1 if comes_back else 2)
    assert client._figures()["seer/fallbacks"] == sum(marks)


@pytest.mark.parametrize("is_hung", [False, True])
def test_a_scheduler_that_does_not_end_a_batch_is_started_anew_if_it_answers_nothing_else(
    start, monkeypatch, is_hung
):
    manager, _, scheduler = start()
    client, generate, killed = manager.llm_client, scheduler.generate, []
    monkeypatch.setattr(
        seer_verl.kept_client.ray, "kill", lambda actor, no_restart: killed.append(actor.found)
    )
    monkeypatch.setattr(seer_verl.kept_client, "FIGURES_S", 0.3 if is_hung else 600.0)

    def begun(job):
        client.settings = dataclasses.replace(client.settings, wait_s=0.3)
        return generate(job)

    scheduler.generate, scheduler.end = begun, never
    if is_hung:
        scheduler.metrics = never
    output = manager.generate_sequences(batch(groups=4, step=1))
    assert not any(output.non_tensor_batch["seer_fallback"])
    assert killed == [scheduler] * is_hung


def test_more_responses_without_seer_than_are_allowed_end_the_step(start):
    manager, servers, scheduler = start("most_fallbacks=5")
    scheduler.generate = failing
    with pytest.raises(
        RuntimeError, match=r"5 responses of this run may be written without it .*: it is dead"
    ):
        manager.generate_sequences(batch(groups=4, step=1))
    assert manager.llm_client._figures()["seer/fallbacks"] == 5  # of both workers together
    assert sum("seed" not in each["sampling"] for server in servers for each in server.requests) <= 5


def test_a_response_whose_later_turns_are_written_without_seer_is_marked_and_counts_once(start):
    loop = ("agent.default_agent_loop=tool_agent", "multi_turn.format=even", "response_length=40")
    manager, _, scheduler = start(rollout=(*loop, f"multi_turn.function_tool_path={TOOLS}"))
    generate = scheduler.generate

    async def later_turns_without(job):
        found = await generate(job)
        return {**found, "extra_fields": {**found["extra_fields"], "seer_fallback": job.turn > 0}}

    scheduler.generate = later_turns_without
    output = manager.generate_sequences(batch(groups=4, step=4))
    turns = output.non_tensor_batch["__num_turns__"]
    assert min(turns) == 2 < 4 < max(turns)
    marks = output.non_tensor_batch["seer_fallback"].tolist()
    assert marks == [each > 2 for each in turns]
    assert manager.llm_client._figures()["seer/fallbacks"] == sum(marks)


def test_so_do_more_than_are_allowed_that_seer_s_scheduler_has_had_written_in_several_lives(start):
    manager, _, scheduler = start("most_fallbacks=5")
    generate = scheduler.generate

    async def without(job):
        found = await generate(job)
        return {**found, "extra_fields": {**found["extra_fields"], "seer_fallback": True}}

    scheduler.generate = without
    with pytest.raises(RuntimeError, match=r"5 responses of this run may be written without it"):
        manager.generate_sequences(batch(groups=4, step=1))


def test_an_image_is_put_into_rays_store_once_for_all_rows_of_a_group_under_way(start, monkeypatch):
    manager, servers, _ = start(token_s=0.01)
    client, put = manager.llm_client, []
    monkeypatch.setattr(seer_verl.kept_client.ray, "put", lambda value: put.append(value) or value)

    async def row(batch, index):
        ROW.set(BatchRow("1-0", index, 1, batch=batch))
        image = np.full((4, 4, 3), 9, np.uint8)  # each row has a copy of its own
        return await client.generate("a", prompt_ids=[5, 6], sampling_params={}, image_data=[image])

    async def play():
        for _ in range(2):
            async with client.reserved([{"group_id": "1-0", "n": 3}], 1) as batch:
                await asyncio.gather(*(asyncio.create_task(row(batch, index)) for index in range(3)))
            await client._watching  # which ends with the last turn

    asyncio.run(play())
    assert len(put) == 2  # and nothing is kept once the rows are over
    shown = [each["image_data"] for server in servers for each in server.requests if "image_data" in each]
    assert shown
    assert all((image == 9).all() for [image] in shown)
    assert not client._stored


async def failing(job):
    raise RuntimeError("it is dead")


def test_a_canary_compares_responses_and_does_without_the_scheduler_where_they_differ(start):
    manager, servers, scheduler = start("canary=2", "canary_stop=1", token_s=0.01)
    manager.generate_sequences(batch(groups=4, step=1))
    figures = scheduler.metrics()
    assert (figures["seer/canary_compared"], figures["seer/canary_different"]) == (2, 0)
    for server in servers:
        server.whole_weights = 1  # what is not divided has other tokens from now on
        server.global_steps = 2
    manager.generate_sequences(batch(groups=4, step=2))
    assert scheduler.metrics()["seer/canary_different"] >= 1
    for server in servers:
        server.requests.clear()
    output = manager.generate_sequences(batch(groups=4, step=3))
    sent = [each for server in servers for each in server.requests if not each["sampling"]["ignore_eos"]]
    assert {each["sampling"]["max_tokens"] for each in sent} == {12}
    assert len(output) == 12


def test_a_shadow_leaves_verls_client_alone_and_seer_says_what_it_would_have_taken(start, tmp_path):
    manager, servers, scheduler = start("mode=shadow", f"record={tmp_path / 'watched'}", token_s=0.01)
    assert scheduler is None
    for step in (1, 2):
        manager.generate_sequences(batch(groups=4, step=step))
    assert not any("seed" in each["sampling"] for server in servers for each in server.requests)
    found = tmp_path / "found.json"
    command = [SEER, "shadow", tmp_path / "watched", "--json", found]
    subprocess.run(command, check=True, capture_output=True, timeout=START_S)
    steps = json.loads(found.read_text("utf-8"))
    assert [(each["step"], each["requests"], each["own_costs"]) for each in steps] == [
        (1, 12, True),
        (2, 12, False),
    ]
    assert all(each["seer_s"] > 0 for each in steps)
