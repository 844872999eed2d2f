"""A transfer of weights between two ends in one process: what arrives, and what is refused."""

import asyncio
import os
import ssl
import subprocess
from pathlib import Path

import msgspec
import pytest
from seer_worker.client.worker_port import WorkerPort
from seer_worker.weights.checkpoint import Directory

pytest.importorskip("ray")

from ray_rollouts import play
from seer_ray import keeper as keeping
from seer_ray.keeper import WeightKeeper, hosts
from seer_ray.weights import cargo_of, paths_of, send_files
from weight_updates import NEXT, TENSORS, offered, save

from seer_core.ports.weights import directory


def held():
    """Return this process's weights in memory."""
    found = [os.readlink(each) for each in Path("/proc/self/fd").iterdir() if each.exists()]
    return sum("memfd:seer-weights" in each for each in found)


def transfer(cargo, paths, spoil=bytes):
    """Return what is fetched, and what a source reads there; ``spoil`` makes another secret."""

    async def run():
        port, keeper = WorkerPort("127.0.0.1"), WeightKeeper()
        await port.open()
        expected = port.expect()
        fetching = asyncio.create_task(
            keeper.fetch("key", cargo, (port.host, port.port), spoil(expected.secret))
        )
        try:
            await asyncio.wait({fetching, expected.streams}, return_when=asyncio.FIRST_COMPLETED)
            if expected.streams.done():
                _, writer = expected.streams.result()
                await send_files(writer, paths, 30.0)
                writer.close()
            fetched = await fetching
            if fetched.flaw:
                return fetched.flaw
            tensors = Directory({"directory": fetched.place}).tensors()
            return {name: tensor.tolist() for name, tensor in tensors}
        finally:
            keeper.free("key")
            port.forget(expected)
            port.close()

    before = held()
    found = play(run())
    assert held() == before
    return found


@pytest.fixture
def checkpoint(tmp_path):
    return save(tmp_path / "checkpoint", TENSORS)


@pytest.fixture
def cargo(checkpoint):
    return cargo_of(directory(checkpoint))


def test_the_files_of_a_directory_arrive_whole_and_are_freed(cargo):
    assert transfer(cargo, paths_of(cargo)) == {name: each.tolist() for name, each in TENSORS.items()}


def test_files_that_end_early_are_refused(cargo):
    flaw = transfer(cargo, paths_of(cargo)[:1])
    assert flaw.startswith("the runtime sent 0 bytes of ")


def test_other_bytes_are_refused_with_both_digests(cargo, tmp_path):
    other = save(tmp_path / "other", NEXT)
    flaw = transfer(cargo, [str(other / name) for name in cargo.files])
    assert f"not {cargo.digest}; update the weights again" in flaw


def test_another_key_gets_no_weights(cargo):
    assert transfer(cargo, paths_of(cargo), lambda secret: secret[:-1] + b"x") == "it refuses this worker"


def test_weights_for_which_there_is_no_memory_are_refused(cargo):
    flaw = transfer(msgspec.structs.replace(cargo, files={"a.safetensors": 1 << 60}), [])
    assert "GiB of memory left, and they take 1073741824.0; free some" in flaw


def test_a_machine_has_the_same_weights_only_if_their_mark_or_digest_is_there(cargo, checkpoint, tmp_path):
    assert hosts(cargo)
    save(checkpoint, NEXT)
    assert not hosts(cargo)
    marked = msgspec.structs.replace(cargo, nonce="7")
    assert not hosts(marked)
    (checkpoint / "seer-nonce").write_text("7")
    assert hosts(marked)
    with offered(TENSORS, NEXT) as sources:
        one, other = map(cargo_of, sources)
        assert hosts(one)
        assert not hosts(msgspec.structs.replace(one, place=other.place))
        assert not hosts(msgspec.structs.replace(one, place=str(checkpoint / "0.safetensors")))
        os.mkfifo(tmp_path / "pipe")  # which another process has at that place
        assert not hosts(msgspec.structs.replace(one, place=str(tmp_path / "pipe")))


def test_files_are_sent_through_tls_where_the_connection_has_it(cargo, tmp_path):
    certificate, key = tmp_path / "c.pem", tmp_path / "k.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=localhost"]
    subprocess.run([*command, "-keyout", key, "-out", certificate], check=True, capture_output=True)
    ours = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    ours.load_cert_chain(certificate, key)
    theirs = ssl.create_default_context(cafile=str(certificate))

    async def run():
        async def accept(reader, writer):
            await send_files(writer, paths_of(cargo), 30.0)
            writer.close()

        server = await asyncio.start_server(accept, "127.0.0.1", 0, ssl=ours)
        async with server:
            address = server.sockets[0].getsockname()
            reader, writer = await asyncio.open_connection(*address, ssl=theirs, server_hostname="localhost")
            data = await reader.read(-1)
            writer.close()
            return data

    assert play(run()) == b"".join(Path(each).read_bytes() for each in paths_of(cargo))


def test_weights_that_are_freed_before_they_have_arrived_are_not_kept(cargo, monkeypatch):
    async def run():
        keeper = WeightKeeper()
        arrived = asyncio.Event()
        loop, receive = asyncio.get_running_loop(), keeping._receive

        def freed_meanwhile(*arguments):
            found = receive(*arguments)
            asyncio.run_coroutine_threadsafe(free(), loop).result()
            return found

        async def free():
            keeper.free("key")
            arrived.set()

        monkeypatch.setattr(keeping, "_receive", freed_meanwhile)
        port = WorkerPort("127.0.0.1")
        await port.open()
        expected = port.expect()
        fetching = asyncio.create_task(keeper.fetch("key", cargo, (port.host, port.port), expected.secret))
        await send_files((await expected.streams)[1], paths_of(cargo), 30.0)
        fetched = await fetching
        assert arrived.is_set()
        port.forget(expected)
        port.close()
        return fetched.place

    before = held()
    assert not Path(play(run())).exists()
    assert held() == before
