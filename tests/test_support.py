"""The support of tests: what a wait that fails shows, and time that jumps."""

import asyncio
import socket
import subprocess
import threading

import pytest
from seer_host.ports import reserved_port

from seer_core.model.events import ChunkFinished, Dispatch
from tests.support import patience
from tests.support.eventually import aeventually, eventually
from tests.support.killer import Killer
from tests.support.processes import alive, children_of, descendants
from tests.support.virtual_time import later, run_in_virtual_time


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr(patience, "PATIENCE_S", 0.0)


def test_a_wait_that_fails_shows_threads_tasks_processes_and_logs(impatient, tmp_path):
    (tmp_path / "one.log").write_text("first\nout of memory\n")
    over = threading.Event()
    thread = threading.Thread(target=over.wait, name="a-thread-of-the-test")
    thread.start()
    child = subprocess.Popen(["sleep", "600"])

    async def a_step_that_hangs():
        await asyncio.Event().wait()

    async def story():
        task = asyncio.create_task(a_step_that_hangs(), name="a-task-of-the-test")
        await asyncio.sleep(0)
        try:
            await aeventually(list, "an answer", logs=[tmp_path / "one.log", tmp_path / "none.log"])
        finally:
            task.cancel()

    try:
        with pytest.raises(AssertionError) as caught:
            asyncio.run(story())
        with pytest.raises(AssertionError, match=r"eventually\(lambda: over.is_set\(\)\)"):
            eventually(lambda: over.is_set())
    finally:
        over.set()
        thread.join()
        child.kill()
        child.wait()
    account = str(caught.value)
    for part in (
        "it did not happen within 0 s: an answer",
        "the last value: []",
        "the thread a-thread-of-the-test:",
        "the task a-task-of-the-test:",
        "in a_step_that_hangs",
        f"{child.pid} of ",
        ": sleep 600",
        "one.log:\nfirst\nout of memory",
        "No such file or directory",
    ):
        assert part in account


def test_a_process_that_was_not_waited_for_is_dead():
    child = subprocess.Popen(["sh", "-c", "sleep 600 & echo $!; wait"], stdout=subprocess.PIPE, text=True)
    grandchild = int(child.stdout.readline())
    try:
        assert alive(child.pid)
        assert children_of(child.pid) == [grandchild]
        assert {child.pid, grandchild} <= set(descendants())
        child.kill()
        eventually(lambda: not alive(child.pid))
    finally:
        subprocess.run(["kill", str(grandchild)], check=True)
        child.wait()
        child.stdout.close()
    assert not alive(child.pid)


def test_virtual_time_jumps_from_timer_to_timer_and_stands_still_for_threads():
    async def story():
        loop, times = asyncio.get_running_loop(), []
        await asyncio.gather(*(later(seconds) for seconds in (3600, 60, 0.5)))
        times.append(loop.time())
        limit = loop.call_later(0.001, times.append, "too late")
        thread = threading.Timer(0.05, times.append, ["a thread"])
        thread.start()
        await aeventually(lambda: len(times) > 1)
        thread.join()
        limit.cancel()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(10):
                await asyncio.Event().wait()
        return [*times, loop.time()]

    assert run_in_virtual_time(story()) == [3600, "a thread", 3610]


def test_a_reserved_port_refuses_connections_and_is_given_to_the_server_that_names_it_alone():
    with reserved_port() as port:
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port))
        with socket.create_server(("127.0.0.1", port)) as server:
            with socket.create_connection(("127.0.0.1", port)):
                server.accept()[0].close()
            with pytest.raises(OSError, match="in use"):
                socket.create_server(("127.0.0.1", port))


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this machine has no IPv6")
@pytest.mark.parametrize("address", ["127.0.0.2", "::1"])
def test_a_reserved_port_is_reserved_at_all_addresses(address):
    """A connection that another process makes from one of them would keep a server of all from it."""
    with (
        reserved_port() as port,
        socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as other,
        pytest.raises(OSError, match="in use"),
    ):
        other.bind((address, port))


def test_a_killer_kills_once_in_the_event_that_sends_a_chunk_to_its_instance():
    struck = []
    killer = Killer(None, after=2, of=ChunkFinished, instance="b")

    def finish(*instances):
        sent = [Dispatch("g/1", each, 16, 16, False) for each in instances]
        killer.observe(0.0, ChunkFinished("g/0", "a", 4, False), sent)

    for _ in range(3):
        finish("b")
    killer.kill = struck.append
    finish("b")
    finish("a")
    finish()
    assert (struck, killer.killed) == ([], None)
    finish("a", "b")
    finish("b")
    assert (struck, killer.killed) == (["b"], "b")
