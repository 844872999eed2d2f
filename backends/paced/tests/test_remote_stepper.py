"""A stepper at the other end of a socket answers as one that is here.  No engine is needed."""

import socket
import threading

import pytest
from seer_paced import remote_stepper
from seer_paced.remote_stepper import RemoteStepper, serve
from seer_paced.script import Script, ScriptError
from seer_paced.stepper import LocalStepper
from seer_sim.lengths import Lengths
from seer_worker.process.adapter import EndedChunk
from seer_worker.wire import AbortChunk, Failed, Start, Submit, Telemetry

from seer_core.errors import EngineError
from seer_core.model import InstanceInfo, Sampling
from seer_core.ports.engine import ChunkJob

BOUND_S = 120.0
"""For what comes at once, unless a library that another test loaded holds Python up."""

START = Start("a:B", "i", {"report_interval_s": 1.0, "worker": {"silence_timeout_s": 2.5}}, "/nowhere")


class OneByOne:
    """Ends a chunk each step, in half a second, with what the script says."""

    def __init__(self, clock, script):
        self.info = InstanceInfo("i", 1024, 16, 4, 512, 1)
        self._clock, self._script, self._chunks = clock, script, {}

    def submit(self, job, salt):
        self._chunks[job.id] = job, self._script.tokens_of(job)

    def abort(self, job_ids):
        for job_id in job_ids:
            del self._chunks[job_id]

    def step(self):
        self._clock.begin_step()
        self._clock.spend(0.5)
        job, scripted = self._chunks.pop(next(iter(self._chunks)))
        if job.request_id == "bad/0":
            raise RuntimeError("it broke")
        self._clock.admit([job.request_id])
        tokens = scripted.token_ids
        return [EndedChunk(job.id, tokens, [-1.0] * len(tokens), stopped=scripted.end is not None)]

    def telemetry(self):
        return Telemetry(len(self._chunks), 0, 0.5)

    def close(self):
        pass


class Choosy(Script):
    def tokens_of(self, job):
        if job.request_id == "odd/0":
            raise ScriptError("it is not there")
        return super().tokens_of(job)


def job(request, seed=0):
    return ChunkJob(request, request, "g", [5, 6, 7], 3, 8, Sampling(), seed, 0)


@pytest.fixture
def script():
    return Choosy(512, Lengths(mean_tokens=6, cap_tokens=20))


@pytest.fixture
def alarms():
    return []


@pytest.fixture
def remote(script, monkeypatch, alarms):
    def make(start, sent):
        return LocalStepper(lambda clock: OneByOne(clock, sent), start, 1.0)

    monkeypatch.setattr(remote_stepper, "_make", make)
    ours, theirs = socket.socketpair()

    def other_end():
        with theirs:
            serve(theirs, alarms.append)

    thread = threading.Thread(target=other_end)
    thread.start()
    stepper = RemoteStepper(ours, START, script, BOUND_S, BOUND_S)
    yield stepper
    stepper.close()
    thread.join(BOUND_S)
    assert not thread.is_alive()


def test_turns_are_those_of_a_stepper_here(remote, script):
    here = LocalStepper(lambda clock: OneByOne(clock, script), START, 1.0)
    assert remote.info == here.info
    turns = [
        (0.0, [Submit(job("g/0")), Submit(job("g/1", 1)), Submit(job("g/2", 2)), AbortChunk("g/1")], True),
        (0.5, [], True),
        (1.0, [], True),
        (2.5, [Submit(job("g/3", 3))], False),
        (2.5, [], True),
    ]
    for now_s, messages, step in turns:
        assert remote.turn(now_s, messages, step=step) == here.turn(now_s, messages, step=step)


def test_a_turn_that_takes_longer_than_its_limit_ends_its_process(remote, alarms):
    remote.turn(0.0, [], step=False)
    remote.turn(0.5, [Submit(job("g/0"))], step=True)
    assert alarms == [4, 0, 4, 0]


def test_a_chunk_that_the_script_has_not_is_refused_without_asking(remote):
    turned = remote.turn(0.0, [Submit(job("odd/0"))], step=True)
    assert turned.answers == [Failed("odd/0", "it is not there")]
    assert turned.results is None


def test_why_an_instance_cannot_go_on_arrives_and_then_it_is_gone(remote):
    with pytest.raises(EngineError, match="RuntimeError: it broke"):
        remote.turn(0.0, [Submit(job("bad/0"))], step=True)
    with pytest.raises(EngineError, match="its process is gone"):
        remote.turn(0.5, [], step=True)


def test_a_process_that_sends_nothing_is_given_up(script):
    ours, theirs = socket.socketpair()
    with ours, theirs, pytest.raises(EngineError, match=r"its process sent nothing for 0\.05 s"):
        RemoteStepper(ours, START, script, 0.05, 1.0)
