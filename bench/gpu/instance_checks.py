"""Two instances on one GPU: KV that moves between them, and the death of one in the middle of a rollout."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from time import perf_counter

from bench.gpu.check import GpuMachine
from bench.gpu.sessions import (
    EXACT,
    KV_BYTES,
    SHARED_GPU,
    Row,
    config_of,
    given_up,
    prompts,
    roll_out,
    roll_out_warm,
    session_of,
)

POOL_BYTES = 1 << 30
SHARE = 0.4
"""The part of a GPU's memory that each of two instances may take."""
PAIRS = ((1, False), (1, True), (2, False), (2, True))
"""How many instances there are, and whether they have a pool."""


def pair_config(machine: GpuMachine, instances: int, tokens: int, pool: bool) -> Row:
    """Return the config of instances that share a GPU by its memory, and perhaps a pool.

    With a pool a request waits for all that it loads, as one with a long context would.
    """
    engine: Row = {"instances": instances} | ({"awaited_kv_bytes": 0} if pool else {})
    if machine.device == "cuda":
        engine["kv_cache_bytes"] = KV_BYTES
        if not machine.shared:
            engine["engine_args"] = {"gpu_memory_utilization": SHARE}
    running = 4 if machine.small else 32
    return config_of(machine, tokens, running, engine, {}, POOL_BYTES if pool else 0)


def environment_of(machine: GpuMachine) -> dict[str, str]:
    """Return the variables of workers: both have one GPU, and exact tokens."""
    return {} if machine.small else EXACT | SHARED_GPU


def moves(machine: GpuMachine) -> list[Row]:
    """Roll out on one instance, on two, and on two with a pool: equal tokens, and the seconds it takes."""
    groups, responses, tokens = (2, 2, 32) if machine.small else (8, 8, 512)
    records = prompts(groups, tokens, responses)
    rows, first = [], None
    for instances, pool in ((1, False), (2, True)) if machine.small else PAIRS:
        config = pair_config(machine, instances, tokens, pool)
        rolled = roll_out_warm(config, environment_of(machine), records)
        first = first or rolled
        summary = rolled.summary
        assert not given_up(summary), f"the pool was given up: {summary.degradations}"
        rows.append(
            {
                "instances": instances,
                "pool": pool,
                "responses": groups * responses,
                "unlike those of one instance": rolled.unlike(first),
                "moves": summary.migrations,
                "tokens from the pool": summary.pool_tokens,
                "computed again": summary.recomputed_tokens,
                "tokens/s": rolled.tokens_per_s,
            }
        )
    for row in rows:
        assert not row["unlike those of one instance"], f"a move changes a response: {row}"
    return rows


def starts(machine: GpuMachine) -> list[Row]:
    """Start two instances in two sessions: forks of one process, which has no device open."""
    from seer_worker.client import fork_server

    fork_server.end_all()
    rows: list[Row] = []
    config = pair_config(machine, 2, 64, pool=False)
    for number in range(2):
        begun_s = perf_counter()
        with session_of(config, environment_of(machine)) as session:
            seconds = perf_counter() - begun_s
            pids = [engine.worker.pid for engine in session.runtime.engines.values()]
            parents = {int(status(pid, "PPid")) for pid in pids}
            servers = fork_server.servers()
            assert len(servers) == 1, f"{len(servers)} fork servers, where one is needed"
            assert parents == {servers[0].pid}, "an instance was not forked: the log has the reason"
            row = {"session": number + 1, "instances": len(pids), "seconds": seconds}
            rows.append(row | {"threads of the server": int(status(servers[0].pid, "Threads"))})
            opened = paths_of(servers[0].pid)
            devices = [path for path in opened if path.startswith("/dev/nvidia")]
            assert not devices, f"the fork server has {devices[0]} open"
            if machine.device == "cuda":
                assert any(path.startswith("/dev/nvidia") for path in paths_of(pids[0])), "no GPU in use"
    return rows


def status(pid: int, field: str) -> str:
    """Return a field of a process's status."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(line.split()[1] for line in lines if line.startswith(f"{field}:"))


def paths_of(pid: int) -> list[str]:
    """Return the files that a process has open, those of ended reads left out."""
    found = []
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):
            found.append(os.readlink(link))
    return found


def kill(machine: GpuMachine) -> list[Row]:
    """Kill one of two instances in the middle of a rollout: its work goes on, and it starts again."""
    from seer_core.model.events import ChunkFinished
    from tests.support.killer import Killer, kill_worker_of

    groups, responses, tokens = (3, 2, 48) if machine.small else (8, 8, 512)
    records = prompts(groups, tokens, responses)
    killer, config = Killer(None, after=1, of=ChunkFinished), pair_config(machine, 2, tokens, pool=True)
    with session_of(config, environment_of(machine), [killer]) as session:
        before = roll_out(session, records)
        killer.kill = kill_worker_of(session.runtime)
        finished = {
            each.request_id: [*each.token_ids] for each in session.stream([*map(dict, records)], iteration=0)
        }
        summary = session.result.summary
        after = roll_out(session, records)
        alive = len(session.runtime.alive)
    other = sum(tokens != before.tokens[name] for name, tokens in finished.items())
    rows = [
        {
            "responses": len(finished),
            "unlike those of an undisturbed rollout": other,
            "instances lost": summary.instances_lost,
            "tokens from the pool": summary.pool_tokens,
            "computed again": summary.recomputed_tokens,
            "seconds": summary.total_time_s,
            "seconds undisturbed": before.seconds,
            "instances in the next rollout": alive,
        }
    ]
    assert summary.instances_lost == 1, f"the death was not noticed: {rows}"
    assert finished.keys() == before.tokens.keys(), f"a response was lost: {rows}"
    assert not other, f"a death changes a response: {rows}"
    assert not after.unlike(before), "a response differs in the rollout after a death"
    return rows
