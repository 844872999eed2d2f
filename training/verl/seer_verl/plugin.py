"""The entry point ``verl.plugins``, which verl loads in every process: registers Seer's classes."""

from verl.workers.rollout.base import _ROLLOUT_REGISTRY
from verl.workers.rollout.replica import RolloutReplica, RolloutReplicaRegistry


def _replica() -> type[RolloutReplica]:
    from seer_verl.replica import Replica

    return Replica


RolloutReplicaRegistry.register("seer", _replica)
# verl has no function for this one; its own names stand there as paths, too.
_ROLLOUT_REGISTRY["seer", "async"] = "seer_verl.replica.ReplicaRollout"
