"""A trainer and the server: weights by each way, versions, sleep."""

import asyncio
import glob
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import numpy
import pytest
import torch
from safetensors.torch import save_file
from seer_client import AsyncClient, ClientError
from seer_server.broker import RolloutBroker
from seer_worker.weights.shared_weights import SharedMemory

from seer_core.errors import EngineError
from tests.support.eventually import PATIENCE_S, aeventually, eventually

RECORD = {"prompt_token_ids": [5], "n": 2, "max_tokens": 4}
TENSORS = {
    "matrix": torch.arange(6, dtype=torch.bfloat16).reshape(2, 3),
    "turned": torch.arange(6, dtype=torch.float32).reshape(2, 3).T,
    "nothing": torch.zeros(0, 4),
    "one": torch.tensor(7.5, dtype=torch.float16),
}


def in_its_thread(served, call):
    """Call where the server's event loop runs, as an engine does."""
    done = threading.Event()
    loop = served.server.servers[0].get_loop()
    loop.call_soon_threadsafe(lambda: (call(), done.set()))
    assert done.wait(PATIENCE_S)


@pytest.fixture
def reader(playing):
    """An engine played by hand that reads the tensors which it is to load."""

    class Reader(playing.Hand):
        def __init__(self):
            super().__init__()
            self.loaded = []
            self.sources = []

        async def update_weights(self, source, version):
            await super().update_weights(source, version)
            if source.directory is not None:
                self.sources.append(source.directory)
                return
            tensors = {name: tensor.clone() for name, tensor in SharedMemory(source.settings).tensors()}
            if "bad" in tensors:
                raise EngineError("tensor 'bad' is unknown")
            self.loaded.append(tensors)

    return Reader()


def same(found, wanted):
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)


@pytest.mark.parametrize("way", ["send_weights", "share_weights"])
def test_tensors_come_as_they_are_and_are_kept_by_the_server(serve_by_hand, reader, connect, way):
    with serve_by_hand(reader) as served:
        client = connect(served)
        assert getattr(client, way)(TENSORS.items()) == 1
        arrays = [("a", numpy.arange(3, dtype=numpy.int64)), ("b", ("BF16", [2], b"\0\0\x80\x3f"))]
        assert getattr(client, way)(iter(arrays), version=7) == 7
        same(reader.loaded[0], TENSORS)
        same(
            reader.loaded[1],
            {"a": torch.arange(3), "b": torch.tensor([0.0, 1.0], dtype=torch.bfloat16)},
        )
        # An instance that starts later reads what the server holds.
        again = dict(SharedMemory(reader.specs[1].settings).tensors())
        assert again["a"].tolist() == [0, 1, 2]
        with pytest.raises(EngineError):
            SharedMemory(reader.specs[0].settings)
        with pytest.raises(ClientError, match="'bad' is unknown") as caught:
            getattr(client, way)([("bad", torch.zeros(1))])
        assert (caught.value.status, client.state().weight_version) == (400, 7)
        with pytest.raises(ClientError, match="versions must increase") as caught:
            getattr(client, way)(arrays, version=7)
        assert caught.value.status == 409


def test_a_file_of_safetensors_can_be_sent_as_it_is(serve_by_hand, reader, connect, tmp_path):
    tensors = {name: tensor.contiguous() for name, tensor in TENSORS.items()}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with serve_by_hand(reader) as served:
        body = (tmp_path / "model.safetensors").read_bytes()
        assert httpx.put(f"{served.url}/v1/weights", params={"version": 3}, content=body).json() == {
            "weight_version": 3
        }
        for cut in (body[:-1], body[:5], body + b"1", b"x" * 100):
            assert httpx.put(f"{served.url}/v1/weights", content=cut).status_code == 400
    same(reader.loaded[0], tensors)


def test_a_relative_directory_is_the_client_s(serve_by_hand, reader, connect, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with serve_by_hand(reader) as served:
        client = connect(served)
        assert client.update_weights(Path("weights")) == 1
    assert reader.sources == [str(tmp_path / "weights")]


def test_completions_are_of_the_version_that_was_loaded(serve, connect, tmp_path):
    save_file({"a": torch.zeros(2)}, tmp_path / "model.safetensors")
    with serve() as served:
        client = connect(served)
        assert {each.weight_version for each in client.rollout([{"prompt": "a"}])} == {0}
        assert client.update_weights(str(tmp_path), version=5) == 5
        found = client.rollout([{"prompt": "a"}], weight_version=5)
        assert {each.weight_version for each in found} == {5}
        with pytest.raises(ClientError, match="request is for weight version 4, and 5 is loaded") as caught:
            list(client.rollout([{"prompt": "a"}], weight_version=4))
        assert caught.value.status == 409


def test_weights_that_change_while_a_batch_is_read_refuse_it(serve, connect, tmp_path, monkeypatch):
    save_file({"a": torch.zeros(2)}, tmp_path / "model.safetensors")
    read = RolloutBroker.read

    async def slowly(broker, *args, **options):
        found = await read(broker, *args, **options)
        async with broker.exclusive() as runtime:
            await runtime.update_weights(str(tmp_path), 5)
        return found

    with serve() as served:
        client = connect(served)
        monkeypatch.setattr(RolloutBroker, "read", slowly)
        with pytest.raises(ClientError, match="request is for weight version 0, and 5 is loaded"):
            list(client.rollout([{"prompt": "a"}], weight_version=0))


def test_an_update_waits_for_what_is_unfinished_or_is_refused(serve_by_hand, reader, connect):
    with serve_by_hand(reader) as served, ThreadPoolExecutor(2) as pool:
        client = connect(served)
        batch = pool.submit(list, client.rollout([RECORD]))
        eventually(lambda: len(reader.jobs) == 2)
        for ask in (
            lambda: client.sleep(wait_s=0),
            lambda: client.send_weights(TENSORS.items(), wait_s=0),
        ):
            with pytest.raises(ClientError, match="2 responses are unfinished") as caught:
                ask()
            assert caught.value.status == 409
        update = pool.submit(client.send_weights, TENSORS.items(), wait_s=PATIENCE_S)
        eventually(lambda: client.state().changing)
        # A request that arrives while it waits is refused for a moment, so it cannot delay the update.
        with pytest.raises(ClientError, match="try again in a moment") as caught:
            next(client.rollout([RECORD]))
        assert caught.value.status == 503
        for _ in range(2):
            in_its_thread(served, reader.finish)
        assert [each.weight_version for each in batch.result(PATIENCE_S)] == [0, 0]
        assert update.result(PATIENCE_S) == 1
        with client.reserve([{"group_id": "a", "n": 2}]), pytest.raises(ClientError, match="reserved"):
            client.update_weights("/any", wait_s=0.01)


def test_sleep_waits_for_a_reservation_whose_rows_go_on(serve_by_hand, reader, connect):
    with serve_by_hand(reader) as served, ThreadPoolExecutor(2) as pool:
        client = connect(served)
        with client.reserve([{"group_id": "a", "n": 1, "max_tokens": 4}]):
            asleep = pool.submit(client.sleep, wait_s=PATIENCE_S)
            row = pool.submit(client.rollout_row, "a", 0, prompt_token_ids=[5])
            eventually(lambda: reader.jobs)
            in_its_thread(served, reader.finish)
            assert row.result(PATIENCE_S).finish_reason == "stop"
        assert asleep.result(PATIENCE_S) == 1000


def test_a_client_that_goes_while_waiting_delays_no_other(serve_by_hand, reader, connect):
    with serve_by_hand(reader) as served, ThreadPoolExecutor(1) as pool:
        client = connect(served)
        batch = pool.submit(list, client.rollout([RECORD]))
        eventually(lambda: len(reader.jobs) == 2)
        limit = httpx.Timeout(PATIENCE_S, read=0.5)
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{served.url}/v1/sleep", json={"wait_s": 3600}, timeout=limit)
        eventually(lambda: not client.state().changing)
        for _ in range(2):
            in_its_thread(served, reader.finish)
        assert len(batch.result(PATIENCE_S)) == 2
        assert not client.state().asleep


def test_weights_that_fail_with_an_instance_are_no_fault_of_the_client(
    serve_by_hand, playing, connect, tmp_path
):
    class RunsOutOfMemory(playing.Hand):
        async def update_weights(self, source, version):
            self.sink.lost(self.id, "it ran out of memory")
            raise EngineError("it ran out of memory")

    class Full(playing.Hand):
        async def update_weights(self, source, version):
            raise EngineError("there is no room for them")

    save_file({"a": torch.zeros(2)}, tmp_path / "model.safetensors")
    with serve_by_hand(RunsOutOfMemory("hand-0"), Full("hand-1")) as served:
        with pytest.raises(ClientError, match="out of memory") as caught:
            connect(served).update_weights(str(tmp_path))
        assert (caught.value.status, connect(served).state().weight_version) == (503, 0)


def test_the_event_loop_goes_on_while_tensors_are_shared(serve_by_hand, reader):
    asked, going = threading.Event(), threading.Event()

    def tensors():
        asked.set()
        assert going.wait(PATIENCE_S), "the event loop stood still"
        yield from TENSORS.items()

    async def run(url):
        async with AsyncClient(url) as client:
            sharing = asyncio.create_task(client.share_weights(tensors()))
            await aeventually(asked.is_set)
            going.set()
            assert await sharing == 1
            asked.clear()
            going.clear()
            sharing = asyncio.create_task(client.share_weights(tensors()))
            await aeventually(asked.is_set)
            sharing.cancel()
            going.set()
            with pytest.raises(asyncio.CancelledError):
                await sharing
            return (await client.state()).weight_version

    def areas():
        links = [each for each in glob.glob("/proc/self/fd/*") if os.path.islink(each)]
        return {os.stat(each).st_ino for each in links if "seer-weights" in os.readlink(each)}

    with serve_by_hand(reader) as served:
        before = areas()
        assert asyncio.run(asyncio.wait_for(run(served.url), 2 * PATIENCE_S)) == 1
        assert len(areas() - before) == 1  # what the server holds
    same(reader.loaded[0], TENSORS)


def test_a_server_goes_on_after_all_responses_have_failed(serve_by_hand, reader, connect):
    with serve_by_hand(reader) as served, ThreadPoolExecutor(1) as pool:
        client = connect(served)
        batch = pool.submit(list, client.rollout([RECORD]))
        eventually(lambda: len(reader.jobs) == 2)

        def fail():
            for job in list(reader.jobs):
                del reader.jobs[job]
                reader.sink.chunk_failed(reader.id, job, "not finite")

        while not batch.done():
            in_its_thread(served, fail)
        with pytest.raises(ClientError, match="every response ended in an error"):
            batch.result(PATIENCE_S)
        assert client.send_weights(TENSORS.items()) == 1
        batch = pool.submit(list, client.rollout([RECORD]))
        eventually(lambda: len(reader.jobs) == 2)
        for _ in range(2):
            in_its_thread(served, reader.finish)
        assert [each.weight_version for each in batch.result(PATIENCE_S)] == [1, 1]


def test_engines_sleep_and_wake(serve, connect, tmp_path):
    save_file({"a": torch.zeros(2)}, tmp_path / "model.safetensors")
    with serve() as served:
        client = connect(served)
        client.wake()
        first = [list(each.token_ids) for each in client.rollout([{"prompt": "a", "n": 2}])]
        assert client.sleep() > 0
        assert client.sleep() == 0
        assert client.state().asleep
        for ask in (
            lambda: next(client.rollout([{"prompt": "a"}])),
            lambda: client.update_weights(str(tmp_path)),
            lambda: client.rollout_row("a", 0),
        ):
            with pytest.raises(ClientError) as caught:
                ask()
            assert caught.value.status in (404, 409)
        client.wake()
        client.wake()
        assert [list(each.token_ids) for each in client.rollout([{"prompt": "a", "n": 2}])] == first
        assert client.update_weights(str(tmp_path)) == 1
