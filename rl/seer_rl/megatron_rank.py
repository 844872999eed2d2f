"""A rank of the trainer ``megatron``: a process that does as it is told, together with the others."""

from __future__ import annotations

import os
import pickle
import sys
import traceback
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel

from seer_core.errors import SeerError
from seer_rl.config import TrainTable
from seer_rl.lifeline import end_with_parent
from seer_rl.megatron_learner import Learner
from seer_rl.megatron_model import answer_for_cuda
from seer_rl.memory import give_back
from seer_rl.ranks import ALIVE, Broke, Done, Raised


def main() -> None:
    """Do as told until whoever tells it is dead."""
    rank, alive, connection_file, port, listener = map(int, sys.argv[1:])
    end_with_parent(alive)
    os.set_inheritable(connection_file, False)
    connection = Connection(connection_file)
    learner: Any = None
    while True:
        try:
            what, arguments = pickle.loads(connection.recv_bytes())
        except EOFError:
            return
        try:
            if learner is None:
                table, model, seed = arguments
                device = _meet(table, rank, port, listener)
                learner = Learner(table, model, seed, device, lambda: connection.send(ALIVE))
                answer: Any = Done(None)
            else:
                answer = Done(getattr(learner, what)(*arguments))
                if table.colocated:
                    give_back()
        except (SeerError, OSError) as error:
            answer = Raised(error)
        except Exception as error:
            traceback.print_exc()
            answer = Broke(f"{type(error).__name__}: {error}")
        with suppress(BrokenPipeError):
            connection.send(answer)


def _meet(table: TrainTable, rank: int, port: int, listener: int) -> torch.device:
    """Make the groups of ranks: those of a stage are next to each other, then replicas, then stages.

    Return where this rank computes.
    """
    cpu = table.torch.device == "cpu"
    device = torch.device("cpu") if cpu else torch.device("cuda", rank)
    if cpu:
        answer_for_cuda()
    else:
        torch.cuda.set_device(device)
    # Whoever started the ranks gives up on them first.
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
    """Return where the ranks tell each other their addresses: in rank 0, on a socket of the parent's."""
    named: dict[str, Any] = {"timeout": timeout, "wait_for_workers": False}
    if rank == 0:
        named["master_listen_fd"] = listener
    return dist.TCPStore("127.0.0.1", port, is_master=rank == 0, **named)  # type: ignore[attr-defined]


if __name__ == "__main__":
    main()
