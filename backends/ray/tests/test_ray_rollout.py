"""Rollouts whose workers run on the nodes of a Ray cluster; parts of it are killed in mid-rollout."""

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import structlog
from seer_worker.client.local import LocalLauncher
from seer_worker.client.worker_log import WorkerLog

from seer_core.errors import ConfigError, EngineError

ray = pytest.importorskip("ray")

from ray_rollouts import (  # noqa: E402
    HERE,
    LIMIT_S,
    Reaper,
    gone,
    patient,
    places,
    play,
    some_groups,
    tokens,
    tokens_in_group,
    workers_of,
)
from seer_ray import cluster, plugin  # noqa: E402
from seer_ray.launcher import RayLauncher, RayWorker  # noqa: E402
from seer_ray.places import TakenPlaceError, reserve  # noqa: E402
from seer_ray.settings import Settings  # noqa: E402
from seer_ray.supervisor import Started  # noqa: E402
from seer_ray.watch import Watch  # noqa: E402

from tests.support.eventually import aeventually, eventually  # noqa: E402
from tests.support.patience import PATIENCE_S  # noqa: E402

HALF = 0.5


@pytest.fixture
def launcher(nodes):
    return RayLauncher(patient(nodes.address))


def test_a_rollout_on_a_cluster_has_the_tokens_of_child_processes(launcher, make_runtime, tmp_path):
    async def run(launcher):
        async with make_runtime(launcher) as runtime:
            started = [] if isinstance(launcher, LocalLauncher) else workers_of(runtime)
            return tokens(await runtime.rollout(some_groups()).wait()), started

    here, _ = play(run(LocalLauncher()))

    async def there():
        found, started = await run(launcher)
        assert len({each.node_id for each in started}) == 2
        await gone(*(each.pid for each in started), *(each.supervisor_pid for each in started))
        assert await places() == 0
        assert not any(Path(each.scratch).exists() for each in started)
        return found

    assert play(there()) == here
    log = (tmp_path / "logs" / "scripted-1.log").read_text()
    assert log.count("scripted-1 runs") == 2


@pytest.mark.parametrize("part", ["worker", "supervisor", "raylet"])
def test_what_is_killed_in_mid_rollout_is_a_loss_and_changes_no_token(nodes, launcher, make_runtime, part):
    victims = []

    def kill():
        victim = workers_of(runtime)[0]
        victims.append(victim)
        if part == "raylet":
            nodes.kill_raylet(victim.node_id)
        else:
            os.kill(victim.pid if part == "worker" else victim.supervisor_pid, signal.SIGKILL)

    async def there():
        async with runtime:
            first, *others = some_groups()
            rollout = runtime.open()
            rollout.add([first])
            await reaper.lost.wait()
            rollout.add(others)
            rollout.close()
            result = await rollout.wait()
            await gone(victims[0].pid, victims[0].supervisor_pid)
            await runtime._fleet.restarts_over()
            await aeventually(lambda: len(runtime.alive) == 2)
            started = workers_of(runtime)
            assert victims[0].pid not in {each.pid for each in started}
        await gone(*(each.pid for each in started), *(each.supervisor_pid for each in started))
        return result

    runtime = make_runtime(LocalLauncher())

    async def here():
        async with runtime:
            return await runtime.rollout(some_groups()).wait()

    expected = tokens(play(here()))
    reaper = Reaper(kill)
    runtime = make_runtime(launcher, reaper, step_s=0.02)
    with structlog.testing.capture_logs() as logs:
        result = play(there())
    assert tokens(result) == expected
    assert result.summary.instances_lost == 1
    [loss] = [each for each in logs if each["event"] == "instance_lost"]
    assert "on node" in loss["reason"]
    if part == "raylet":
        nodes.remove(nodes.node(victims[0].node_id))
        nodes.add()


async def no_places():
    return not await places()


@pytest.fixture
def refused(make_runtime, nodes):
    """Return a function that starts a runtime in vain and returns the reason; it leaves no place behind."""

    def refused(changes, **launch):
        async def start():
            with pytest.raises(EngineError) as caught:
                await make_runtime(launcher, **launch, instances=1).start()
            await aeventually(no_places)
            return str(caught.value)

        launcher = RayLauncher(patient(nodes.address, **changes))
        return play(start())

    return refused


@pytest.mark.parametrize(
    ("changes", "launch", "reason"),
    [
        (
            {"gpus": 2},
            {},
            r"did not start: the Ray cluster has no place for it: none of the 4 nodes has 1 CPU, 2 GPU; the"
            r" most that one has is 1 CPU, 0 GPU; add a node, or lower what \[launcher\.ray\] asks for",
        ),
        ({"labels": {"rack": "b"}}, {}, "no place for it: none of the 4 nodes has the labels rack=b; add"),
        (
            {},
            {"interpreter": "/no/such/python"},
            "node .* cannot start a worker: /no/such/python: No such file or directory; `python` in its",
        ),
        ({}, {"interpreter": "/bin/false"}, "its worker on node .* exited with status 1\nthe last lines of"),
        ({"host": "192.0.2.1"}, {}, r"workers cannot connect to 192\.0\.2\.1, port 0: .*; correct host and"),
    ],
    ids=["gpus", "labels", "no-python", "another-python", "host"],
)
def test_a_start_that_cannot_succeed_is_refused_in_one_sentence(refused, changes, launch, reason):
    assert re.search(reason, refused(changes, **launch))


def test_a_port_in_use_is_refused_in_one_sentence(refused):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        place = {"host": "127.0.0.1", "port": taken.getsockname()[1]}
        reason = refused(place)
    assert f"workers cannot connect to 127.0.0.1, port {place['port']}: Address already in use" in reason


@pytest.mark.parametrize(
    ("change", "environment", "reason"),
    [
        ("ray.__version__ = '2.59.0'", {}, "Version mismatch: The cluster was started with: Ray: 2.60.0 "),
        ("", {"RAY_AUTH_TOKEN": "0" * 64, "RAY_NUM_REDIS_GET_RETRIES": "1"}, "Failed to connect to Ray"),
    ],
    ids=["version", "token"],
)
def test_a_cluster_that_does_not_take_this_process_is_named_with_the_remedy(
    nodes, change, environment, reason
):
    done = subprocess.run(
        [sys.executable, "-c", JOIN.format(change=change), nodes.address],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        env=os.environ | environment,
    )
    assert done.stdout.startswith(f"no Ray cluster at {nodes.address}: "), done.stderr
    assert reason in done.stdout
    assert "start one with `ray start`, of this version of Ray and Python and with this token" in done.stdout


JOIN = """
import os
import sys
import ray
from seer_core.errors import EngineError
from seer_ray import cluster
from seer_ray.settings import Settings
{change}
try:
    cluster.join(Settings(address=sys.argv[1]))
except EngineError as error:
    print(error, flush=True)
os._exit(0)
"""


@pytest.mark.parametrize(
    ("changes", "ok", "finding", "remedy"),
    [
        ({}, True, "has room for 3 instances now (", ""),
        ({"cpus": HALF, "min_instances": 7}, False, "); min_instances is 7", "add a node"),
        ({"gpus": 1}, False, "none of the 4 nodes has 1 CPU, 1 GPU", "add a node, or lower"),
        ({"address": "127.0.0.1:1"}, False, "no Ray cluster at 127.0.0.1:1: Connection", "start one with"),
    ],
    ids=["room", "little-room", "no-room", "no-cluster"],
)
def test_doctor_counts_the_places_of_a_cluster(nodes, changes, ok, finding, remedy):
    *_, check = plugin.seer_doctor(Settings(**{"address": nodes.address} | changes))
    assert (check.ok, finding in check.finding, check.remedy.startswith(remedy)) == (ok, True, True), check


def test_a_lost_instance_waits_for_a_node_and_the_log_says_what_is_missing(nodes):
    async def wait():
        task = asyncio.ensure_future(launcher.find_place("scripted-0", missing.append))
        await aeventually(lambda: missing)
        assert not task.done()
        node = nodes.add(late=1.0)  # on the main thread, whose signals it handles
        await task
        nodes.remove(node)
        assert await places() == 0

    missing = []
    launcher = RayLauncher(patient(nodes.address, resources={"late": 1.0}))
    with structlog.testing.capture_logs() as logs:
        play(wait())
    [first, *_] = [each for each in logs if each["event"] == "instance_waits_for_place"]
    assert missing[0] == first["missing"]
    assert first["instance"] == "scripted-0"
    assert "none of the 4 nodes has 1 CPU, 1 late" in first["missing"]


@pytest.fixture
def make_group(nodes):
    """Return a function that makes a placement group, as a trainer would."""
    made = []

    def make(name="", bundles=2):
        cluster.join(patient(nodes.address))
        group = ray.util.placement_group([{"CPU": HALF}] * bundles, strategy="SPREAD", name=name)
        assert group.wait(PATIENCE_S)
        made.append(group)
        return group

    yield make
    for group in made:
        ray.util.remove_placement_group(group)


def settings_of(nodes, *groups, **changes):
    return patient(nodes.address, **{"cpus": HALF, "placement_groups": list(groups)} | changes)


def until_free(place):
    """Wait for a bundle; the head counts what is free a moment later."""
    eventually(lambda: place.wait(0.05))


def state(group):
    return ray.util.placement_group_table(group)["state"]


def test_instances_take_bundles_of_a_group_restart_in_it_and_leave_it(
    nodes, make_group, make_runtime, expected
):
    def kill():
        victims.append(workers_of(runtime)[0])
        os.kill(victims[0].pid, signal.SIGKILL)

    async def there():
        async with runtime:
            assert await places() == 1
            rollout = runtime.open()
            first, *others = some_groups()
            rollout.add([first])
            await reaper.lost.wait()
            rollout.add(others)
            rollout.close()
            result = await rollout.wait()
            await runtime._fleet.restarts_over()
            started = workers_of(runtime)
            assert victims[0].pid not in {each.pid for each in started}
        await gone(*(each.supervisor_pid for each in started))
        return result, started

    group = make_group("trainer")
    victims = []
    reaper = Reaper(kill)
    runtime = make_runtime(RayLauncher(settings_of(nodes, "trainer")), reaper, step_s=0.02)
    result, started = play(there())
    assert tokens(result) == expected
    assert result.summary.instances_lost == 1
    bundles = ray.util.placement_group_table(group)["bundles_to_node_id"]
    assert sorted(each.node_id for each in started) == sorted(bundles.values())
    assert state(group) == "CREATED"


def test_a_task_of_a_ray_program_rolls_out_in_the_programs_group(make_group, expected, tmp_path):
    group = make_group("trainer")
    path = os.pathsep.join([HERE, os.environ.get("PYTHONPATH", "")])
    options = {"num_cpus": 0, "runtime_env": {"env_vars": {"PYTHONPATH": path}}}
    answer = ray.remote(tokens_in_group).options(**options).remote(tmp_path / "logs", "trainer", HALF)
    assert ray.get(answer, timeout=LIMIT_S) == expected
    assert state(group) == "CREATED"


@pytest.mark.parametrize("given", [False, True], ids=["own-groups", "one-group"])
def test_two_runs_in_one_namespace_do_not_disturb_each_other(
    nodes, make_group, make_runtime, expected, given
):
    def kill():
        os.kill(workers_of(struck)[0].pid, signal.SIGKILL)

    async def run(runtime):
        async with runtime:
            return await runtime.rollout(some_groups()).wait()

    async def both():
        return await asyncio.gather(run(struck), run(other))

    groups = [make_group(bundles=4).id.hex()] if given else []
    launchers = [RayLauncher(settings_of(nodes, *groups)) for _ in range(2)]
    struck = make_runtime(launchers[0], Reaper(kill), step_s=0.01)
    other = make_runtime(launchers[1], step_s=0.01)
    first, second = play(both())
    assert tokens(first) == tokens(second) == expected
    assert (first.summary.instances_lost, second.summary.instances_lost) == (1, 0)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (
            {"placement_groups": ["missing"]},
            r"no placement group 'missing' in namespace '.+', and none with that id; correct",
        ),
        (
            {"cpus": 1.0},
            "none of the 1 bundles of placement group 'full' has 1 CPU; the most that one has is 0.5 CPU; add"
            " a bundle, or lower",
        ),
        ({"launch_timeout_s": 2.0}, "1 of the 1 bundles of placement group 'full' have 0.5 CPU, and all of"),
    ],
    ids=["no-group", "small-bundles", "no-free-bundle"],
)
def test_a_group_without_room_is_refused_in_one_sentence(nodes, make_group, make_runtime, changes, reason):
    async def start():
        with pytest.raises(EngineError) as caught:
            await make_runtime(RayLauncher(settings_of(nodes, "full", **changes)), instances=1).start()
        return str(caught.value)

    group = make_group("full", bundles=1)
    taken = reserve(settings_of(nodes, "full"), "other")
    until_free(taken)
    taken.make_supervisor()
    assert re.search(reason, play(start()))
    taken.release()
    assert state(group) == "CREATED"


def test_a_bundle_goes_to_one_of_two_instances_that_want_it_at_once(nodes, make_group):
    make_group("single", bundles=1)
    first, second = (reserve(settings_of(nodes, "single"), name) for name in ("a", "b"))
    until_free(first)
    until_free(second)
    first.make_supervisor()
    with pytest.raises(TakenPlaceError):
        second.make_supervisor()
    assert not second.wait(0.0)
    first.release()
    second.release()


def test_labels_and_placement_groups_exclude_each_other():
    with pytest.raises(ConfigError, match="leave out one"):
        plugin.seer_make_launcher(Settings(labels={"rack": "a"}, placement_groups=["trainer"]))


def test_a_worker_whose_node_answers_no_more_ends_twice_with_a_reason(tmp_path):
    async def story():
        async def never():
            await asyncio.Event().wait()

        def silent():
            raise ray.exceptions.GetTimeoutError

        released = []
        place = SimpleNamespace(release=partial(released.append, "place"))
        ours, theirs = socket.socketpair()
        with theirs:
            streams = await asyncio.open_unix_connection(sock=ours)
            supervisor = SimpleNamespace(end=SimpleNamespace(remote=silent))
            log = WorkerLog(tmp_path / "log", True)
            ended = asyncio.ensure_future(never())
            leave = partial(released.append, "port")
            worker = RayWorker(
                *streams, Started("h", "n", 1), place, supervisor, ended, log, leave, nullcontext, Watch(list)
            )
            reasons = [await worker.end()]
            with pytest.raises(EOFError):
                await worker.receive()
            reasons.append(await worker.end(2.0))
        assert reasons == ["gave no exit status on node h"] * 2
        assert released == ["port", "place"]

    play(story())


def test_a_cluster_that_is_started_here_outlives_the_call_that_started_it_and_leaves_sigterm_alone():
    done = subprocess.run([sys.executable, "-c", ALONE], capture_output=True, text=True, timeout=LIMIT_S)
    assert done.stdout.splitlines()[-1:] == ["reserved"], done.stderr
    assert "SIGTERM received" not in done.stderr


ALONE = """
import asyncio
import os
import signal
from seer_ray import cluster, places
from seer_ray.settings import Settings
from seer_host.threads import in_thread

async def main():
    asked_to_end = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, asked_to_end.set)
    await in_thread(60, cluster.join, Settings())
    place = await in_thread(10, places.reserve, Settings(), "alone")
    assert await in_thread(60, place.wait, 50)
    os.kill(os.getpid(), signal.SIGTERM)
    await asked_to_end.wait()
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)  # Ray's handler would abort the process
    print("reserved")

asyncio.run(main())
"""
