"""A fixed piece of work, which takes longer where the machine is slower or others use it."""

from __future__ import annotations

from time import perf_counter, thread_time

from seer_host.machine_probe import MachineProbe

__all__ = ["probe_machine"]

ROWS, WIDTH, MATRICES = 32, 256, 40
"""A batch of a small model's decoding step: its weights of 10 MB do not fit a core's own cache."""
PRODUCTS = 3000
"""They take a core some third of a second."""


def probe_machine() -> MachineProbe:
    """Multiply a batch with one matrix after the other, and return how long that took."""
    import numpy as np

    matrices = np.full((MATRICES, WIDTH, WIDTH), 1 / WIDTH, np.float32)
    rows = np.ones((ROWS, WIDTH), np.float32)
    result = np.empty_like(rows)
    for matrix in matrices:  # what the first products cost is not of the machine's speed
        np.matmul(rows, matrix, out=result)
    begun_s, cpu_s = perf_counter(), thread_time()
    for number in range(PRODUCTS):
        np.matmul(rows, matrices[number % MATRICES], out=result)
    return MachineProbe(perf_counter() - begun_s, thread_time() - cpu_s)
