"""verl keeps its own engines: its managers, workers, clients and weights under Ray, on logical GPUs.

The servers are stand-ins with the methods of verl's own; ``test_kept_vllm.py`` has verl's, around a vLLM.
"""

import asyncio
import dataclasses
import os
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest
import ray
import verl_standin
from batches import batch, column
from batches import prompts as prompts_of
from batches import responses as responses_of
from seer_verl.kept_client import KeptClient
from seer_verl.manager import mode_of
from seer_verl.scheduler_process import process_of
from verl.checkpoint_engine import CheckpointEngineManager
from verl.experimental.agent_loop import AgentLoopManager as StockManager
from verl.utils import tensordict_utils
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.import_utils import load_class_from_fqn
from verl.utils.tracking import Tracking
from verl.workers.rollout.llm_server import LLMServerClient, LLMServerManager
from verl.workers.rollout.replica import RolloutReplica, RolloutReplicaRegistry, TokenOutput
from verl_standin import StandInServer

pytestmark = pytest.mark.ray
LIMIT_S = 600
ROLLOUT = "actor_rollout_ref.rollout"

CONFIG = """
[engine.remote]
require = "exact"
[plugin.divided_rollout]
chunk_tokens = 4
"""


class Trainer:
    """A worker of a trainer's: it holds a logical GPU, which the server beside it shares."""

    def gpu(self):
        return ray.get_runtime_context().get_accelerator_ids()["GPU"]

    async def update(self, server, steps):
        """Stand for the gathering of weights, which needs a GPU."""
        await server.set_weights.remote(steps)
        await server.set_global_steps.remote(steps)
        await server.wake_up.remote()


class Replica(RolloutReplica):
    """Starts a stand-in beside each of the trainer's workers."""

    token_s = 0.0

    async def launch_servers(self):
        kind = ray.remote(StandInServer).options(num_cpus=0, max_concurrency=self.max_concurrency)
        server = kind.remote(f"server-{self.replica_rank}", self.token_s, make=TokenOutput)
        self.servers.append(server)
        self._server_handle = server
        self._server_address = f"127.0.0.1:{8000 + self.replica_rank}"


class Job:
    """Servers, manager and weights, as verl's trainer makes them of a config."""

    def __init__(self, config):
        self.config = config
        self.workers = [ray.remote(num_gpus=1, num_cpus=0)(Trainer).remote() for _ in range(2)]
        group = SimpleNamespace(world_size=2, workers=self.workers)
        self.servers = LLMServerManager.create(config=config, worker_group=group)
        name = config.actor_rollout_ref.rollout.agent.agent_loop_manager_class
        manager = load_class_from_fqn(name, "AgentLoopManager")
        self.manager = manager.create(config=config, llm_client=self.servers.get_client())
        group.update_weights = lambda global_steps, mode: [
            worker.update.remote(server, global_steps)
            for worker, server in zip(self.workers, self.handles, strict=True)
        ]
        engine = omega_conf_to_dataclass(config.actor_rollout_ref.rollout.checkpoint_engine)
        self.engines = CheckpointEngineManager(engine, group, self.servers.get_replicas())
        self.engines.sleep_replicas()  # as both of verl's trainers do at first
        self.engines.update_weights(0)

    @property
    def handles(self):
        return self.servers.server_handles

    def step(self, number, groups=4, **meta):
        output = self.manager.generate_sequences(batch(groups=groups, step=number, **meta))
        self.engines.sleep_replicas()
        self.engines.update_weights(number)
        return output

    def requests(self):
        """Return the requests of agent loops that the servers have had, of each."""
        found = [ray.get(each.seen.remote()) for each in self.handles]
        return [[each for each in server if _is_chunk(each["sampling"])] for server in found]

    def close(self):
        client = getattr(self.manager, "llm_client", None)
        for actor in [*self.workers, *self.handles, *self.manager.agent_loop_workers]:
            ray.kill(actor)
        if isinstance(client, KeptClient):
            ray.kill(client.scheduler)


@pytest.fixture(scope="module", autouse=True)
def cluster():
    for module in (verl_standin, sys.modules[__name__]):  # Ray's workers do not find them
        ray.cloudpickle.register_pickle_by_value(module)
    os.environ["CUDA_VISIBLE_DEVICES"] = "0,1,2,3"  # logical ones, two for each job
    ray.init(num_cpus=8, num_gpus=4, include_dashboard=False, configure_logging=False)
    yield
    ray.shutdown()


@pytest.fixture(autouse=True)
def stand_in_replicas(monkeypatch):
    monkeypatch.setitem(RolloutReplicaRegistry._registry, "vllm", lambda: Replica)
    monkeypatch.setattr(Replica, "token_s", 0.0)


@pytest.fixture
def kept(configure, tmp_path):
    """Return a function that makes verl's config with the one line, and a config of Seer's."""
    path = tmp_path / "seer.toml"
    path.write_text(CONFIG, "utf-8")

    def make(*overrides, v1=False, workers=2):
        return configure(
            None,
            f"{ROLLOUT}.name=vllm",
            f"{ROLLOUT}.engine_kwargs.seer.config={path}",
            *overrides,
            v1=v1,
            workers=workers,
        )

    return make


@pytest.fixture
def job(kept):
    jobs = []

    def start(*overrides, **more):
        jobs.append(Job(kept(*overrides, **more)))
        return jobs[-1]

    yield start
    for each in jobs:
        each.close()


def _is_chunk(sampling):
    """Return whether a request is of Seer's, and not for a test of the server."""
    return "seed" in sampling and sampling["max_tokens"] <= 4 and not sampling["ignore_eos"]


def seeds_of(requests):
    return {each["sampling"]["seed"] for server in requests for each in server}


def alone(prompt, seed, weights):
    """Return what one server alone writes, with these weights."""
    server = StandInServer(make=TokenOutput)
    server.weights = weights
    how = {"max_tokens": 12, "seed": seed}
    return asyncio.run(server.generate(prompt, how, "alone")).token_ids


def require_of_weights(output, requests, weights):
    """Each response is what a server with these weights alone writes, with one of the seeds."""
    seeds = seeds_of(requests)
    for prompt, (tokens, _) in zip(prompts_of(output), responses_of(output), strict=True):
        assert any(alone(prompt, seed, weights) == tokens for seed in seeds)


def test_steps_with_sleep_and_new_weights_between_them_are_divided_over_both_servers(job):
    run = job()
    assert len({tuple(ray.get(each.gpu.remote())) for each in run.workers}) == 2
    outputs = [run.step(1), run.step(2)]
    for number, output in enumerate(outputs):
        assert output.batch["responses"].shape == (12, 12)
        assert set(output.non_tensor_batch["min_global_steps"]) == {number}  # of the step before
        assert set(output.non_tensor_batch["max_global_steps"]) == {number}
        assert set(output.non_tensor_batch["seer_fallback"]) == {False}
        require_of_weights(output, run.requests(), number)
    assert all(run.requests())
    assert {each["sampling"]["max_tokens"] for server in run.requests() for each in server} <= {1, 2, 3, 4}
    # Validation, and verl's log of a step.
    validated = run.step(3, n=2, validate=True)
    assert len(validated) == 8
    logged = logged_with({"training/global_step": 3, "loss": 1.0})
    assert logged["seer/requests"] == 8
    assert logged["loss"] == 1.0
    assert (logged["seer/exactness"], logged["seer/fallbacks"]) == (2, 0)
    assert logged_with({"val/reward": 1.0}) == {"val/reward": 1.0}


def logged_with(figures):
    """Return what verl's log of a step has, where its trainer logs these figures."""
    tracking, logged = Tracking("a", "b", "console"), []
    tracking.logger = {"mine": SimpleNamespace(log=lambda data, step: logged.append(data))}
    tracking.log(data=figures, step=3)
    return logged[0]


def test_images_pass_by_the_scheduler_and_experts_come_back(job):
    run = job()
    client = run.manager.llm_client
    images = [np.zeros((4, 4, 3), dtype=np.uint8)]

    async def ask():
        from seer_verl.rows import ROW, BatchRow

        async with client.reserved([{"group_id": "9-0", "n": 1}], 9) as batch_id:
            ROW.set(BatchRow("9-0", 0, 9, batch=batch_id))
            return await client.generate(
                "x",
                prompt_ids=[7, 8],
                sampling_params={"temperature": 1.0, "top_k": -1, "logprobs": True},
                image_data=images,
                mm_processor_kwargs={"fps": 2},
                priority=5,
            )

    output = asyncio.run(ask())
    wanted = [[token] for token in [7, 8, *output.token_ids][:-1]]
    assert np.array_equal(output.routed_experts, wanted)
    sent = [each for server in run.requests() for each in server if each["prompt"][:2] == [7, 8]]
    assert len(sent) > 1 or len(output.token_ids) <= 4
    for each in sent:
        assert np.array_equal(each["image_data"][0], images[0])
        assert (each["mm_processor_kwargs"], each["priority"]) == ({"fps": 2}, 5)


def test_off_is_verls_own_manager_and_client(kept, job, monkeypatch):
    monkeypatch.setenv("SEER", "off")
    run = job()
    assert type(run.manager) is StockManager
    assert type(run.manager.llm_client) is LLMServerClient
    run.step(1)
    assert run.requests() == [[], []]  # none has a seed of Seer's
    monkeypatch.delenv("SEER")
    assert mode_of(kept(f"{ROLLOUT}.engine_kwargs.seer.mode=off")) == "off"
    assert mode_of(kept()) == "on"


def test_a_scheduler_that_is_killed_in_mid_step_costs_no_response(job, monkeypatch):
    monkeypatch.setattr(Replica, "token_s", 0.2)
    run = job(f"{ROLLOUT}.engine_kwargs.seer.look_s=0.1")
    scheduler = run.manager.llm_client.scheduler
    killer = ray.remote(num_cpus=0)(_kill_when_busy).remote(scheduler, run.handles)
    output = run.step(1)
    ray.get(killer)
    marks = output.non_tensor_batch["seer_fallback"]
    assert any(marks)
    assert len(output) == 12
    assert logged_with({"training/global_step": 1})["seer/fallbacks"] == sum(marks)  # of verl's own client
    # With tokens so far: some requests of verl's own client begin behind some of the response.
    stock = [each for server in run.handles for each in ray.get(server.seen.remote())]
    lengths = {len(each["prompt"]) for each in stock if "seed" not in each["sampling"]}
    assert max(lengths) > max(map(len, prompts_of(output)))
    assert not any(run.step(2).non_tensor_batch["seer_fallback"])  # the next step tries again
    assert logged_with({"training/global_step": 2})["seer/fallbacks"] == sum(marks)  # those of the run


def test_a_scheduler_that_is_stopped_in_mid_step_costs_no_response_and_the_next_step_has_another(
    job, monkeypatch
):
    monkeypatch.setattr(Replica, "token_s", 0.2)
    run = job(*(f"{ROLLOUT}.engine_kwargs.seer.{each}" for each in ("look_s=0.1", "stall_s=60")))
    client = run.manager.llm_client
    stopped = ray.get(client.scheduler.__ray_call__.remote(process_of))
    with ThreadPoolExecutor(1) as thread:
        step = thread.submit(run.step, 1)
        ray.get(ray.remote(num_cpus=0)(_stop_when_busy).remote(stopped.pid, run.handles))
        patient, client.settings = client.settings, dataclasses.replace(client.settings, wait_s=1.0)
        output = step.result(LIMIT_S)
    client.settings = patient
    assert any(output.non_tensor_batch["seer_fallback"])
    assert len(output) == 12
    assert not any(run.step(2).non_tensor_batch["seer_fallback"])
    assert ray.get(client.scheduler.__ray_call__.remote(process_of)) != stopped
    with pytest.raises(ProcessLookupError):
        os.kill(stopped.pid, 0)


def test_weights_that_come_in_mid_step_are_those_of_whole_responses(job, monkeypatch):
    """As where a trainer loads a checkpoint with chunks out: what is not over begins anew, without Seer."""
    monkeypatch.setattr(Replica, "token_s", 0.05)
    run = job()
    with ThreadPoolExecutor(1) as thread:
        step = thread.submit(run.manager.generate_sequences, batch(groups=4, step=1))
        _wait_until(lambda: sum(map(len, run.requests())) > 12, "no later chunk came")
        run.engines.sleep_replicas()
        run.engines.update_weights(5)
        output = step.result(LIMIT_S)
    versions = output.non_tensor_batch["max_global_steps"].tolist()
    assert output.non_tensor_batch["min_global_steps"].tolist() == versions
    assert 5 in versions
    seeds, marks = seeds_of(run.requests()), output.non_tensor_batch["seer_fallback"]
    for prompt, (tokens, scores), version, without in zip(
        prompts_of(output), responses_of(output), versions, marks, strict=True
    ):
        assert scores == [-0.5 - version / 7] * len(tokens)  # each token's weights
        assert without or any(alone(prompt, seed, version) == tokens for seed in seeds)
    assert {version for version, without in zip(versions, marks, strict=True) if not without} <= {0}
    later = run.step(2)
    assert not any(later.non_tensor_batch["seer_fallback"])
    require_of_weights(later, run.requests(), 5)


def test_two_jobs_on_one_cluster_have_servers_schedulers_and_weights_of_their_own(job):
    runs = [job(), job()]
    runs[1].engines.update_weights(7)
    with ThreadPoolExecutor(2) as threads:
        steps = [threads.submit(run.manager.generate_sequences, batch(groups=4, step=8)) for run in runs]
        outputs = [step.result(LIMIT_S) for step in steps]
    for run, output, weights in zip(runs, outputs, (0, 7), strict=True):
        assert set(output.non_tensor_batch["min_global_steps"]) == {weights}
        assert set(output.non_tensor_batch["seer_fallback"]) == {False}
        require_of_weights(output, run.requests(), weights)
        assert all(run.requests())
        assert ray.get(run.manager.llm_client.scheduler.metrics.remote())["seer/requests"] == 12


def _wait_until(condition, otherwise):
    """Return the first true value of a condition; fail by what is the case ``otherwise``."""
    end = time.monotonic() + LIMIT_S
    while not (found := condition()):
        assert time.monotonic() < end, otherwise
        time.sleep(0.05)
    return found


def _wait_until_busy(servers):
    """Wait until Seer's scheduler has sent later chunks of rows."""

    def busy():
        seen = [one for each in servers for one in ray.get(each.seen.remote())]
        return (
            sum(len(one["prompt"]) in (7, 8) and one["sampling"].get("max_tokens") == 4 for one in seen) > 3
        )

    _wait_until(busy, "no later chunk came")


def _kill_when_busy(scheduler, servers):
    _wait_until_busy(servers)
    ray.kill(scheduler, no_restart=False)


def _stop_when_busy(pid, servers):
    _wait_until_busy(servers)
    os.kill(pid, signal.SIGSTOP)


def test_a_batch_of_the_newer_trainer_comes_to_transfer_queue(job):
    import torch
    import transfer_queue

    run = job(
        "transfer_queue.enable=True",
        "transfer_queue.backend.SimpleStorage.num_data_storage_units=1",
        v1=True,
        workers=1,
    )
    transfer_queue.init(run.config.transfer_queue)
    try:
        rows = column([[{"role": "user", "content": f"ring {group} ?"}] for group in range(2)])
        uids = ["some", "other"]
        given = tensordict_utils.get_tensordict(
            {"raw_prompt": rows, "uid": column(uids), "index": torch.arange(2)}
        )
        tensordict_utils.assign_non_tensor_data(given, "global_steps", 1)
        transfer_queue.kv_batch_put(keys=uids, partition_id="train", tags=[{"status": "pending"}] * 2)
        run.manager.generate_sequences(given)
        tags = _finished(transfer_queue, uids)
        run.engines.sleep_replicas()  # as the trainer does at once, though workers may still be about to end
        run.engines.update_weights(1)
        keys = sorted(key for key in tags if key not in uids)
        assert keys == sorted(f"{uid}_{index}_0" for uid in uids for index in range(3))
        assert {tags[key]["min_global_steps"] for key in keys} == {0}
        found = transfer_queue.kv_batch_get(keys=keys, partition_id="train")
        seeds = seeds_of(run.requests())
        for prompt, tokens in zip(found["prompts"], found["responses"], strict=True):
            assert any(alone(prompt.tolist(), seed, 0) == tokens.tolist() for seed in seeds)
    finally:
        transfer_queue.close()


def _finished(transfer_queue, uids):
    def finished():
        tags = transfer_queue.kv_list("train")["train"]
        assert all(tags[uid]["status"] != "failure" for uid in uids)
        return all(tags[uid]["status"] == "finished" for uid in uids) and tags

    return _wait_until(finished, "the batch has not come to its end")
