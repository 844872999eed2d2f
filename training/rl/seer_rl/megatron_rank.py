"""A rank of the trainer ``megatron``: a process that obeys messages, together with the other ranks."""

from __future__ import annotations

import os
import socket
import sys
import traceback
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from seer_host.frames import Frames, encode

from seer_core.errors import SeerError
from seer_rl.config import TrainTable
from seer_rl.megatron_learner import Learner
from seer_rl.megatron_model import emulate_cuda_on_cpu
from seer_rl.memory import return_freed_memory
from seer_rl.rank_messages import (
    AddSample,
    Broke,
    CallLearner,
    Done,
    FromRank,
    Raised,
    RankProgress,
    SendTensors,
    StartRank,
    ToRank,
    Train,
    tensor_pieces,
)
from seer_rl.trainer import Sample

RECEIVE_BYTES = 1 << 20


class Rank:
    """Carries out the messages of the trainer's process."""

    def __init__(self, number: int, port: int, listener: int, connection: socket.socket) -> None:
        self._number, self._port, self._listener = number, port, listener
        self._connection = connection
        self._samples: list[Sample] = []
        self._learner: Any = None
        self._colocated = False

    def serve(self) -> None:
        """Obey until the trainer closes its end."""
        frames: Frames[ToRank] = Frames(ToRank)
        while data := self._connection.recv(RECEIVE_BYTES):
            for message in frames.feed(data):
                if isinstance(message, AddSample):
                    self._samples.append(message.sample)
                else:
                    self._answer(message)

    def _answer(self, message: ToRank) -> None:
        answer: FromRank
        try:
            answer = self._obey(message)
            if self._colocated and not isinstance(message, StartRank):
                return_freed_memory()
        except (SeerError, OSError) as error:
            answer = Raised.of(error)
        except Exception as error:
            traceback.print_exc()
            answer = Broke(f"{type(error).__name__}: {error}")
        with suppress(BrokenPipeError):
            self._send(answer)

    def _obey(self, message: ToRank) -> Done:
        learner = self._learner
        match message:
            case StartRank(table, model, seed):
                device = _meet(table, self._number, self._port, self._listener)
                self._learner = Learner(table, model, seed, device, lambda: self._send(RankProgress()))
                self._colocated = table.colocated
            case Train():
                samples, self._samples = self._samples, []
                metrics, engine, trainer = learner.train(samples)
                self._send(*tensor_pieces("engine", engine), *tensor_pieces("trainer", trainer))
                return Done(metrics)
            case SendTensors():
                for name, tensor in learner.tensors().items():
                    for piece in tensor_pieces(name, tensor.numpy()):
                        self._send(piece)
            case CallLearner(method, directory):
                getattr(learner, method)(directory)
        return Done()

    def _send(self, *messages: FromRank) -> None:
        for message in messages:
            self._connection.sendall(encode(message))


def main() -> None:
    """Serve the trainer's process."""
    number, connection, port, listener = map(int, sys.argv[1:])
    os.set_inheritable(connection, False)
    Rank(number, port, listener, socket.socket(fileno=connection)).serve()


def _meet(table: TrainTable, rank: int, port: int, listener: int) -> torch.device:
    """Make the groups of ranks: those of a stage are next to each other, then replicas, then stages.

    Return where this rank computes.
    """
    cpu = table.torch.device == "cpu"
    device = torch.device("cpu") if cpu else torch.device("cuda", rank)
    if cpu:
        emulate_cuda_on_cpu()
    else:
        torch.cuda.set_device(device)
    # Longer than the trainer's process waits: it names the rank that hangs.
    patience = timedelta(seconds=2 * table.megatron.timeout_s)
    dist.init_process_group(
        "gloo" if cpu else "nccl",
        store=_store(rank, port, listener, patience),
        rank=rank,
        world_size=table.megatron.ranks,
        timeout=patience,
    )
    parallel_state.initialize_model_parallel(
        table.megatron.tensor_parallel,
        table.megatron.pipeline_parallel,
        distributed_timeout_minutes=max(1, round(patience.total_seconds() / 60)),
    )
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    return device


def _store(rank: int, port: int, listener: int, timeout: timedelta) -> Any:
    """Return the store of the ranks' addresses: in rank 0, on a socket of the parent's."""
    named: dict[str, Any] = {"timeout": timeout, "wait_for_workers": False}
    if rank == 0:
        named["master_listen_fd"] = listener
    return dist.TCPStore("127.0.0.1", port, is_master=rank == 0, **named)  # type: ignore[attr-defined]


if __name__ == "__main__":
    main()
