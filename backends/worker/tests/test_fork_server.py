"""A forked worker is as one that is started anew, and neither its server nor its siblings reach into it."""

import asyncio
import itertools
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import textwrap
from contextlib import suppress
from pathlib import Path

import attrs
import pytest
import structlog
from seer_host.frames import Frames, encode
from seer_worker.client import fork_server
from seer_worker.client.local import LocalLauncher
from seer_worker.client.process_client import Launch, ProcessClient
from seer_worker.fork_wire import Exited, Fork, Forked, FromServer

from seer_core.errors import EngineError
from tests.support.eventually import aeventually, eventually

HERE = str(Path(__file__).parent)


class Sink:
    """Keeps the facts that toys report, and losses."""

    def __init__(self):
        self.facts, self.losses, self.lost_one = {}, [], asyncio.Event()

    def degraded(self, degradation):
        self.facts[degradation.instance_id] = json.loads(degradation.reason)

    def lost(self, instance_id, reason):
        self.losses.append(reason)
        self.lost_one.set()


@pytest.fixture(autouse=True)
def _servers(monkeypatch):
    """Each test has servers of its own, which end with it; those of engines that other tests share stay."""
    monkeypatch.setattr(fork_server, "_servers", [])
    yield
    fork_server.end_all()


@pytest.fixture
def events(monkeypatch):
    """The events of the log."""
    found = []
    structlog.configure(processors=[lambda logger, method, event: found.append(event) or drop()])
    return found


def drop():
    raise structlog.DropEvent


@pytest.fixture
def launch(tmp_path):
    return Launch(
        instance="forked:Facts",
        settings={},
        environment={**os.environ, "PYTHONPATH": HERE, "OPENBLAS_NUM_THREADS": "1"},
        launcher=LocalLauncher("forked:preload"),
        log_dir=tmp_path / "logs",
        start_timeout_s=120.0,
        stop_timeout_s=5.0,
        control_timeout_s=120.0,
        silence_timeout_s=120.0,
        cannot_draft="cannot draft",
        ignores_kv_pool=True,
    )


def play(story):
    asyncio.run(asyncio.wait_for(story(), 240))


async def start(launch, sink, name="toy-0"):
    engine = ProcessClient(name, launch)
    await engine.start(sink)
    return engine


def facts_of(launch, *names):
    """Start instances beside each other, and return what each has."""
    sink = Sink()

    async def story():
        engines = [await start(launch, sink, name) for name in names]
        for engine in engines:
            await engine.stop()

    play(story)
    return [sink.facts[name] for name in names]


def test_a_forked_worker_has_what_a_started_one_has(launch):
    started_launch = attrs.evolve(launch, launcher=LocalLauncher())
    [forked], [started] = facts_of(launch, "toy-0"), facts_of(started_launch, "toy-0")
    for facts in (forked, started):
        assert facts["pid"] == facts["session"] == facts["group"]
    for name in (
        *("environment", "directory", "umask", "files", "core", "cpus", "temporary"),
        *("interrupt", "terminate", "path"),
    ):
        assert forked[name] == started[name], name
    assert forked["environment"]["SET_BY_AN_IMPORT"] == "1"
    kinds = [
        sorted(target.split(":")[0].split("[")[0] for target in facts["fds"].values())
        for facts in (forked, started)
    ]
    assert len(kinds[0]) - kinds[0].count("socket") == len(kinds[1]) - kinds[1].count("socket")
    # its connection, and the socket that its server had open before
    assert (kinds[0].count("socket"), kinds[1].count("socket")) == (2, 2)


def test_what_torch_compiles_lies_in_the_users_cache_however_a_worker_is_started(launch, tmp_path):
    variables = {**launch.environment, "XDG_CACHE_HOME": str(tmp_path / "cache")}
    variables.pop("TORCHINDUCTOR_CACHE_DIR", None)
    for launcher in (LocalLauncher("forked:preload_torch"), LocalLauncher()):
        [facts] = facts_of(attrs.evolve(launch, launcher=launcher, environment=variables), "toy-0")
        assert facts["environment"]["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "cache/seer/torchinductor")


def test_siblings_share_neither_descriptors_nor_environment_nor_randomness(launch, tmp_path):
    first = attrs.evolve(launch, environment={**launch.environment, "CUDA_VISIBLE_DEVICES": "secret"})
    second = attrs.evolve(launch, environment={**launch.environment, "TMPDIR": str(tmp_path)})
    sink = Sink()

    async def story():
        engines = [await start(first, sink, "a"), await start(second, sink, "b")]
        for engine in engines:
            await engine.stop()

    play(story)
    a, b = sink.facts["a"], sink.facts["b"]
    assert a["parent"] == b["parent"]
    assert a["random"] != b["random"]
    assert a["environment"]["CUDA_VISIBLE_DEVICES"] == "secret"
    assert "secret" not in json.dumps(b["environment"])
    assert b["temporary"] == str(tmp_path)
    own = [
        {target for target in facts["fds"].values() if target.startswith(("socket", "pipe"))}
        for facts in (a, b)
    ]
    inherited = own[0] & own[1]  # a socket that the imported module has opened; standard input
    assert len(inherited) == 1
    assert (
        len(own[0] - inherited) == len(own[1] - inherited) == 2
    )  # connection, and pipe of the runtime's death


def test_limits_directory_and_mask_are_those_of_the_runtime_when_it_starts_the_worker(
    launch, tmp_path, monkeypatch
):
    facts_of(launch, "toy-0")  # the server is there already
    monkeypatch.chdir(tmp_path)
    files, mask = resource.getrlimit(resource.RLIMIT_NOFILE), os.umask(0o27)
    cpus = os.sched_getaffinity(0)
    resource.setrlimit(resource.RLIMIT_NOFILE, (files[0] - 1, files[1]))
    os.sched_setaffinity(0, {min(cpus)})
    try:
        [facts] = facts_of(launch, "toy-0")
    finally:
        os.umask(mask)
        resource.setrlimit(resource.RLIMIT_NOFILE, files)
        os.sched_setaffinity(0, cpus)
    assert facts["directory"] == str(tmp_path)
    assert facts["umask"] == "0027"
    assert facts["files"] == [files[0] - 1, files[1]]
    assert facts["cpus"] == [min(cpus)]


def test_one_server_serves_sessions_that_follow_each_other_and_restarts(launch, events):
    parents = {facts["parent"] for facts in facts_of(launch, "a", "b") + facts_of(launch, "a")}
    assert len(parents) == 1
    assert [event["event"] for event in events].count("worker_forked") == 3
    sink = Sink()

    async def story():
        engine = await start(launch, sink)
        os.kill(engine.worker.pid, signal.SIGKILL)
        await sink.lost_one.wait()
        assert sink.losses == ["killed by SIGKILL"]
        await engine.start(sink)
        await engine.stop()

    play(story)
    assert sink.facts["toy-0"]["parent"] in parents


def test_workers_live_on_when_their_server_dies_and_the_next_is_started_in_the_old_way(launch, events):
    sink = Sink()

    async def story():
        first = await start(launch, sink, "first")
        server = sink.facts["first"]["parent"]
        os.kill(server, signal.SIGKILL)
        second = await start(launch, sink, "second")
        assert sink.facts["second"]["parent"] == os.getpid()
        [event] = [event for event in events if event["event"] == "worker_started"]
        assert event["not_forked"] == "the fork server killed by SIGKILL"
        await first.reset_cache()  # it answers
        third = await start(launch, sink, "third")
        assert sink.facts["third"]["parent"] not in (server, os.getpid())
        pid = first.worker.pid
        os.kill(pid, signal.SIGKILL)
        await sink.lost_one.wait()
        assert sink.losses == ["ended, and so has its fork server, which had the exit status"]
        for engine in (first, second, third):
            await engine.stop()

    play(story)


def test_an_engine_whose_import_fails_is_started_in_the_old_way_and_not_imported_again(launch, events):
    failing = attrs.evolve(launch, launcher=LocalLauncher("forked:preload_and_fail"))
    for facts in facts_of(failing, "a", "b"):
        assert facts["parent"] == os.getpid()
    reasons = [event["not_forked"] for event in events if event["event"] == "worker_started"]
    wrote = "ImportError: libtoy.so: cannot open shared object file"
    assert reasons == [f"the fork server exited with status 1; it wrote: {wrote}"] * 2
    assert len(fork_server.servers()) == 1


def test_a_process_with_threads_is_not_forked(launch, events):
    threaded = attrs.evolve(launch, launcher=LocalLauncher("forked:preload_with_a_thread"))
    [facts] = facts_of(threaded, "toy-0")
    assert facts["parent"] == os.getpid()
    [event] = [event for event in events if event["event"] == "worker_started"]
    assert event["not_forked"] == "it has 2 threads, of which a fork would have one"


def test_a_directory_on_the_path_that_changes_no_import_needs_no_server_of_its_own(launch, tmp_path):
    (tmp_path / "brought_along.py").write_text("")
    paths = os.pathsep.join([str(tmp_path), HERE])
    more = attrs.evolve(
        launch,
        environment={**launch.environment, "PYTHONPATH": paths},
        settings={"import": "brought_along"},
    )
    [plain], [with_path] = facts_of(launch, "a"), facts_of(more, "b")
    assert plain["parent"] == with_path["parent"]
    assert with_path["imported"] == str(tmp_path / "brought_along.py")
    assert with_path["path"][:2] == [str(tmp_path), HERE]
    assert with_path["environment"]["PYTHONPATH"] == paths


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("toys.py", "from_elsewhere = True\nfrom toys_here import *"),
        ("sitecustomize.py", ""),
        ("plugin-1.0.dist-info/entry_points.txt", "[numpy.mine]\nmine = brought_along\n"),
    ],
)
def test_one_that_would_change_an_import_gets_a_server_of_its_own(launch, tmp_path, name, text):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text(text)
    (tmp_path / "toys_here.py").write_text(Path(HERE, "toys.py").read_text())
    paths = os.pathsep.join([str(tmp_path), HERE])
    other = attrs.evolve(launch, environment={**launch.environment, "PYTHONPATH": paths})
    [plain], [elsewhere] = facts_of(launch, "a"), facts_of(other, "b")
    assert plain["parent"] != elsewhere["parent"]
    assert os.getpid() not in (plain["parent"], elsewhere["parent"])


def test_other_variables_that_an_import_may_read_get_a_server_of_their_own(launch):
    other = attrs.evolve(launch, environment={**launch.environment, "TOY_LOG_LEVEL": "debug"})
    [plain], [debugging] = facts_of(launch, "a"), facts_of(other, "b")
    assert plain["parent"] != debugging["parent"]
    assert debugging["environment"]["TOY_LOG_LEVEL"] == "debug"


def test_servers_without_workers_make_room_for_others(launch):
    sink = Sink()

    async def story():
        engines = []
        for number in range(5):
            environment = {**launch.environment, "TOY_NUMBER": str(number)}
            engine = await start(attrs.evolve(launch, environment=environment), sink, str(number))
            if number == 1:
                engines.append(engine)
            else:
                await engine.stop()
        assert len(fork_server.servers()) == 3
        await engines[0].reset_cache()  # its server was not ended
        await engines[0].stop()

    play(story)
    assert sink.losses == []


def test_a_machine_without_room_for_a_process_is_an_error_with_its_remedy(launch, monkeypatch):
    message = "this machine cannot start a process: Cannot allocate memory; free what it lacks"

    async def fail(*arguments):
        raise OSError(12, os.strerror(12))

    monkeypatch.setattr("seer_worker.client.local.fork", fail)
    with pytest.raises(EngineError, match=f"instance 'toy-0' did not start: {message}"):
        facts_of(launch, "toy-0")


def test_a_server_without_descriptors_left_gives_the_reason(launch, events):
    sink = Sink()

    async def story():
        engines = [await start(launch, sink, "first")]
        server = sink.facts["first"]["parent"]
        await aeventually(lambda: not any("first" in file for file in files_of(server)))
        settled = files_of(server)
        leave_room(server, 5)  # for what a request brings
        flaw = "this machine cannot start a process: Too many open files; free what it lacks"
        with pytest.raises(EngineError, match=flaw):
            await start(launch, sink, "no room for its pidfd")
        await aeventually(lambda: files_of(server) == settled)  # it answers before it closes what came
        leave_room(server, 0)
        engines.append(await start(launch, sink, "no room for the request"))
        [event] = [event for event in events if event["event"] == "worker_started"]
        assert event["not_forked"] == "the fork server gave no answer"
        for engine in engines:
            await engine.stop()

    play(story)


def files_of(pid):
    """Return what a process has open."""
    found = []
    for name in os.listdir(f"/proc/{pid}/fd"):
        with suppress(FileNotFoundError):  # closed meanwhile
            found.append(os.readlink(f"/proc/{pid}/fd/{name}"))
    return sorted(found)


def leave_room(pid, descriptors):
    """Let a process open so many more files."""
    used = {int(name) for name in os.listdir(f"/proc/{pid}/fd")}
    limit = next(itertools.islice((fd for fd in itertools.count() if fd not in used), descriptors, None))
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (limit, resource.prlimit(pid, resource.RLIMIT_NOFILE)[1]))


def test_a_driver_that_is_killed_takes_server_and_workers_with_it(launch, tmp_path):
    code = f"""
    import asyncio, os, sys
    from pathlib import Path
    sys.path.insert(0, {HERE!r})
    from seer_worker.client.local import LocalLauncher

    async def main():
        launcher = LocalLauncher("forked:preload")
        environment = {{**os.environ, "PYTHONPATH": {HERE!r}, "OPENBLAS_NUM_THREADS": "1"}}
        workers = [
            await launcher.launch("toy", sys.executable, environment, Path({str(tmp_path)!r}, "log"), True)
            for n in range(2)
        ]
        from seer_worker.client import fork_server
        print("pids", *[worker.pid for worker in workers], fork_server.servers()[0].pid, flush=True)
        await asyncio.Event().wait()

    asyncio.run(main())
    """
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, text=True
    ) as driver:
        pids = [int(pid) for pid in pid_line(driver.stdout).split()[1:]]
        assert len(pids) == 3
        driver.kill()
        eventually(lambda: not any(map(runs, pids)), "the driver's server and workers are gone")


def pid_line(output):
    return next(line for line in output if line.startswith("pids"))


def runs(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_a_start_that_is_given_up_leaves_no_worker(launch):
    def children():
        [server] = fork_server.servers()
        return Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text().split()

    async def story():
        ours, theirs = socket.socketpair()
        with ours, theirs, open(os.devnull, "wb") as log:
            arguments = sys.executable, "forked:preload", "toy", launch.environment, theirs, log.fileno()
            begun = asyncio.create_task(fork_server.fork(*arguments))
            await asyncio.sleep(0)
            begun.cancel()
            with pytest.raises(asyncio.CancelledError):
                await begun
            worker = await fork_server.fork(*arguments)
            eventually(lambda: children() == [str(worker.pid)], "the one given up is gone")
            assert await asyncio.to_thread(worker.end) == "killed by SIGTERM"
            assert children() == []

    play(story)


def test_an_exit_status_that_comes_with_the_answer_counts():
    with subprocess.Popen(["true"]) as ended:
        ours, theirs = socket.socketpair()
        _, alive = os.pipe()
        theirs.sendall(encode(Forked(ended.pid)) + encode(Exited(3)))
        frames = Frames(FromServer)
        request = Fork("toy-0", {}, 0o22, {}, [0])
        assert asyncio.run(fork_server._ask(ours, request, frames)) == Forked(ended.pid)
        process = fork_server.ForkedProcess(ended.pid, alive, ours, frames)
        assert process.wait() == 3
        theirs.close()
        assert process.end() == "exited with status 3"
