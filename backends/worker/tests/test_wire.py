"""Frames: what is sent arrives, and nothing else does."""

import re
import socket

import msgspec
import pytest
from seer_host import frames
from seer_host.frames import Frames, WireError, encode
from seer_host.machine_probe import MachineProbe
from seer_worker.wire import (
    AbortChunk,
    AddSiblingTokens,
    Called,
    Degraded,
    Failed,
    Fatal,
    Finished,
    ForgetGroup,
    FromWorker,
    Link,
    MeasureSteps,
    PoolMessage,
    ProbeMachine,
    Ready,
    ResetCache,
    Shutdown,
    Sleep,
    Start,
    Streamed,
    Submit,
    Telemetry,
    ToWorker,
    UpdateWeights,
    Wake,
)

from seer_core.model import InstanceInfo, Sampling
from seer_core.model.arrays import Logprobs, Tokens, TopLogprobs
from seer_core.ports.drafting import SiblingTokens, SourceSpec, StepTimes
from seer_core.ports.engine import ChunkJob, ChunkOutput, ChunkPiece
from seer_core.ports.weights import directory

JOB = ChunkJob("j", "r", "g", [1, 2, 3], 2, 64, Sampling(0.7, 0.9, 5), 2**63 - 1, 4, probe=True)
TOPS = TopLogprobs.of([[(7, -0.5), (70_000, -1.5)]])
TIMES = StepTimes((1, 4), (0, 2), ((0.25, 0.5), (0.5, 0.75)))
TO_WORKER = [
    Start("p.m:I", "i", {"dtype": "float32", "max_running": 8}, "/tmp/x"),
    Start("p.m:I", "i", {}, "/tmp/x", SourceSpec("p.m:C", {"url": "tcp://x", "bytes": 5}, 8, TIMES)),
    Start("p.m:I", "i", {}, "/tmp/x", SourceSpec("e:own", {}, 8), own_methods=("e:own",)),
    Submit(JOB),
    AbortChunk("j"),
    AddSiblingTokens(SiblingTokens("roll", "g", "g/1", 7, Tokens([1, 70_000, 2**31 - 1]))),
    ForgetGroup("g"),
    PoolMessage({"epoch": 2**40}),
    ResetCache(),
    UpdateWeights(directory("/w"), 4),
    Sleep(),
    Wake(),
    MeasureSteps((1, 8), (0, 4), 64),
    ProbeMachine(),
    Shutdown(),
]
FROM_WORKER = [
    Ready(InstanceInfo("i", 1024, 32, 8, 512)),
    Finished(ChunkOutput("j", [7, 8], [-0.5, -1.25], True, 32, 5, 7, 1, 4, 2, [1, 1], [1, 0])),
    Failed("j", "no"),
    Finished(ChunkOutput("j", [7], [-0.5], True, 32, 5, 7, 1, 4, top_logprobs=TOPS)),
    Streamed(ChunkPiece("j", 7, Tokens([7, 8]), Logprobs([-0.5, -1.25]))),
    Streamed(ChunkPiece("j", 7, Tokens([7]), Logprobs([-0.5]), TOPS)),
    Telemetry(1, 2, 0.25, 9.5, 0.125, {"groups": 3.0}),
    Called(),
    Called("busy"),
    Called(None, TIMES),
    Called(freed_bytes=2**40),
    Called(probe=MachineProbe(0.5, 0.375)),
    PoolMessage({"asked_blocks": 3, "put_bytes": 1 << 50}),
    Degraded("drafting", "no server"),
    Fatal("oh"),
]


@pytest.mark.parametrize(("kind", "messages"), [(ToWorker, TO_WORKER), (FromWorker, FROM_WORKER)])
@pytest.mark.parametrize("piece", [1, 3, 1 << 20])
def test_every_message_survives_the_wire_in_pieces_of_any_size(kind, messages, piece):
    stream = b"".join(encode(message) for message in messages)
    frames = Frames(kind)
    arrived = []
    for start in range(0, len(stream), piece):
        arrived += frames.feed(stream[start : start + piece])
    assert arrived == messages


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xc1garbage",
        msgspec.msgpack.encode({"type": "Unknown"}),
        msgspec.msgpack.encode({"type": "AbortChunk"}),
        msgspec.msgpack.encode({"type": "AbortChunk", "job_id": 7}),
        encode(Fatal("the other direction"))[4:],
        b"\x82\xa4type\xa5Start\xabengine_args" + b"\x81\xa1a" * 100_000 + b"\xc0",
        b"\x82\xa4type\xa5Abort\xa5extra" + b"\x91" * 100_000 + b"\xc0",
    ],
)
def test_a_frame_that_is_no_message_is_an_error(body):
    with pytest.raises(WireError, match="not a message"):
        list(Frames(ToWorker).feed(len(body).to_bytes(4, "big") + body))


def test_an_oversize_frame_is_refused_before_it_is_read():
    with pytest.raises(WireError, match="exceeds"):
        list(Frames(ToWorker).feed((frames.MAX_FRAME_BYTES + 1).to_bytes(4, "big")))


def test_a_message_nested_too_deeply_is_not_sent():
    deep = None
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(WireError, match="a Start is nested too deeply"):
        encode(Start("p.m:I", "i", {"hf_overrides": deep}, "/tmp/x"))


def test_an_oversize_message_is_not_sent(monkeypatch):
    monkeypatch.setattr(frames, "MAX_FRAME_BYTES", 10)
    with pytest.raises(WireError, match="a Submit of"):
        encode(Submit(JOB))


def test_a_message_nested_too_deeply_is_an_error_and_what_it_says_is_harmless():
    start = encode(Start("p.m:I", "i", {"model": "deep"}, "here"))[4:]
    deep = start.replace(msgspec.msgpack.encode("deep"), b"\x91" * 100_000 + b"\xc0")
    rude = msgspec.msgpack.encode({"type": "\x1b[2J"})
    for body, fact in ((deep, "nested too deeply"), (rude, r"x1b\[2J")):
        with pytest.raises(WireError, match=f"not a message: .*{fact}") as caught:
            list(Frames(ToWorker).feed(len(body).to_bytes(4, "big") + body))
        assert str(caught.value).isprintable()


def test_an_answer_that_no_frame_holds_fails_its_chunk_and_no_other(monkeypatch):
    monkeypatch.setattr(frames, "MAX_FRAME_BYTES", 1 << 10)
    output = ChunkOutput("j", Tokens([1]), Logprobs([-0.5]), False, 0, 3, 3, 0, 0)
    large = msgspec.structs.replace(output, attachments={"routed_experts": "A" * 2000})
    ours, theirs = socket.socketpair()
    with ours, theirs:
        Link(ours).send(Finished(large), Finished(output))
        found = list(Frames(FromWorker).feed(theirs.recv(1 << 16)))
    assert isinstance(found[0], Failed)
    assert found[0].job_id == "j"
    assert re.fullmatch("its answer is too large: a Finished of 2[0-9]+ bytes exceeds 1024", found[0].reason)
    assert found[1] == Finished(output)
