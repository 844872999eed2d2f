"""A worker's life: it starts in time or says why not, its death is noticed once, it leaves nothing behind."""

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import attrs
import pytest
from seer_worker.client.local import LocalLauncher

from seer_core.errors import EngineError
from seer_core.model import Sampling
from tests.support.eventually import eventually
from tests.support.processes import alive

pytestmark = pytest.mark.engine

PLAIN = Sampling(1.0)


def is_group_empty(group):
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return True
    return False


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    """An empty directory that is the temporary one, here and in workers started from now on."""
    directory = tmp_path / "temporary"
    directory.mkdir()
    monkeypatch.setenv("TMPDIR", str(directory))
    monkeypatch.setattr(tempfile, "tempdir", str(directory))
    return directory


def left_in(directory):
    """Return the files in a directory, caches of what is compiled aside."""
    return [
        path
        for path in directory.rglob("*")
        if path.is_file() and not path.relative_to(directory).parts[0].startswith("torchinductor")
    ]


def test_a_killed_instance_is_lost_once_and_can_start_again(start, models, prompts, temporary):
    harness = start(models[0])
    before = harness.whole(prompts(3), PLAIN, 60)
    first, job = harness.pid, harness.job(prompts(1)[0], 500, 0, PLAIN)
    log = Path(harness.engine.worker.log)
    harness.engine.submit(job)
    harness.kill()
    harness.run(harness.until(lambda: bool(harness.losses)))
    assert harness.losses == ["killed by SIGKILL"]
    assert harness.pid is None
    assert is_group_empty(first)
    assert left_in(temporary) == [log]
    with pytest.raises(EngineError, match="ResetCache on instance 'vllm-0': it is not running"):
        harness.run(harness.engine.reset_cache())

    harness.run(harness.engine.start(harness))
    assert harness.whole(prompts(3), PLAIN, 60) == before
    os.kill(harness.pid, signal.SIGINT)
    assert harness.whole(prompts(3), PLAIN, 60) == before

    second = harness.pid
    harness.run(harness.engine.stop())
    harness.run(harness.engine.stop())
    assert is_group_empty(second)
    assert left_in(temporary) == [log]
    assert harness.losses == ["killed by SIGKILL"]
    assert job.id not in harness.answers


def test_a_loss_ends_a_control_call_that_waits(start, models):
    harness = start(models[0])
    os.kill(harness.pid, signal.SIGSTOP)
    call = harness.loop.create_task(harness.engine.reset_cache())
    harness.loop.call_soon(harness.kill)
    with pytest.raises(EngineError, match="ResetCache on instance 'vllm-0': killed by SIGKILL"):
        harness.run(call)
    assert len(harness.losses) == 1


def test_an_event_loop_that_does_not_listen_for_a_while_gets_the_same_responses(roomy, prompts):
    expected = roomy.whole(prompts(8), PLAIN, 200)

    async def block():
        jobs = [roomy.job(prompt, 200, seed, PLAIN) for seed, prompt in enumerate(prompts(8))]
        for job in jobs:
            roomy.engine.submit(job)
        for _ in range(2):
            await asyncio.sleep(0)
            subprocess.run(
                [sys.executable, "-c", "import asyncio"], check=True
            )  # a reward that computes, say
        await roomy.until(lambda: all(job.id in roomy.answers for job in jobs))
        return [roomy.outputs[job.id].token_ids for job in jobs]

    assert roomy.run(block()) == expected
    assert roomy.losses == []


def test_a_worker_that_falls_silent_while_it_has_chunks_is_lost(start, models, prompts):
    harness = start(models[0])
    harness.whole(prompts(2), PLAIN, 20)
    worker, engine = harness.pid, harness.engine
    engine.spec = attrs.evolve(engine.spec, silence_timeout_s=1.0)
    harness.run(harness.engine.reset_cache())  # the wait under way, of the longer limit, ends
    os.kill(worker, signal.SIGSTOP)
    harness.engine.submit(harness.job(prompts(1)[0], 20, 0, PLAIN))
    harness.run(harness.until(lambda: bool(harness.losses)))
    assert harness.losses == ["silent for silence_timeout_s = 1 with 1 chunks"]
    assert is_group_empty(worker)


def test_an_error_inside_vllm_ends_the_instance_with_its_traceback(start, models, prompts):
    harness = start(models[0])
    harness.engine.submit(harness.job(prompts(1)[0], 500, 2**63, PLAIN))  # a seed that no tensor can hold
    harness.run(harness.until(lambda: bool(harness.losses)))
    [reason] = harness.losses
    assert "sampling.py" in reason
    assert "OverflowError" in reason


def test_a_wrong_argument_fails_the_start_by_its_name_and_nothing_is_imported_from_where_a_worker_runs(
    loop, make_fleet, models, tmp_path, monkeypatch
):
    for name in ("msgspec", "numpy", "structlog", "torch", "vllm"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('imported from the working directory')")
    monkeypatch.chdir(tmp_path)
    pool = make_fleet(models[0], engine_args={"no_such_argument": 1})
    with pytest.raises(EngineError, match=r"(?s)instance 'vllm-0' did not start: .*'no_such_argument'"):
        loop.run_until_complete(pool.engines[0].start(None))
    assert pool.engines[0].worker is None


def test_a_start_without_kv_memory_on_a_cpu_is_refused_in_a_sentence(loop, make_fleet, models):
    pool = make_fleet(models[0], kv_cache_bytes=None)
    with pytest.raises(EngineError, match="'vllm-0' did not start: without kv_cache_bytes vLLM would take"):
        loop.run_until_complete(pool.engines[0].start(None))


@pytest.fixture
def too_late(loop, monkeypatch):
    """Let the time to start be over once a worker is launched; return the workers' processes."""
    launch, pids = LocalLauncher.launch, []

    async def launch_late(launcher, *arguments):
        worker = await launch(launcher, *arguments)
        pids.append(worker.pid)
        loop.skip_s(3600)
        return worker

    monkeypatch.setattr(LocalLauncher, "launch", launch_late)
    return pids


def test_the_last_lines_are_those_of_the_life_that_ended(loop, make_fleet, models, tmp_path, too_late):
    log = tmp_path / "vllm-0.log"
    log.write_text("what an earlier life wrote\n")
    pool = make_fleet(models[0], log_dir=str(tmp_path))
    with pytest.raises(EngineError, match="not ready after") as caught:
        loop.run_until_complete(pool.engines[0].start(None))
    assert f"the last lines of {log}:" in str(caught.value)
    assert "earlier life" not in str(caught.value)
    assert log.read_text().startswith("what an earlier life wrote\n")


def test_a_start_that_cannot_be_encoded_is_an_error_and_leaves_no_worker(loop, make_fleet, models):
    deep = None
    for _ in range(100_000):
        deep = [deep]
    pool = make_fleet(models[0])
    [engine] = pool.engines
    engine.spec = attrs.evolve(engine.spec, settings={"hf_overrides": deep})
    with pytest.raises(EngineError, match=r"'vllm-0' did not start: .*: a Start is nested too deeply"):
        loop.run_until_complete(engine.start(None))
    assert engine.worker is None


def test_too_little_kv_memory_fails_the_start_in_bytes_and_tokens(loop, make_fleet, models):
    pool = make_fleet(models[0], kv_cache_bytes=1 << 20)
    with pytest.raises(EngineError) as caught:
        loop.run_until_complete(pool.engines[0].start(None))
    block = 32 * 2048
    missing = 1024 * 2048 - ((1 << 20) - block)
    for fact in (
        "a request of max_model_tokens = 1024 takes 2,097,152 bytes",
        f"{(1 << 20) - block:,} are there",
        "hold 480 tokens",
        f"raise kv_cache_bytes by {missing:,}, or lower max_model_tokens to 480",
    ):
        assert fact in str(caught.value)
    assert "Traceback" not in str(caught.value)


def test_a_start_that_takes_too_long_is_ended(loop, make_fleet, models, too_late):
    pool = make_fleet(models[0], start_timeout_s=300.0)
    with pytest.raises(EngineError, match=r"not ready after start_timeout_s = 300\n"):
        loop.run_until_complete(pool.engines[0].start(None))
    [group] = too_late
    assert is_group_empty(group)


def test_a_worker_dies_with_its_runtime_even_while_loading(models):
    script = f"""
import asyncio, pathlib, sys
from seer_core.plugins.hookspecs import Startup
from seer_vllm.plugin import Settings, seer_make_engines

async def main():
    settings = Settings(model={str(models[0])!r}, kv_cache_bytes=1 << 24, fork_server=False)
    [engine] = seer_make_engines(settings, Startup(seed=0, base_dir=pathlib.Path()), None).engines
    task = asyncio.create_task(engine.start(None))
    while engine.worker is None and not task.done():
        await asyncio.sleep(0.01)
    print("worker", engine.worker.pid, flush=True)
    await task
    await asyncio.Event().wait()

asyncio.run(main())
"""
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as runtime:
        try:
            lines = (line for line in runtime.stdout if line.startswith("worker "))  # others are its log
            worker = int(next(lines).split()[1])
        finally:
            runtime.kill()
    eventually(lambda: not alive(worker))
