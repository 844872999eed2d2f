"""Instances of vLLM that tests share."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import msgspec
import pytest
from seer_vllm.plugin import Settings, seer_make_engines
from seer_worker.client.fleet import WorkerFleet
from seer_worker.client.process_client import Launch

from seer_core.plugins.hookspecs import Startup
from seer_core.ports.drafting import SourceSpec, StepTimes
from seer_core.ports.kv import KVPool
from tests.support.installed import skip_without

BLOCK_TOKENS = 32
KV_BYTES_PER_TOKEN = 4 * 2 * 2 * 32 * 4  # layers, keys and values, heads, their size, float32
MAX_MODEL_TOKENS = 1024
INTERPRETER = Path(__file__).parent / "interpreter"
"""On a worker's path, it lets Triton's kernels run in the interpreter."""
STEP_TIMES = StepTimes((1,), (0,), ((0.001,),))


def _make_fleet(model: Path, **settings: Any) -> WorkerFleet:
    defaults: dict[str, Any] = {
        "model": str(model),
        "dtype": "float32",
        "threads": 1,
        "max_model_tokens": MAX_MODEL_TOKENS,
        "max_running": 32,
        "block_size": BLOCK_TOKENS,
        "kv_cache_bytes": 40 * MAX_MODEL_TOKENS * KV_BYTES_PER_TOKEN,
        "start_timeout_s": 300.0,
    }
    return seer_make_engines(
        msgspec.convert(defaults | settings, Settings), Startup(seed=0, base_dir=model), None
    )


@pytest.fixture(scope="module")
def make_pool(loop: Any) -> Iterator[Callable[[int], KVPool]]:
    """Return a function that starts a pool for ``vllm-0`` and ``vllm-1``; all are stopped at the end."""
    kv_local = pytest.importorskip("seer_kv_local", reason="backends/kv_local is not installed")
    pools = []

    def make(capacity_bytes: int) -> KVPool:
        pools.append(kv_local.LocalPool(capacity_bytes))
        loop.run_until_complete(pools[-1].start(["vllm-0", "vllm-1"]))
        return pools[-1]

    yield make
    for pool in pools:
        loop.run_until_complete(pool.stop())


@pytest.fixture(scope="session")
def make_fleet() -> Callable[..., WorkerFleet]:
    """Return a function: what the plug-in makes of a model and some settings."""
    return _make_fleet


@pytest.fixture(scope="module")
def pool(loop: asyncio.AbstractEventLoop) -> Iterator[KVPool]:
    """A small pool for two instances; tests that need a larger one have their own."""
    kv_local = pytest.importorskip("seer_kv_local", reason="backends/kv_local is not installed")
    pool = kv_local.LocalPool(16 << 20)
    loop.run_until_complete(pool.start(["vllm-0", "vllm-1"]))
    yield pool
    loop.run_until_complete(pool.stop())


@pytest.fixture(scope="session")
def start(run_engine: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that starts instance number ``index``."""
    skip_without("vllm")

    def start(
        model: Path,
        source: SourceSpec | None = None,
        kv_pool: KVPool | None = None,
        index: int = 0,
        change: Callable[[Launch], Launch] | None = None,
        **settings: Any,
    ) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(
                "PYTHONPATH", str(Path(__file__).parent), os.pathsep
            )  # where workers find ``draft_sources``
            engine = _make_fleet(model, instances=index + 1, **settings).engines[index]
        if change is not None:
            engine.spec = change(engine.spec)
        return run_engine(engine, source, kv_pool)

    return start


@pytest.fixture(scope="session")
def roomy(run_engine: Any, start: Callable[..., Any], models: tuple[Path, Path]) -> Any:
    """An instance of the first model with KV memory for everything."""
    return run_engine.share(start(models[0]))


def _interpret(launch: Launch, instance: str = "") -> Launch:
    paths = filter(None, [str(INTERPRETER), launch.environment.get("PYTHONPATH")])
    environment = {**launch.environment, "PYTHONPATH": os.pathsep.join(paths), "TRITON_INTERPRET": "1"}
    return attrs.evolve(launch, instance=instance or launch.instance, environment=environment)


@pytest.fixture(scope="session")
def interpret() -> Callable[[Launch], Launch]:
    """Return a function that gives a worker Triton's interpreter, in which the second model runner runs."""
    return _interpret


@pytest.fixture(scope="session")
def start_second(start: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that starts an instance with vLLM's second model runner."""

    def start_second(model: Path, *arguments: Any, instance: str = "", **settings: Any) -> Any:
        few = {"runner": "second", "max_running": 8, "awaited_kv_bytes": 0} | settings
        return start(model, *arguments, change=partial(_interpret, instance=instance), **few)

    return start_second


@pytest.fixture(scope="session")
def second(run_engine: Any, start_second: Callable[..., Any], models: tuple[Path, Path]) -> Any:
    """An instance of the first model with vLLM's second model runner."""
    return run_engine.share(start_second(models[0]))


@pytest.fixture(scope="session")
def newer(run_engine: Any, start: Callable[..., Any], models: tuple[Path, Path]) -> Any:
    """An instance that was started on the second model: what others answer under its weights."""
    return run_engine.share(start(models[1]))


@pytest.fixture(scope="session")
def notes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory where the draft sources of tests note their calls, and find what to draft."""
    return tmp_path_factory.mktemp("notes")


@pytest.fixture(scope="session")
def drafting(run_engine: Any, start: Callable[..., Any], models: tuple[Path, Path], notes: Path) -> Any:
    """An instance of the first model with drafts of all kinds, as the group's name says."""
    settings = {"notes": str(notes), "complaint": "the draft model is far away"}
    return run_engine.share(
        start(models[0], source=SourceSpec("draft_sources:Scripted", settings, 5, STEP_TIMES))
    )


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker of tests that run a real vLLM."""
    config.addinivalue_line("markers", "engine: runs a real engine")
