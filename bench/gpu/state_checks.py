"""An engine between two rollouts: other weights, from disk and from shared memory, and sleep."""

from __future__ import annotations

import time
from pathlib import Path

from bench.gpu.check import GpuMachine
from bench.gpu.sessions import EXACT, MODEL, Row, config_of, prompts, roll_out, session_of


def weights(machine: GpuMachine) -> list[Row]:
    """Load the model's weights anew from its files, then from shared memory: the tokens stay."""
    import torch
    from safetensors.torch import load_file
    from seer_host.shared_weights import SharedWeights

    model = machine.model or MODEL
    tensors = {
        name: value
        for file in sorted(Path(model).glob("*.safetensors"))
        for name, value in load_file(file).items()
    }
    groups, tokens = (2, 16) if machine.small else (16, 128)
    records, rows = prompts(groups, tokens), []
    config = config_of(machine, tokens, groups, {}, {})
    with SharedWeights() as shared, session_of(config, {} if machine.small else EXACT) as session:
        before = roll_out(session, records)
        zeros = {name: torch.zeros_like(value) for name, value in tensors.items()}
        with shared.offer(zeros.items()) as source:
            session.update_weights(source)
        without = roll_out(session, records)
        start = time.perf_counter()
        session.update_weights(model)
        from_disk = time.perf_counter() - start
        after_disk = roll_out(session, records)
        with shared.offer(tensors.items()) as source:
            start = time.perf_counter()
            session.update_weights(source)
            from_memory = time.perf_counter() - start
        after_memory = roll_out(session, records)
    size = sum(value.nbytes for value in tensors.values())
    assert without.unlike(before), "weights of zeros change no token: they were not loaded"
    for name, seconds, rolled in (
        ("files", from_disk, after_disk),
        ("shared memory", from_memory, after_memory),
    ):
        rows.append(
            {
                "from": name,
                "bytes": size,
                "seconds": seconds,
                "GB/s": size / seconds / 1e9,
                "responses": groups,
                "unlike those before": rolled.unlike(before),
            }
        )
    for row in rows:
        assert not row["unlike those before"], f"an update changes a response: {row}"
    return rows


def sleep(machine: GpuMachine) -> list[Row]:
    """Put an engine to sleep and wake it: the memory that gives back, the seconds, and equal tokens."""
    groups, tokens = (2, 16) if machine.small else (16, 128)
    records = prompts(groups, tokens)
    engine = {"engine_args": {"enable_sleep_mode": True}} if machine.device == "cuda" else {}
    config = config_of(machine, tokens, groups, engine, {})
    with session_of(config, {} if machine.small else EXACT) as session:
        before = roll_out(session, records)
        start = time.perf_counter()
        freed = session.sleep()
        asleep = time.perf_counter()
        session.wake()
        awake = time.perf_counter()
        after = roll_out(session, records)
    other = after.unlike(before)
    assert freed > 0, "sleep gives no memory back"
    assert not other, f"{other} of {groups} responses differ after sleep"
    return [
        {
            "bytes given back": freed,
            "to sleep, s": asleep - start,
            "to wake, s": awake - asleep,
            "responses": groups,
            "unlike those before": other,
        }
    ]
