"""Rollouts on machines that share neither network nor processes nor files."""

import asyncio
import socket

import psutil
import pytest
from seer_worker.client.local import LocalLauncher

pytest.importorskip("ray")

from machines import SUPERVISOR, WORKER
from ray_rollouts import LIMIT_S, Reaper, patient, places, play, some_groups, tokens, workers_of
from seer_ray import launcher as launcher_module
from seer_ray.launcher import RayLauncher
from seer_ray.places import OwnGroup

from tests.support.eventually import aeventually


@pytest.fixture
def launcher(machines):
    return RayLauncher(patient(machines.address, host=machines.host))


def expected_tokens(make_runtime):
    async def here():
        async with make_runtime(LocalLauncher()) as runtime:
            return tokens(await runtime.rollout(some_groups()).wait())

    return play(here())


def test_a_machine_is_killed_in_mid_rollout_and_no_token_changes(machines, launcher, make_runtime):
    async def there():
        async with runtime:
            assert socket.gethostname() not in {each.host for each in workers_of(runtime)}
            result = await runtime.rollout(some_groups()).wait()
            await runtime._fleet.restarts_over()
            started = {each.host for each in workers_of(runtime)}
        assert await places() == 0
        await aeventually(lambda: not any(machine.processes(SUPERVISOR) for machine in machines.machines))
        return result, started

    def kill():
        machine = machines.node(workers_of(runtime)[0].node_id)
        assert machine.processes(WORKER)
        assert machine.processes(SUPERVISOR)
        machine.kill()
        killed.append(machine)

    killed = []
    expected = expected_tokens(make_runtime)
    runtime = make_runtime(launcher, Reaper(kill), step_s=0.02)
    result, started = play(there())
    assert tokens(result) == expected
    assert result.summary.instances_lost == 1
    assert killed[0].name not in started
    machines.remove(killed[0])
    machines.add()


def test_a_machine_that_was_cut_off_and_comes_back_adds_nothing_to_the_rollout(
    machines, launcher, make_runtime
):
    async def there():
        async with runtime:
            first, *others = some_groups()
            rollout = runtime.open()
            rollout.add([first])
            await reaper.lost.wait()
            [(cut, connection)] = victims
            received_bytes = connection.received_bytes
            stale = cut.processes(WORKER)
            cut.heal()  # what the worker has written since is sent again now
            rollout.add(others)
            rollout.close()
            result = await rollout.wait()
            await asyncio.to_thread(psutil.wait_procs, stale, LIMIT_S)
            assert cut.processes(WORKER) == []
            assert connection.received_bytes == received_bytes
            assert launcher._port.refused == 0  # nor does it connect again
        return result

    def cut():
        [connection, _] = [each.worker for each in runtime._fleet.engines.values()]
        machine = machines.node(connection.started.node_id)
        victims.append((machine, connection))
        machine.cut()

    victims = []
    expected = expected_tokens(make_runtime)
    reaper = Reaper(cut)
    runtime = make_runtime(launcher, reaper, step_s=0.02)
    result = play(there())
    assert tokens(result) == expected
    assert len(result.completions) == len(expected)
    assert result.summary.instances_lost == 1
    machines.remove(victims[0][0])
    machines.add()


def test_a_launch_on_a_machine_that_is_cut_off_and_still_counted_goes_to_another(
    machines, launcher, make_runtime, monkeypatch
):
    async def there():
        async with make_runtime(launcher, instances=1) as runtime:
            [started] = workers_of(runtime)
            found = tokens(await runtime.rollout(some_groups()).wait())
        return found, started

    def make_supervisor(place):
        if not victims:
            victims.append(machines.node(place.node_id))
            victims[0].cut()
        return really(place)

    victims = []
    really = OwnGroup.make_supervisor
    expected = expected_tokens(make_runtime)
    monkeypatch.setattr(OwnGroup, "make_supervisor", make_supervisor)
    monkeypatch.setattr(launcher_module, "SUPERVISOR_S", 6.0)
    found, started = play(there())
    assert found == expected
    assert started.host != victims[0].name
    machines.remove(victims[0])
