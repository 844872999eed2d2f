"""Real rollouts on real vLLM engines, through the same doors a user takes."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.eventually import PATIENCE_S, eventually
from tests.support.installed import skip_without
from tests.support.processes import alive, descendants

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "tiny_reasoner"
BOUND_S = 600

pytestmark = pytest.mark.engine
skip_without("vllm", reason="vLLM is not installed: `make setup` installs it")


@pytest.fixture
def few_prompts(tmp_path):
    """The first groups of the example, with shorter responses, as a prompts file."""
    lines = (EXAMPLE / "prompts.jsonl").read_text("utf-8").splitlines()[:4]
    path = tmp_path / "prompts.jsonl"
    prompts = [{**json.loads(line), "max_tokens": 768} for line in lines]
    path.write_text("".join(json.dumps(each) + "\n" for each in prompts), "utf-8")
    return path


def seer(*arguments):
    return [sys.executable, "-c", "from seer_cli import main; main()", *map(str, arguments)]


@pytest.mark.long
def test_compare_finds_preemptions_only_in_the_baseline_and_the_same_tokens_everywhere(tmp_path, few_prompts):
    report = tmp_path / "compare.json"
    small = [
        *("--set", "engine.vllm.kv_cache_bytes=6815744"),
        *("--set", "plugin.divided_rollout.chunk_tokens=64"),
        *("--set", "seer.kv_pool=none"),
    ]
    run = subprocess.run(
        [*seer("compare", EXAMPLE / "demo.toml", "--prompts", few_prompts, "--json", report), *small],
        capture_output=True,
        text=True,
        timeout=BOUND_S,
    )
    assert run.returncode == 0, run.stderr
    arms = json.loads(report.read_text("utf-8"))
    techniques = ["+ divided_rollout", "+ context_sched", "+ grouped_spec"]
    assert [arm["name"] for arm in arms] == ["baseline", *techniques, "oracle"]
    assert [arm["acceptance_length"] > 1 for arm in arms] == [False, False, False, True, False]
    assert all(arm["tokens_equal_to_baseline"] for arm in arms)
    assert arms[0]["preemptions"] > 0
    assert arms[0]["recomputed_tokens"] > 0
    assert [arm["preemptions"] for arm in arms[1:]] == [0, 0, 0, 0]
    assert len({arm["tokens"] for arm in arms}) == 1


def test_control_c_keeps_what_has_finished_and_leaves_no_engine_behind(tmp_path):
    out = tmp_path / "out"
    one = ("--set", "engine.vllm.instances=1")
    run = subprocess.Popen(
        seer("run", EXAMPLE / "demo.toml", "--prompts", EXAMPLE / "prompts.jsonl", "--out", out, *one),
        stderr=subprocess.PIPE,
        text=True,
    )
    completions = out / "completions.jsonl"
    below = processes_of_a_run_that_writes(run, completions)
    assert len([pid for pid in below if holds_pool(pid)]) == 1
    run.send_signal(signal.SIGINT)
    _, errors = run.communicate(timeout=PATIENCE_S)
    assert run.returncode == 130, errors
    assert "Traceback" not in errors
    eventually(lambda: not any(map(alive, below)))
    lines = completions.read_text("utf-8").splitlines()
    assert lines
    assert all(json.loads(line)["finish_reason"] in ("stop", "length") for line in lines)


def test_a_killed_runtime_leaves_no_engine_and_no_kv_behind(tmp_path):
    out = tmp_path / "out"
    run = subprocess.Popen(
        seer("run", EXAMPLE / "demo.toml", "--prompts", EXAMPLE / "prompts.jsonl", "--out", out),
        stderr=subprocess.DEVNULL,
    )
    below = processes_of_a_run_that_writes(run, out / "completions.jsonl")
    assert holds_pool(run.pid)
    assert len([pid for pid in below if holds_pool(pid)]) == 2
    run.kill()
    run.wait()
    eventually(lambda: not any(map(alive, below)))


def processes_of_a_run_that_writes(run, completions):
    """Return all that a run has started, its instances among them, once a response has finished."""
    eventually(lambda: run.poll() is not None or any(map(holds_pool, descendants(run.pid))), "an instance")
    eventually(lambda: run.poll() is not None or (completions.exists() and completions.stat().st_size > 0))
    assert run.poll() is None
    return descendants(run.pid)


def holds_pool(pid):
    """Return whether a process has a part of a KV pool in its memory."""
    try:
        return "memfd:seer-kv-" in Path(f"/proc/{pid}/maps").read_text()
    except (OSError, ProcessLookupError):
        return False
