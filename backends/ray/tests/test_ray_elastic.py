"""Nodes that join, and nodes that are drained, in mid-rollout."""

import time

import pytest
import structlog

from seer_core.errors import EngineError

ray = pytest.importorskip("ray")

from ray_rollouts import Reaper, patient, places, play, some_groups, tokens, workers_of  # noqa: E402
from seer_ray.launcher import RayLauncher  # noqa: E402

from tests.support.eventually import aeventually  # noqa: E402

SPOT_NOTICE = 2
DEADLINE_S = 30


def drain(nodes, node_id):
    from ray._raylet import GcsClient

    deadline_ms = int((time.time() + DEADLINE_S) * 1000)
    assert GcsClient(address=nodes.address).drain_node(node_id, SPOT_NOTICE, "a notice", deadline_ms)[0]


async def alive(runtime, count):
    await aeventually(lambda: len(runtime.alive) == count)


def served(result):
    return {chunk.instance for each in result.completions for chunk in each.chunks}


def test_an_instance_leaves_a_drained_node_goes_on_elsewhere_and_uses_up_no_restart(
    nodes, make_runtime, expected
):
    drained = []

    def notify():
        drained.append(workers_of(runtime)[0])
        drain(nodes, drained[0].node_id)

    async def there():
        async with runtime:
            first, *others = some_groups()
            rollout = runtime.open()
            rollout.add([first])
            await alive(runtime, 1)
            rollout.add(others)
            rollout.close()
            result = await rollout.wait()
            await alive(runtime, 2)
            assert drained[0].node_id not in {each.node_id for each in workers_of(runtime)}
            assert not runtime._fleet._budget._lives["scripted-0"].restarts
        assert await places() == 0
        return result

    runtime = make_runtime(RayLauncher(patient(nodes.address)), Reaper(notify), step_s=0.02)
    with structlog.testing.capture_logs() as logs:
        result = play(there())
    assert tokens(result) == expected
    assert result.summary.instances_lost == 0
    [left] = [each for each in logs if each["event"] == "instance_leaves"]
    assert left["instance"] == "scripted-0"
    assert left["reason"].endswith("is being drained")
    nodes.remove(nodes.node(drained[0].node_id))
    nodes.add()


def test_an_instance_without_a_place_joins_a_rollout_under_way_when_a_node_does(
    nodes, make_runtime, expected
):
    added = [nodes.add(kind=1.0)]

    async def there():
        async with runtime:
            assert list(runtime.alive) == ["scripted-0"] or list(runtime.alive) == ["scripted-1"]
            first, *others = some_groups()
            rollout = runtime.open()
            rollout.add([first])
            await alive(runtime, 2)
            rollout.add(others)
            rollout.close()
            return await rollout.wait()

    def join():
        added.append(nodes.add(kind=1.0))

    settings = patient(nodes.address, resources={"kind": 1.0}, min_instances=1)
    runtime = make_runtime(RayLauncher(settings), Reaper(join), step_s=0.02)
    result = play(there())
    for node in added:
        nodes.remove(node)
    assert tokens(result) == expected
    assert served(result) == {"scripted-0", "scripted-1"}
    assert result.summary.instances_lost == 0


def test_a_run_does_not_begin_with_fewer_instances_than_it_must_have(nodes, make_runtime):
    async def start():
        with pytest.raises(EngineError, match=r"has no place for it: .*min_instances"):
            await runtime.start()

    node = nodes.add(kind=1.0)
    settings = patient(nodes.address, resources={"kind": 1.0}, min_instances=2, launch_timeout_s=25.0)
    runtime = make_runtime(RayLauncher(settings), instances=3)
    play(start())
    nodes.remove(node)
