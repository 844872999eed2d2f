"""New weights for workers of a cluster whose nodes are the runtime's own machine."""

import pytest
from seer_worker.client.local import LocalLauncher

pytest.importorskip("ray")

from ray_rollouts import patient
from seer_ray.launcher import RayLauncher
from weight_updates import NEXT, TENSORS, after, deliveries, offered, save


def test_on_the_runtimes_own_machine_weights_are_not_sent(nodes, make_weighted, tmp_path):
    checkpoint = save(tmp_path, NEXT)
    with offered(TENSORS) as [source]:
        here = after(make_weighted(LocalLauncher()), source, checkpoint)
        with deliveries() as sent:
            launcher = RayLauncher(patient(nodes.address))
            assert after(make_weighted(launcher), source, checkpoint) == here
    assert sent == []
