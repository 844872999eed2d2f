"""Settings of paced instances, and what the plug-in makes of them without touching vLLM."""

import asyncio
import subprocess
import sys
from types import SimpleNamespace

import msgspec
import pytest
from seer_paced.plugin import make_fleet, seer_doctor
from seer_paced.settings import Settings, block_bytes
from seer_paced.virtual_engine import VirtualEngine
from seer_sim.clock import VirtualClock
from seer_worker.client.fleet import ProcessSettings
from seer_worker.client.process_client import ProcessClient

from seer_core.errors import ConfigError, EngineError
from tests.support.patience import PATIENCE_S


def test_importing_the_plugin_imports_neither_vllm_nor_torch():
    code = "import sys, seer_paced.plugin; sys.exit('vllm' in sys.modules or 'torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=PATIENCE_S).returncode == 0


def test_the_clock_says_where_instances_live():
    virtual, real = make_fleet(Settings()), make_fleet(Settings(clock="real", speed=2.0, instances=3))
    assert [type(engine) for engine in virtual.engines] == [VirtualEngine] * 2
    assert isinstance(virtual.clock, VirtualClock)
    assert [type(engine) for engine in real.engines] == [ProcessClient] * 3


def test_a_launcher_starts_processes_of_the_real_clock_only():
    launcher = object()
    fleet = make_fleet(Settings(clock="real"), launcher=launcher)
    assert [engine.spec.launcher for engine in fleet.engines] == [launcher] * 2
    assert "CUDA_VISIBLE_DEVICES" in fleet.engines[0].spec.environment
    assert "PATH" not in fleet.engines[0].spec.environment
    with pytest.raises(ConfigError, match='virtual clock run in this process; write clock = "real", or drop'):
        make_fleet(Settings(), launcher=launcher)


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"kv_capacity_tokens": 8200}, "no multiple of block_tokens = 16; round it"),
        ({"kv_capacity_tokens": 4096}, "cannot hold one response of max_model_tokens = 8192"),
        ({"max_batched_tokens": 32}, "less than a token a step"),
        ({"speed": 2.0}, 'speed is of the "real" clock'),
        ({"clock": "real", "kill_at_s": ({"instance": "paced-0", "at_s": 1},)}, "is of the virtual clock"),
        (
            {"kill_at_s": ({"instance": "sim-0", "at_s": 1},)},
            "no instance 'sim-0'; there are paced-0, paced-1",
        ),
        ({"cost": {"overhead": 1.0}}, "engine.paced.cost: .*overhead.*; its keys are overhead_s"),
        (
            {"worker": {"python": "/nowhere"}},
            'engine.paced.worker.python is of SGLang; drop it, or write scheduler = "sglang"',
        ),
        (
            {"scheduler": "sglang", "max_batched_tokens": 1000},
            "max_batched_tokens = 1000 is no multiple of block_tokens = 16; SGLang prefills whole blocks",
        ),
        ({"script": "/nowhere"}, "engine.paced.script: /nowhere cannot be read"),
        (
            {"preset": "h800-qwen2-vl-72b-tp8", "gpus_per_instance": 1},
            "146 GB of weights and 5 GB of KV do not fit gpus_per_instance = 1 of 80 GB; raise it",
        ),
    ],
)
def test_a_setting_that_nothing_could_run_by_is_refused_in_one_sentence(fields, complaint):
    with pytest.raises(ConfigError, match=complaint):
        make_fleet(msgspec.convert(fields, Settings))


@pytest.mark.parametrize("clock", ["virtual", "real"])
def test_sglang_schedules_without_drafts(clock):
    fleet = make_fleet(Settings(scheduler="sglang", worker=ProcessSettings(python="/there"), clock=clock))
    drafter = SimpleNamespace(shares=lambda: True)
    assert not fleet.engines[0].set_drafter(None)
    with pytest.raises(EngineError, match="'paced-0' does not draft on SGLang's scheduler: take the drafter"):
        fleet.engines[0].set_drafter(drafter)


def test_sglang_that_is_nowhere_is_refused_in_one_sentence(monkeypatch):
    monkeypatch.setattr("seer_sglang.doctor.interpreter", lambda: None)
    with pytest.raises(ConfigError, match=r"engine.paced: SGLang is neither here nor in .*; run `make setup"):
        make_fleet(Settings(scheduler="sglang"))


@pytest.mark.parametrize("python", ["/nowhere/python", sys.executable])
def test_an_interpreter_without_sglang_is_named_when_an_instance_starts(python, monkeypatch, tmp_path):
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "sglang.py").write_text("raise ImportError('SGLang is not here')")
    engine = make_fleet(Settings(scheduler="sglang", worker=ProcessSettings(python=python))).engines[0]
    complaint = "/nowhere/python cannot be run" if python != sys.executable else "its process is gone"
    with pytest.raises(EngineError, match=complaint):
        asyncio.run(engine.start(None))
    asyncio.run(engine.stop())


@pytest.mark.parametrize("block_tokens", [4, 16, 17, 32, 1024])
def test_a_block_has_room_for_a_fingerprint_of_whole_words(block_tokens):
    assert block_bytes(block_tokens) >= 64
    assert block_bytes(block_tokens) % 4 == 0


def test_the_doctor_looks_for_sglang_where_its_scheduler_is_wanted(tmp_path):
    startup = SimpleNamespace(path=lambda name: tmp_path / name)
    assert seer_doctor(None, None) == seer_doctor(Settings(), startup) == []
    [check] = seer_doctor(Settings(scheduler="sglang", worker=ProcessSettings(python="nothing")), startup)
    assert not check.ok
    assert "nothing is no interpreter" in check.finding
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\nshift 3\nfor name in "$@"; do echo "$name 0.5.23"; done\n')
    python.chmod(0o755)
    checks = seer_doctor(Settings(scheduler="sglang", worker=ProcessSettings(python="python")), startup)
    assert {"seer-sim 0.5.23", "seer-paced 0.5.23"} <= {check.finding for check in checks if check.ok}
