"""Copies between the host's memory and the device's, and the draft index on the host."""

from __future__ import annotations

import time
from statistics import median
from typing import Any

from bench.gpu.check import GpuMachine

Row = dict[str, Any]
PHRASE = 12


def copies(machine: GpuMachine) -> list[Row]:
    """Time copies in both directions, from pageable and from pinned memory, and check what arrives."""
    import torch

    from bench.gpu.sampler_checks import seconds

    rows = []
    for size in (1 << 12,) if machine.small else (1 << 20, 1 << 26, 1 << 30):
        there = torch.arange(size, dtype=torch.int64, device=machine.device).to(torch.uint8)
        for pinned in (False, True) if machine.device == "cuda" else (False,):
            here = torch.zeros(size, dtype=torch.uint8, pin_memory=pinned)
            out = seconds(machine, lambda here=here, there=there: here.copy_(there, non_blocking=True))
            assert int(here[-1]) == (size - 1) % 256, "a copy from the device has other bytes"
            back = seconds(machine, lambda here=here, there=there: there.copy_(here, non_blocking=True))
            rows.append(
                {
                    "bytes": size,
                    "pinned": pinned,
                    "from the device, GB/s": size / out / 1e9,
                    "to the device, GB/s": size / back / 1e9,
                }
            )
    return rows


def draft_index(machine: GpuMachine) -> list[Row]:
    """Time appending two tokens to each request and drafting eight for it, on one thread."""
    import numpy as np
    from seer_grouped_spec import DraftIndex

    size, written, steps = (16, 240, 4) if machine.small else (16, 8_000, 200)
    rows = []
    for batch in (16, 32) if machine.small else (16, 64, 256):
        random = np.random.default_rng(0)
        index = DraftIndex(1 << 32)
        texts, requests = [], []
        for _ in range(batch // size):
            phrases = [random.integers(0, 32_000, PHRASE).astype(np.int32) for _ in range(written // 20)]
            group = index.open_group(phrases[0], 0.0, float("inf"))
            for _ in range(size):
                text = np.concatenate(
                    [phrases[each] for each in random.integers(0, len(phrases), written // PHRASE + steps)]
                )
                requests.append(index.open_request(group))
                texts.append(text)
                index.append(requests[-1], 0, text[:written])
        handles = np.array(requests, np.int64)
        out, counts = np.zeros((batch, 8), np.int32), np.zeros(batch, np.int32)
        chances, limits = np.zeros((batch, 8), np.float32), np.full(batch, 8, np.int32)
        two, times = np.full(batch, 2, np.int32), []
        for step in range(steps):
            begin = written + 2 * step
            fresh = np.concatenate([text[begin : begin + 2] for text in texts])
            lengths = np.full(batch, PHRASE + begin + 2, np.int32)  # the prompt is a phrase
            start = time.perf_counter()
            index.draft(handles, lengths, two, fresh, limits, out, counts, chances)
            times.append(time.perf_counter() - start)
        rows.append({"requests": batch, "a step, us": median(times) * 1e6, "drafted": float(counts.mean())})
        assert counts.max() > 0, "the index drafts nothing from repeated phrases"
    return rows
