"""New weights, and the model's files, on machines that share no memory and no temporary directory."""

import asyncio
import os
import re
import signal
import tempfile
from collections import Counter
from contextlib import suppress
from pathlib import Path

import pytest
from seer_host.tables import SeerTable
from seer_worker.client.local import LocalLauncher

from seer_core.errors import EngineError
from seer_core.ports.weights import directory

pytest.importorskip("ray")

from machines import SUPERVISOR
from ray_rollouts import patient, play, workers_of
from seer_ray.launcher import RayLauncher
from weight_updates import (
    ADAPTED,
    FACTORS,
    NEXT,
    TENSORS,
    after,
    deliveries,
    offered,
    rolled_out,
    save,
    save_adapter,
)

from tests.support.eventually import aeventually


@pytest.fixture
def over(machines):
    """Return a function that makes a launcher over the machines."""
    return lambda **changes: RayLauncher(
        patient(machines.address, host=machines.host, **{"cpus": 0.5, **changes})
    )


@pytest.fixture
def of_all():
    """A directory on a file system of all machines, which share neither /tmp nor /dev/shm."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as place:
        yield Path(place)


def held(machine):
    """Return the weights in memory that a machine's supervisors hold."""
    found = []
    for supervisor in machine.processes(SUPERVISOR):
        for each in Path(f"/proc/{supervisor.pid}/fd").iterdir():
            with suppress(OSError):
                found += [each for link in [os.readlink(each)] if "memfd:seer-weights" in link]
    return found


async def none_held(machines):
    await aeventually(lambda: not any(map(held, machines.machines)))


def test_shared_memory_reaches_each_machine_once_and_is_freed_there(machines, over, make_weighted):
    async def there():
        async with runtime:
            found = []
            for source in sources:
                await runtime.update_weights(source)
                await none_held(machines)
                found.append(await rolled_out(runtime))
            assert runtime._fleet.weights.fingerprints
            return found, {each.host for each in workers_of(runtime)}

    with offered(TENSORS, NEXT) as sources:
        here = after(make_weighted(LocalLauncher()), *sources)
        runtime = make_weighted(over(), instances=4)
        with deliveries() as sent:
            found, hosts = play(there())
    assert found == here
    assert here[0] != here[1]
    assert 2 <= len(hosts) < 4
    assert Counter(sent) == dict.fromkeys(hosts, 2)


def test_a_directory_that_no_other_machine_has_is_sent(over, make_weighted, tmp_path):
    sources = save(tmp_path / "one", TENSORS), save(tmp_path / "two", NEXT)
    here = after(make_weighted(LocalLauncher()), *sources)
    with deliveries() as sent:
        assert after(make_weighted(over()), *sources) == here
    assert len(sent) == 2 * len(set(sent))


def test_an_adapter_is_merged_with_whole_weights_that_were_sent_before(over, make_weighted, tmp_path):
    whole, factors = save(tmp_path / "whole", ADAPTED), save_adapter(tmp_path / "adapter")
    with offered(ADAPTED | NEXT, FACTORS, adapter=True) as in_memory:
        sources = whole, factors, *in_memory
        here = after(make_weighted(LocalLauncher()), *sources)
        assert after(make_weighted(over()), *sources) == here
    assert len({str(each) for each in here}) == 4


@pytest.mark.parametrize("copies", ["shared", "none"])
def test_a_directory_that_all_machines_have_is_not_sent(over, make_weighted, tmp_path, of_all, copies):
    place, seer = (
        (tmp_path, SeerTable(weights_dir=str(of_all)))
        if copies == "shared"
        else (of_all, SeerTable(weights_dir="none"))
    )
    source = save(place / "one", TENSORS)
    here = after(make_weighted(LocalLauncher()), source)
    with deliveries() as sent:
        assert after(make_weighted(over(), seer=seer), source) == here
    assert sent == []


def test_weights_that_differ_from_their_digest_are_refused_by_the_node(over, make_weighted, tmp_path):
    async def run():
        async with make_weighted(over(), instances=1) as runtime:
            [engine] = runtime._fleet.engines.values()
            with pytest.raises(EngineError) as caught:
                await engine.update_weights(directory(save(tmp_path, TENSORS), "0" * 32), 1)
            return str(caught.value)

    assert re.search(
        "the weights did not reach node .*: those that arrived have the digest [0-9a-f]{32}, not 0{32};",
        play(run()),
    )


def test_an_instance_that_starts_on_another_machine_gets_the_weights_of_the_day(
    machines, over, make_weighted
):
    async def there():
        async with runtime:
            await runtime.update_weights(sources[0])
            first = await rolled_out(runtime)
            victim = machines.node(workers_of(runtime)[0].node_id)
            machines.remove(victim)
            machines.add()
            await aeventually(lambda: runtime._fleet._restarts)
            await runtime._fleet.restarts_over()
            await aeventually(lambda: len(runtime.alive) == 2)
            hosts = {each.host for each in workers_of(runtime)}
            assert victim.name not in hosts
            assert all(map(runtime._fleet.weights.served_by, runtime.alive))
            return [first, await rolled_out(runtime)], victim.name, hosts

    with offered(TENSORS) as sources:
        [here] = after(make_weighted(LocalLauncher()), sources[0])
        runtime = make_weighted(over(cpus=1.0))
        with deliveries() as sent:
            found, victim, hosts = play(there())
    assert found == [here, here]
    assert Counter(sent) == dict.fromkeys({victim, *hosts}, 1)


def test_a_machine_that_dies_in_mid_transfer_takes_nothing_else_with_it(machines, over, make_weighted):
    async def there():
        async with runtime:
            first, second = workers_of(runtime)
            victim = machines.node(first.node_id)
            [supervisor] = victim.processes(SUPERVISOR)
            supervisor.send_signal(signal.SIGSTOP)  # so that it has not fetched them yet
            update = asyncio.ensure_future(runtime.update_weights(sources[0]))
            await aeventually(lambda: launcher._weights._deliveries)
            machines.remove(victim)
            assert await update == 1
            assert runtime._fleet.engines["scripted-1"].worker.started == second
            machines.add()
            await aeventually(lambda: len(runtime.alive) == 2)
            return await rolled_out(runtime)

    launcher = over(cpus=1.0)
    runtime = make_weighted(launcher)
    with offered(TENSORS) as sources:
        [here] = after(make_weighted(LocalLauncher()), sources[0])
        with deliveries() as sent:
            assert play(there()) == here
    assert len(sent) == 2


@pytest.mark.long
def test_a_supervisor_that_ends_in_mid_transfer_takes_no_other_worker_with_it(machines, over, make_weighted):
    async def there():
        async with runtime:
            first, second = workers_of(runtime)
            [machine] = {machines.node(each.node_id) for each in (first, second)}
            # What a machine's processes call themselves is another number here.
            by_pid = {_own_pid(each): each for each in machine.processes(SUPERVISOR)}
            keeper = by_pid[first.supervisor_pid]
            keeper.send_signal(signal.SIGSTOP)
            update = asyncio.ensure_future(runtime.update_weights(sources[0]))
            await aeventually(lambda: launcher._weights._deliveries)
            keeper.send_signal(signal.SIGKILL)
            assert await update == 1
            assert runtime._fleet.engines["scripted-1"].worker.started == second
            await runtime._fleet.restarts_over()
            await aeventually(lambda: len(runtime.alive) == 2)
            return await rolled_out(runtime)

    machine = machines.add(pair=2.0)
    launcher = over(resources={"pair": 1.0})
    runtime = make_weighted(launcher)
    with offered(TENSORS) as sources:
        [here] = after(make_weighted(LocalLauncher()), sources[0])
        assert play(there()) == here
    machines.remove(machine)


def _own_pid(process):
    """Return a process's id in its own namespace."""
    status = Path(f"/proc/{process.pid}/status").read_text()
    return int(re.search(r"NSpid:.*\s(\d+)\n", status)[1])


def test_a_machine_without_the_model_or_with_another_is_refused_by_its_name(
    machines, over, make_runtime, tmp_path
):
    def refusal():
        async def start():
            with pytest.raises(EngineError) as caught:
                await make_runtime(over(), instances=1, model_dir=str(tmp_path)).start()
            return str(caught.value)

        return play(start())

    (tmp_path / "config.json").write_text("{}")
    names = "|".join(each.name for each in machines.machines)
    assert re.search(
        rf"the model in {tmp_path} cannot be read on ({names}): No such file or directory; copy", refusal()
    )
    for machine in machines.machines:
        own = Path(f"/proc/{machine.processes()[0].pid}/root{tmp_path}")
        own.mkdir(parents=True)
        (own / "config.json").write_text('{"another": 1}')
    assert re.search(rf"the model in {tmp_path} on ({names}) is not the runtime's: its files", refusal())
    for machine in machines.machines:
        own = Path(f"/proc/{machine.processes()[0].pid}/root{tmp_path}")
        (own / "config.json").write_text("{}")

    async def start():
        async with make_runtime(over(), instances=1, model_dir=str(tmp_path)) as runtime:
            return await rolled_out(runtime)

    assert play(start())
