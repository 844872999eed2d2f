"""The names of a config as verl's trainers use them under Ray: servers, managers, workers, batches."""

import importlib.util
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import ray
import torch
from batches import column, expected, responses
from verl.checkpoint_engine import CheckpointEngineManager
from verl.utils import tensordict_utils
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.import_utils import load_class_from_fqn
from verl.workers.rollout.llm_server import LLMServerManager

pytestmark = pytest.mark.ray
LIMIT_S = 300
EXAMPLE = Path(__file__).parents[3] / "examples/verl/rollout.py"


@pytest.fixture(scope="module", autouse=True)
def cluster():
    ray.init(num_cpus=4, include_dashboard=False, configure_logging=False)
    yield
    ray.shutdown()


def servers_and_manager(config):
    """Make what verl's trainers make of a config, with one worker of a trainer's."""
    trainers = SimpleNamespace(world_size=1, workers=[None])
    servers = LLMServerManager.create(config=config, worker_group=trainers)
    name = config.actor_rollout_ref.rollout.agent.agent_loop_manager_class
    manager = load_class_from_fqn(name, "AgentLoopManager")
    return servers, manager.create(config=config, llm_client=servers.get_client())


@pytest.fixture
def example():
    """Return a module: that of ``examples/verl``."""
    spec = importlib.util.spec_from_file_location("rollout_with_verl", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    ray.cloudpickle.register_pickle_by_value(module)
    yield module
    ray.cloudpickle.unregister_pickle_by_value(module)
    del sys.modules[spec.name]


def test_the_example_rolls_out_scores_and_updates_weights(example, fresh_server):
    sizes = ("actor_rollout_ref.rollout.n=3", "actor_rollout_ref.rollout.response_length=12")
    rollouts = example.TrainingRollouts(example.configure(fresh_server.url, *sizes))
    rows = list(example.task.prompt_rows(4, 3, seed=77))
    for step in (1, 2):
        output = rollouts.step(example.make_batch(rows[2 * step - 2 : 2 * step], 3, step))
        names = [(f"{step}-{row // 3}", row % 3) for row in range(6)]
        assert responses(output) == expected(fresh_server, output, names, iteration=step)
        assert set(output.non_tensor_batch["min_global_steps"]) == {step - 1}
        assert output.batch["rm_scores"].shape == (6, 12)


@pytest.mark.parametrize("validate", [False, True])
def test_a_batch_of_the_newer_trainer_comes_to_transfer_queue(configure, server, validate):
    import transfer_queue

    config = configure(
        server,
        "transfer_queue.enable=True",
        "transfer_queue.backend.SimpleStorage.num_data_storage_units=1",
        "actor_rollout_ref.rollout.val_kwargs.n=2",
        "actor_rollout_ref.rollout.val_kwargs.temperature=1.0",
        v1=True,
        workers=1,
    )
    transfer_queue.init(config.transfer_queue)
    try:
        servers, manager = servers_and_manager(config)
        rows = column([[{"role": "user", "content": f"ring {group} ?"}] for group in range(2)])
        uids = ["some", "other"]
        given = tensordict_utils.get_tensordict(
            {"raw_prompt": rows, "uid": column(uids), "index": torch.arange(2)}
        )
        tensordict_utils.assign_non_tensor_data(given, "global_steps", 3)
        if validate:
            tensordict_utils.assign_non_tensor_data(given, "validate", True)
        place = "val" if validate else "train"
        transfer_queue.kv_batch_put(keys=uids, partition_id=place, tags=[{"status": "pending"}] * 2)
        manager.generate_sequences(given)
        tags = _finished(transfer_queue, place, uids)
        engines = CheckpointEngineManager(
            omega_conf_to_dataclass(config.actor_rollout_ref.rollout.checkpoint_engine),
            actor_wg=None,
            replicas=servers.get_replicas(),
        )
        engines.sleep_replicas()  # as the trainer does at once, though workers may still be about to end
        engines.wake_up_replicas()
        keys = sorted((key for key in tags if key not in uids), key=lambda key: (key[0] != "s", key))
        assert keys == [f"{uid}_{index}_0" for uid in uids for index in range(2 if validate else 3)]
        found = transfer_queue.kv_batch_get(keys=keys, partition_id=place)
        assert {tags[key]["min_global_steps"] for key in keys} == {-1}
    finally:
        transfer_queue.close()
    names = [(f"val-{key[0] == 'o':d}" if validate else f"3-{key[0] == 'o':d}", int(key[-3])) for key in keys]
    records = {}
    for (group, _), prompt in zip(names, found["prompts"], strict=True):
        record = {"group_id": group, "prompt_token_ids": prompt.tolist(), "n": 0, "max_tokens": 12}
        records.setdefault(group, record)["n"] += 1
    right = server.library(records.values(), iteration=0 if validate else 3)
    assert [each.tolist() for each in found["responses"]] == [right[name][0] for name in names]


def _finished(transfer_queue, place, uids):
    """Wait until both groups are over; return the tags of each entry."""
    end = time.monotonic() + LIMIT_S
    while time.monotonic() < end:
        tags = transfer_queue.kv_list(place)[place]
        if all(tags[uid]["status"] == "finished" for uid in uids):
            return tags
        assert all(tags[uid]["status"] != "failure" for uid in uids)
        time.sleep(0.2)
    raise AssertionError("the batch has not come to its end")
