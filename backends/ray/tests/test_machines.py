"""Rollouts on machines that share neither network nor processes nor files."""

import socket

import pytest
from seer_worker.client.local import LocalLauncher

pytest.importorskip("ray")

from machines import NURSE, WORKER
from ray_rollouts import Reaper, places, play, some_groups, tokens, workers_of
from seer_ray.launcher import RayLauncher
from seer_ray.settings import Settings


def test_a_machine_is_killed_in_mid_rollout_and_no_token_changes(machines, make_runtime):
    async def here():
        async with make_runtime(LocalLauncher()) as runtime:
            return tokens(await runtime.rollout(some_groups()).wait())

    async def there():
        async with runtime:
            assert socket.gethostname() not in {each.host for each in workers_of(runtime)}
            result = await runtime.rollout(some_groups()).wait()
            await runtime._fleet.restarts_over()
            started = {each.host for each in workers_of(runtime)}
        assert await places() == 0
        return result, started

    def kill():
        machine = machines.node(workers_of(runtime)[0].node_id)
        assert machine.processes(WORKER)
        assert machine.processes(NURSE)
        machine.kill()
        killed.append(machine)

    killed = []
    expected = play(here())
    runtime = make_runtime(
        RayLauncher(Settings(address=machines.address, host=machines.host)), Reaper(kill), step_s=0.02
    )
    result, started = play(there())
    assert tokens(result) == expected
    assert result.summary.instances_lost == 1
    assert killed[0].name not in started
    assert not any(machine.processes(NURSE) for machine in machines.machines)
