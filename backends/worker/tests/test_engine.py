"""The proxy, the wire and the worker around an instance without a model."""

import asyncio
import os
import re
import socket
import stat
import subprocess
import threading
from contextlib import nullcontext
from pathlib import Path

import attrs
import pytest
from msgspec import structs
from seer_host.images import PlacedImages
from seer_host.machine_probe import MachineProber
from seer_testing import EngineContract
from seer_worker.client import fork_server
from seer_worker.client.local import LocalLauncher
from seer_worker.client.process_client import Launch, ProcessClient
from seer_worker.client.worker_log import WorkerLog
from seer_worker.process.serving import work
from seer_worker.wire import Channel, Shutdown

from seer_core.errors import EngineError, PromptError
from seer_core.model import Sampling
from seer_core.model.arrays import Tokens
from seer_core.ports.clock import RealClock
from seer_core.ports.drafting import SiblingTokens, SourceSpec
from seer_core.ports.engine import ChunkJob, ModelInfo, PlaceSeeker
from seer_core.ports.kv import PoolStats, StoreSpec
from seer_core.ports.weights import directory
from tests.support.eventually import PATIENCE_S

HERE = str(Path(__file__).parent)


class Sink:
    """Writes down what an engine says."""

    def __init__(self):
        self.outputs, self.failures, self.pieces = {}, {}, {}
        self.reports, self.degradations, self.losses = [], [], []
        self.changed = asyncio.Event()

    def chunk_finished(self, instance_id, output):
        self.outputs[output.job_id] = output
        self.changed.set()

    def chunk_failed(self, instance_id, job_id, reason):
        self.failures[job_id] = reason
        self.changed.set()

    def chunk_streamed(self, instance_id, piece):
        self.pieces.setdefault(piece.job_id, []).append(piece)
        self.changed.set()

    def reported(self, report):
        self.reports.append(report)
        self.changed.set()

    def degraded(self, degradation):
        self.degradations.append(degradation)
        self.changed.set()

    def lost(self, instance_id, reason):
        self.losses.append(reason)
        self.changed.set()

    async def until(self, condition):
        while not condition():
            self.changed.clear()
            await self.changed.wait()


class ThreadLauncher:
    """Runs workers in threads of this process: nothing above a launcher needs more of it."""

    def __init__(self, scratch):
        self.scratch = scratch

    async def address(self):
        return "127.0.0.1"

    async def find_place(self, name, waiting):
        self.found_place = name
        waiting("a node")

    async def launch(self, name, interpreter, environment, log, keep_log):
        ours, theirs = socket.socketpair()

        def run():
            with theirs:
                work(theirs)

        thread = threading.Thread(target=run)
        thread.start()
        return ThreadWorker(
            thread, str(self.scratch), Channel(*await asyncio.open_unix_connection(sock=ours))
        )


class ThreadWorker:
    log = "what pytest has caught"

    def __init__(self, thread, scratch, channel):
        self.thread, self.scratch, self.channel = thread, scratch, channel
        self.send, self.receive = channel.send, channel.receive

    @property
    def received_bytes(self):
        return self.channel.received_bytes

    async def end(self, grace_s=0.0):
        self.send(Shutdown())
        await asyncio.to_thread(self.thread.join, 10)
        self.channel.close()
        return self.channel.fatal or "ended"

    def last_words(self):
        return "its log is what pytest has caught"

    def discard_log(self):
        self.log = None

    def bring_weights(self, source):
        return nullcontext(source)


@pytest.fixture
def local():
    """The launcher that is used in earnest."""
    return LocalLauncher("toys:preload")


@pytest.fixture
def launch(monkeypatch, tmp_path):
    """A toy in a thread, which has imported torch already."""
    monkeypatch.syspath_prepend(HERE)
    return Launch(
        instance="toys:Toy",
        settings={},
        environment={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([HERE, os.environ.get("PYTHONPATH", "")]),
            "OPENBLAS_NUM_THREADS": "1",
        },
        launcher=ThreadLauncher(tmp_path),
        log_dir=tmp_path / "logs",
        keep_logs=False,
        start_timeout_s=120.0,
        stop_timeout_s=5.0,
        control_timeout_s=120.0,
        silence_timeout_s=120.0,
        cannot_draft="cannot draft",
        ignores_kv_pool=True,
    )


def job(name="j", group="g", tokens=(1, 2, 3), max_tokens=8, version=0):
    return ChunkJob(name, name, group, list(tokens), len(tokens), max_tokens, Sampling(), 5, version)


async def started(launch, sink):
    engine = ProcessClient("toy-0", launch)
    await engine.start(sink)
    return engine


def play(story):
    asyncio.run(asyncio.wait_for(story(), 240))


@attrs.frozen
class Pool:
    engines: list
    clock: object
    model: ModelInfo
    tokenizer: None = None


class TestWorkerClient(EngineContract):
    """A toy in a worker keeps the contract of engines."""

    shared = True

    @pytest.fixture(autouse=True)
    def _launch(self, launch):
        launch = attrs.evolve(launch, instance="toys:Streaming")
        self.make = lambda: Pool(
            [ProcessClient(f"toy-{i}", launch) for i in range(2)], RealClock(), ModelInfo(64, 256)
        )


@pytest.mark.parametrize("keeps", [False, True], ids=["merged", "beside the model"])
def test_an_adapter_that_is_merged_comes_with_the_whole_weights_before_it(launch, keeps):
    async def story():
        engine = await started(attrs.evolve(launch, keeps_adapters=keeps), Sink())
        adapter = directory("/adapter", adapter_config={"r": 2})
        assert await engine.update_weights(adapter, 1) == "weights 1"
        await engine.update_weights(directory("/whole"), 2)
        with pytest.raises(EngineError, match="these weights are bad"):
            await engine.update_weights(directory("/bad"), 3)
        for version in (3, 4):
            found = await engine.update_weights(adapter, version)
            assert found == (f"weights {version}" if keeps else f"weights {version} on /whole")
        await engine.start(Sink())
        assert await engine.update_weights(adapter, 1) == "weights 1"
        await engine.stop()

    play(story)


def test_a_worker_runs_where_its_launcher_puts_it(launch, local):
    tokens = []

    async def story():
        for launcher in (launch.launcher, local, LocalLauncher()):
            sink = Sink()
            engine = await started(attrs.evolve(launch, launcher=launcher), sink)
            engine.submit(job())
            await sink.until(lambda sink=sink: "j" in sink.outputs)
            tokens.append(sink.outputs["j"].token_ids)
            assert await engine.update_weights(directory("/weights"), 1) == "weights 1"
            await engine.stop()
            assert sink.losses == []

    play(story)
    first, second, third = tokens
    assert first == second == third
    assert len(first) == 8


def test_an_instance_on_this_machine_uses_what_another_like_it_has_measured(launch, local):
    like = attrs.evolve(launch, launcher=local, instance="toys:Measuring", settings={"model": "m"})
    others = [
        {"settings": {"model": "other"}},
        {"environment": {**like.environment, "OMP_NUM_THREADS": "7"}},
        {"launcher": launch.launcher},
    ]

    async def measured(**changes):
        engine = ProcessClient("toy-0", attrs.evolve(like, **changes))
        info = await engine.start(Sink())
        pid = getattr(engine.worker, "pid", os.getpid())
        await engine.stop()
        return info.step_s, float(pid)

    async def story():
        first, pid = await measured()
        assert first == pid
        assert (await measured())[0] == first
        for changes in others:
            found, pid = await measured(**changes)
            assert found == pid != first

    play(story)


def test_a_lost_instance_asks_its_launcher_for_a_place(launch):
    engine = ProcessClient("toy-0", launch)
    assert isinstance(engine, PlaceSeeker)
    missing = []
    play(lambda: engine.find_place(missing.append))
    assert launch.launcher.found_place == "toy-0"
    assert missing == ["a node"]


def test_the_worker_gives_back_what_its_instance_need_not_see(launch):
    async def story():
        sink = Sink()
        engine = await started(launch, sink)
        engine.submit(job("late", version=3))
        engine.submit(job("long", max_tokens=300))
        engine.submit(job("foreign", tokens=(99,)))
        engine.submit(job("unlucky", group="failing"))
        await sink.until(lambda: len(sink.failures) == 4)
        assert sink.failures == {
            "late": "the chunk wants weight version 3, loaded is 0",
            "long": "the chunk needs 303 tokens, max_model_tokens is 256",
            "foreign": "there is no such token",
            "unlucky": "no luck",
        }
        with pytest.raises(EngineError, match="UpdateWeights on instance 'toy-0': these weights are bad"):
            await engine.update_weights(directory("/bad"), 1)
        with pytest.raises(EngineError, match="on instance 'toy-0': this engine does not measure"):
            await engine.measure_steps((1,), (0,))
        engine.submit(job("held", group="held"))
        with pytest.raises(EngineError, match="1 chunks are running"):
            await engine.reset_cache()
        engine.abort("held")
        await engine.reset_cache()
        engine.submit(job("good"))
        await sink.until(lambda: "good" in sink.outputs)
        await engine.stop()

    play(story)


def test_an_idle_worker_measures_how_fast_its_machine_is(launch):
    async def story():
        sink = Sink()
        engine = await started(launch, sink)
        assert isinstance(engine, MachineProber)
        probe = await engine.probe_machine()
        assert probe.wall_s > 0
        assert probe.cpu_s > 0
        engine.submit(job("held", group="held"))
        with pytest.raises(EngineError, match="ProbeMachine on instance 'toy-0': 1 chunks are running"):
            await engine.probe_machine()
        await engine.stop()
        with pytest.raises(EngineError, match="ProbeMachine on instance 'toy-0': it is not running"):
            await engine.probe_machine()

    play(story)


def test_an_instance_that_can_give_memory_back_is_asked_to_and_others_only_take_no_chunks(launch):
    async def story():
        sink = Sink()
        plain = await started(launch, sink)
        assert await plain.sleep() == 0
        await plain.wake()
        await plain.stop()
        sleepy = await started(attrs.evolve(launch, instance="toys:Sleepy"), sink)
        assert await sleepy.sleep() == 4096
        assert await sleepy.sleep() == 0
        sleepy.submit(job("asleep"))
        await sink.until(lambda: "asleep" in sink.failures)
        assert sink.failures["asleep"] == "it is asleep; wake it first"
        with pytest.raises(EngineError, match="UpdateWeights on instance 'toy-0': it is asleep; wake it"):
            await sleepy.update_weights(directory("/weights"), 1)
        await sleepy.wake()
        await sleepy.wake()
        sleepy.submit(job("awake"))
        await sink.until(lambda: len(sink.degradations) == 2)
        assert [degradation.reason for degradation in sink.degradations] == ["good night", "good morning"]
        await sleepy.stop()
        settings = {"sleepless": True}
        awake = await started(attrs.evolve(launch, instance="toys:Sleepy", settings=settings), sink)
        with pytest.raises(EngineError, match="Sleep on instance 'toy-0': it has coffee"):
            await awake.sleep()
        awake.submit(job("still awake"))
        await sink.until(lambda: "still awake" in sink.outputs)
        await awake.stop()

    play(story)


def test_an_instance_that_cannot_wake_is_lost_with_its_reason(launch, local):
    async def story():
        sink = Sink()
        engine = await started(attrs.evolve(launch, launcher=local, instance="toys:Sleepy"), sink)
        await engine.update_weights(directory("/weights"), 13)
        await engine.sleep()
        with pytest.raises(EngineError, match="the toy had a nightmare"):
            await engine.wake()
        await sink.until(lambda: bool(sink.losses))
        await engine.stop()

    play(story)


def test_an_instance_that_does_not_answer_in_time_is_lost_lest_it_obeys_later(launch, local):
    async def story():
        sink = Sink()
        slow = attrs.evolve(launch, launcher=local, instance="toys:Slow", control_timeout_s=0.5)
        engine = await started(slow, sink)
        with pytest.raises(
            EngineError, match=r"UpdateWeights .* no answer after 0.5 s; the instance was ended"
        ):
            await engine.update_weights(directory("w"), 1)
        assert len(sink.losses) == 1
        assert engine.worker is None
        await engine.stop()

    play(story)


def test_an_error_in_a_step_ends_the_instance_with_its_traceback(launch, local):
    async def story():
        sink = Sink()
        engine = await started(attrs.evolve(launch, launcher=local), sink)
        log = Path(engine.worker.log)
        engine.submit(job(group="fatal"))
        await sink.until(lambda: bool(sink.losses))
        assert "RuntimeError: the toy is broken" in sink.losses[0]
        assert engine.worker is None
        await engine.stop()
        text = log.read_text()
        assert text.count("RuntimeError: the toy is broken") == 1
        assert "Traceback (most recent call last)" in text
        assert re.search(r"^\d\d:\d\d:\d\d \[error\s*\] worker_failed", text, re.M)

    play(story)


def test_an_engine_that_meets_the_end_of_a_file_ends_with_its_traceback(launch):
    async def story():
        sink = Sink()
        engine = await started(launch, sink)
        engine.submit(job(group="cut off"))
        await sink.until(lambda: bool(sink.losses))
        assert "EOFError: Ran out of input" in sink.losses[0]
        await engine.stop()

    play(story)


def test_an_instance_that_ended_well_leaves_nothing(launch, local):
    async def story():
        sink = Sink()
        engine = await started(attrs.evolve(launch, launcher=local), sink)
        scratch, log, pid = Path(engine.worker.scratch), Path(engine.worker.log), engine.worker.pid
        assert (scratch / "scratched").exists()
        await engine.stop()
        assert not scratch.exists()
        assert not log.parent.exists()
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)

    play(story)


def test_only_its_user_reads_a_log_in_a_directory_that_all_may_read(tmp_path):
    before = os.umask(0)
    try:
        with WorkerLog(tmp_path / "toy-0.log", True).open():
            pass
    finally:
        os.umask(before)
    assert (tmp_path / "toy-0.log").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("launching", [True, False])
def test_a_start_that_is_given_up_leaves_no_log(launch, local, launching, tmp_path, monkeypatch):
    async def never(*arguments):
        begun.set()
        await asyncio.get_running_loop().create_future()

    async def story():
        engine = ProcessClient("toy-0", attrs.evolve(launch, launcher=local))
        start = asyncio.create_task(engine.start(Sink()))
        await begun.wait()
        assert list(launch.log_dir.iterdir())
        start.cancel()
        with pytest.raises(asyncio.CancelledError):
            await start
        assert not launch.log_dir.exists()

    launch = attrs.evolve(launch, log_dir=tmp_path / "seer-toy-7", keep_logs=False)
    monkeypatch.setattr(*((LocalLauncher, "_start") if launching else (ProcessClient, "_ready")), never)
    begun = asyncio.Event()
    play(story)


def test_what_an_instance_complains_of_comes_with_the_place_of_its_log(launch, local):
    async def story():
        sink = Sink()
        engine = await started(attrs.evolve(launch, launcher=local, settings={"degraded": True}), sink)
        [degradation] = sink.degradations
        assert (degradation.what, degradation.reason, degradation.log) == (
            "drafting",
            "no idea yet",
            engine.worker.log,
        )
        log = Path(engine.worker.log)
        await engine.stop()
        assert log.exists()

    play(story)


class MessagingPool:
    """Sends an epoch, and keeps what it receives, and after how many outputs."""

    def __init__(self, sink):
        self.sink, self.lines, self.received = sink, {}, []

    async def start(self, instances):
        pass

    async def stop(self):
        pass

    def store(self, instance_id):
        return StoreSpec("nowhere:Store", {})

    async def clear(self):
        for line in self.lines.values():
            line({"epoch": 8})

    def stats(self):
        return PoolStats(0)

    def connect(self, instance_id, send):
        self.lines[instance_id] = send
        send({"epoch": 7})

    def receive(self, instance_id, note):
        self.received.append((instance_id, note, len(self.sink.outputs)))


def test_a_pool_and_its_stores_exchange_messages_before_results(launch, local):
    async def story():
        sink = Sink()
        pool = MessagingPool(sink)
        pooling = attrs.evolve(launch, launcher=local, instance="toys:Pooling", ignores_kv_pool=False)
        engine = ProcessClient("toy-0", pooling)
        assert engine.set_kv_pool(pool)
        await engine.start(sink)
        [(_, selftest, _)] = pool.received
        steps = selftest["steps"]
        for name, epoch in (("j", 7), ("k", 8)):
            engine.submit(job(name, max_tokens=3))
            await sink.until(lambda name=name: name in sink.outputs)
            [*_, (_, _, outputs)] = pool.received
            assert outputs == (name == "k")  # received before the result
            assert [note["epoch"] for _, note, _ in pool.received if "epoch" in note][-1] == epoch
            steps += 3
            assert sum(note.get("steps", 0) for _, note, _ in pool.received) == steps
            await pool.clear()
        await engine.stop()
        await pool.clear()  # no store receives it
        await engine.start(sink)
        assert pool.received[-1][:2] == ("toy-0", selftest)
        await engine.stop()

    play(story)


def test_a_pool_that_raises_at_a_message_receives_no_more(launch):
    class Raising(MessagingPool):
        def receive(self, instance_id, note):
            super().receive(instance_id, note)
            raise KeyError("no such count")

    async def story():
        sink = Sink()
        pool = Raising(sink)
        engine = ProcessClient("toy-0", attrs.evolve(launch, instance="toys:Pooling", ignores_kv_pool=False))
        engine.set_kv_pool(pool)
        await engine.start(sink)
        engine.submit(job())
        await sink.until(lambda: "j" in sink.outputs)
        assert len(pool.received) == 1
        [degradation] = sink.degradations
        assert (degradation.what, degradation.reason) == (
            "kv_pool",
            "the KV pool failed: KeyError: 'no such count'",
        )
        await engine.stop()

    play(story)


def test_an_instance_without_a_draft_source_or_a_store_needs_no_methods_for_them(launch):
    async def story():
        sink = Sink()
        bare = attrs.evolve(
            launch,
            instance="toys:Bare",
            ignores_kv_pool=False,
            cannot_draft=None,
            own_methods=("toy:own",),
        )
        engine = ProcessClient("toy-0", bare)
        await engine.start(sink)
        engine.forget_group("g")
        engine.submit(job())
        await sink.until(lambda: "j" in sink.outputs)
        assert sink.degradations == sink.losses == []
        await engine.stop()
        engine.set_kv_pool(MessagingPool(sink))
        with pytest.raises(EngineError, match="Bare took a KV store, and lacks share_kv of "):
            await engine.start(sink)
        engine.set_kv_pool(None)
        engine.set_drafter(OwnDrafter(sharing=True))
        with pytest.raises(EngineError, match="Bare took a draft source, and has no drafts"):
            await engine.start(sink)

    play(story)


class OwnDrafter:
    """Names a method of the toy's own."""

    def __init__(self, sharing):
        self.sharing = sharing

    def source(self):
        return SourceSpec("toy:own", {}, 4)

    def shares(self):
        return self.sharing


@pytest.mark.parametrize("sharing", [True, False])
def test_siblings_text_is_sent_to_an_instance_whose_drafter_shares(launch, sharing):
    async def story():
        sink = Sink()
        engine = ProcessClient("toy-0", attrs.evolve(launch, cannot_draft=None, own_methods=("toy:own",)))
        assert engine.set_drafter(OwnDrafter(sharing)) is sharing
        text = SiblingTokens("r", "g", "g/1", 0, Tokens([7, 8]))
        engine.add_sibling_tokens(text)  # it is not running yet
        await engine.start(sink)
        engine.add_sibling_tokens(text)
        engine.submit(job())
        await sink.until(lambda: sink.outputs)
        taught = [each.reason for each in sink.degradations]
        assert taught == (["g/1 goes on with [7, 8]"] if sharing else [])
        await engine.stop()
        assert engine.set_drafter(None) is False

    play(story)


@pytest.mark.parametrize(
    ("toy", "complaint"),
    [
        ("Unwatched", "does not sample by key: the token at position 4 of a response was not chosen where"),
        ("Greedy", "does not sample by key: at position 4 of a response it chose token"),
        ("Warm", "gives wrong log-probs: "),
        ("Late", "does not sample by key: the token at position 4"),
        ("Idle", "failed its self-test: 100 steps did not write 6 tokens"),
        ("Failing", "failed its self-test: no luck at all"),
    ],
)
def test_an_engine_whose_sampling_is_not_keyed_is_refused_at_its_start(launch, toy, complaint):
    async def story():
        engine = ProcessClient("toy-0", attrs.evolve(launch, instance=f"toys:{toy}"))
        with pytest.raises(EngineError, match=f"'toy-0' did not start: the engine {complaint}"):
            await engine.start(Sink())

    play(story)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"instance": "toys:Missing"}, "engine 'toys:Missing' cannot be imported"),
        (
            {"instance": "toys:Unfinished"},
            "engine 'toys:Unfinished' is no EngineAdapter: it lacks abort, close",
        ),
        ({"settings": {"refuses": "no room"}}, "did not start: no room"),
        (
            {"interpreter": "/no/such/python"},
            "did not start: /no/such/python cannot be run: No such file or directory; correct `python` in",
        ),
        ({"environment": {}}, "No module named 'toys'"),
    ],
)
def test_an_instance_that_cannot_be_made_says_why(launch, local, changes, complaint):
    async def story():
        engine = ProcessClient("toy-0", attrs.evolve(launch, launcher=local, **changes))
        with pytest.raises(EngineError, match=complaint):
            await engine.start(Sink())
        assert engine.worker is None

    play(story)


def test_a_launch_that_fails_for_want_of_room_does_not_blame_the_interpreter(
    launch, local, monkeypatch, tmp_path
):
    async def start(launcher=local, **changes):
        engine = ProcessClient("toy-0", attrs.evolve(launch, launcher=launcher, **changes))
        with pytest.raises(EngineError) as caught:
            await engine.start(Sink())
        return str(caught.value)

    async def story():
        (tmp_path / "file").touch()
        said = await start(log_dir=tmp_path / "file" / "logs")
        assert "toy-0.log cannot be written: Not a directory; correct `log_dir`" in said
        fork_server.end_all()
        monkeypatch.setattr(subprocess, "Popen", no_memory)
        before = set(os.listdir("/proc/self/fd"))
        for launcher in (local, LocalLauncher()):
            said = await start(launcher=launcher)
            assert "this machine cannot start a process: Cannot allocate memory; free what it lacks" in said
            assert not list(filter(is_launchs, set(os.listdir("/proc/self/fd")) - before))

    def is_launchs(descriptor):
        """Return whether a descriptor may be of a launch; libraries reconnect here when they like."""
        try:
            copy = os.dup(int(descriptor))
        except OSError:  # closed: that of the listing
            return False
        if not stat.S_ISSOCK(os.fstat(copy).st_mode):
            os.close(copy)
            return True
        with socket.socket(fileno=copy) as found:
            return found.family == socket.AF_UNIX

    def no_memory(*args, **options):
        raise OSError(12, "Cannot allocate memory")

    play(story)


def test_an_engine_that_cannot_draft_says_so_and_one_that_shares_no_kv_goes_without(launch):
    engine = ProcessClient("toy-0", launch)
    with pytest.raises(EngineError, match="instance 'toy-0' cannot draft"):
        engine.set_drafter(object())
    assert engine.set_kv_pool(object()) is False


def test_an_instance_says_the_labels_and_the_model_that_it_was_launched_with(launch):
    async def story():
        engine = ProcessClient("toy-0", attrs.evolve(launch, model="files"), {"gpu": "h100"})
        info = await engine.start(Sink())
        await engine.stop()
        assert (info.labels, info.model) == ({"gpu": "h100"}, "files")

    play(story)


class SlowFile:
    """An image whose file is read once it may be."""

    data = None

    def __init__(self, digest, error=None):
        self.digest, self.error, self.may_be_read, self.reads = digest, error, threading.Event(), 0

    def read(self):
        assert self.may_be_read.wait(PATIENCE_S)
        self.reads += 1
        if isinstance(self.error, Exception):
            raise self.error
        if self.error is not None:
            raise PromptError(self.error)
        return b"the image"


def seeing(name, *images, **changes):
    places = PlacedImages([*images], [(number, 1) for number in range(len(images))])
    return structs.replace(job(name, **changes), attachments=places)


def test_chunks_go_on_while_the_files_of_images_are_read_and_each_is_read_once(launch):
    async def story():
        sink, first, second = Sink(), SlowFile("a"), SlowFile("b", "it has changed")
        engine = await started(attrs.evolve(launch, instance="toys:Seeing"), sink)
        engine.submit(seeing("1", first))
        engine.submit(seeing("2", first, max_tokens=3))
        engine.submit(seeing("dropped", first))
        engine.submit(seeing("3", first, second))
        engine.submit(seeing("4", first, max_tokens=2))
        engine.submit(job("text"))
        await sink.until(lambda: "text" in sink.outputs)
        assert list(sink.outputs) == ["text"]
        with pytest.raises(EngineError, match="5 chunks are running"):
            await engine.reset_cache()
        engine.abort("dropped")
        engine.end_chunk("1")
        first.may_be_read.set()
        await sink.until(lambda: {"1", "2"} <= sink.outputs.keys())
        assert [len(sink.outputs[name].token_ids) for name in "12"] == [8, 3]  # a toy ends none early
        assert sink.failures == {}
        second.may_be_read.set()
        await sink.until(lambda: "4" in sink.outputs)
        assert sink.failures == {"3": "it has changed"}
        assert sink.outputs.keys() == {"text", "1", "2", "4"}
        assert first.reads == 1
        await engine.reset_cache()
        await engine.stop()

    play(story)


def test_any_error_of_a_read_fails_its_chunk_and_the_next_goes_on(launch):
    async def story():
        sink, broken, whole = Sink(), SlowFile("a", MemoryError()), SlowFile("b")
        engine = await started(attrs.evolve(launch, instance="toys:Seeing"), sink)
        engine.submit(seeing("1", broken))
        engine.submit(seeing("2", whole))
        broken.may_be_read.set()
        whole.may_be_read.set()
        await sink.until(lambda: {"1", "2"} <= sink.outputs.keys() | sink.failures.keys())
        assert sink.failures == {"1": "its images cannot be read: MemoryError"}
        assert sink.outputs.keys() == {"2"}
        await engine.reset_cache()
        await engine.stop()

    play(story)


def test_what_is_read_for_a_worker_that_is_gone_is_not_sent_to_the_next(launch):
    async def story():
        sink, file = Sink(), SlowFile("a")
        engine = await started(attrs.evolve(launch, instance="toys:Seeing"), sink)
        engine.submit(seeing("1", file))
        await engine.stop()
        await engine.start(sink)
        file.may_be_read.set()
        engine.submit(seeing("2", file))
        await sink.until(lambda: "2" in sink.outputs)
        assert (sink.outputs.keys(), sink.failures) == ({"2"}, {})
        await engine.stop()

    play(story)
