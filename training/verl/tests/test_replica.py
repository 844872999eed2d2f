"""Weights, sleep and waking by the calls of verl's trainer, on a server with simulated engines."""

import asyncio

import pytest
import torch
from seer_client import Client
from seer_verl.replica import Replica, ReplicaRollout
from verl.checkpoint_engine import CheckpointEngineManager
from verl.workers.rollout import get_rollout_class
from verl.workers.rollout.replica import RolloutReplicaRegistry


@pytest.fixture
def parts(configure, fresh_server):
    """Return a worker's rollout and the first replica, as verl makes them by the name in its config."""
    config = configure(fresh_server).actor_rollout_ref
    rollout = get_rollout_class("seer")(config=config.rollout, model_config=config.model, device_mesh=None)
    replica = RolloutReplicaRegistry.get("seer")(
        replica_rank=0, config=config.rollout, model_config=config.model, gpus_per_node=1
    )
    assert isinstance(rollout, ReplicaRollout)
    assert isinstance(replica, Replica)
    return rollout, replica


@pytest.fixture
def client(fresh_server):
    with Client(fresh_server.url) as found:
        yield found


def tensors(drawn):
    """Yield tensors as a trainer's workers gather them, and note that they were drawn."""
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        drawn.append(name)
        yield name, torch.arange(12, dtype=torch.bfloat16).reshape(3, 4).T


def update(rollout, step, **arguments):
    drawn = []
    try:
        asyncio.run(rollout.update_weights(tensors(drawn), global_steps=step, **arguments))
    finally:
        assert len(drawn) == 2
    return drawn


def test_weights_of_a_step_are_sent_once_and_are_its_version(parts, client):
    rollout, _ = parts
    assert client.state().weight_version == 0
    update(rollout, 0)
    assert client.state().weight_version == 1
    update(rollout, 0)
    update(rollout, None)
    assert client.state().weight_version == 1
    update(rollout, 5)
    assert client.state().weight_version == 6


def test_other_ranks_draw_the_weights_and_send_nothing(parts, client):
    rollout, _ = parts
    rollout.sends_weights = False
    update(rollout, 3)
    assert client.state().weight_version == 0


def test_weights_of_another_training_are_not_overwritten(parts, client):
    update(parts[0], 4)
    other = ReplicaRollout(parts[0].config, parts[0].model_config, None)
    with pytest.raises(ValueError, match="start `seer serve` anew"):
        update(other, 4)
    with pytest.raises(ValueError, match="without a step"):
        update(other, None)
    with pytest.raises(ValueError, match=r"model.lora.merge=True"):
        update(other, 7, peft_config={"r": 8})
    assert client.state().weight_version == 5


def test_the_first_replica_and_rank_put_the_engines_to_sleep_and_wake_them(parts, client):
    rollout, replica = parts
    asyncio.run(replica.launch_servers())
    manager = CheckpointEngineManager(rollout.config.checkpoint_engine, actor_wg=None, replicas=[replica])
    manager.sleep_replicas()
    assert client.state().asleep
    manager.sleep_replicas()
    asyncio.run(rollout.resume(["weights"]))
    update(rollout, 0)
    asyncio.run(rollout.resume(["kv_cache"]))
    assert not client.state().asleep
    asyncio.run(rollout.release())
    assert client.state().asleep
    manager.wake_up_replicas()
    assert not client.state().asleep


def test_other_replicas_and_trainers_that_keep_engines_awake_say_nothing(configure, fresh_server, client):
    for rank, frees in ((1, True), (0, False)):
        override = f"actor_rollout_ref.rollout.free_cache_engine={frees}"
        config = configure(fresh_server, override).actor_rollout_ref
        asyncio.run(Replica(rank, config.rollout, config.model, gpus_per_node=1).sleep())
    assert not client.state().asleep


@pytest.mark.parametrize("call", ["init_colocated", "init_standalone"])
def test_engines_that_verl_would_launch_are_refused(parts, call):
    replica = parts[1]
    with pytest.raises(ValueError, match="Seer"):
        asyncio.run(getattr(replica, call)(*[None] * (call == "init_colocated")))
