"""A cluster that scales from zero nodes, by Ray's own autoscaler."""

import pytest

ray = pytest.importorskip("ray")

from autoscaled import Autoscaled  # noqa: E402
from ray_rollouts import patient, places, play, some_groups, tokens, workers_of  # noqa: E402
from seer_ray.launcher import RayLauncher  # noqa: E402

from seer_core.errors import EngineError  # noqa: E402


@pytest.fixture
def cluster(monkeypatch):
    found = Autoscaled()
    monkeypatch.setenv("RAY_TMPDIR", found.directory)
    yield found
    ray.shutdown()
    found.close()


def test_a_start_waits_for_a_node_that_the_autoscaler_adds_and_for_none_that_it_cannot_add(
    cluster, make_runtime, expected
):
    async def there():
        too_much = make_runtime(RayLauncher(patient(cluster.address, cpus=2)), instances=1)
        with pytest.raises(EngineError, match=r"none of the 1 nodes has 2 CPU; .*launcher\.ray\.autoscaler"):
            await too_much.start()
        async with runtime:
            [worker] = workers_of(runtime)
            assert worker.node_id != ray.get_runtime_context().get_node_id()
            result = await runtime.rollout(some_groups()).wait()
        assert await places() == 0
        return result

    settings = patient(cluster.address, autoscaler=True)
    runtime = make_runtime(RayLauncher(settings), instances=1)
    assert tokens(play(there())) == expected
