"""Instances of SGLang that tests share."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from seer_sglang.plugin import Settings, seer_make_engines
from seer_worker.client.fleet import WorkerFleet
from seer_worker.client.process_client import Launch

from seer_core.plugins.hookspecs import Startup
from seer_core.ports.drafting import SourceSpec
from seer_core.ports.kv import KVPool

KV_BYTES_PER_TOKEN = 4 * 2 * 2 * 32 * 4  # layers, keys and values, heads, their size, float32
MAX_MODEL_TOKENS = 1024


def _make_fleet(model: Path, **settings: Any) -> WorkerFleet:
    defaults: dict[str, Any] = {
        "model": str(model),
        "dtype": "float32",
        "max_model_tokens": MAX_MODEL_TOKENS,
        "max_running": 32,
        "kv_cache_bytes": 40 * MAX_MODEL_TOKENS * KV_BYTES_PER_TOKEN,
        "start_timeout_s": 300.0,
    }
    return seer_make_engines(
        msgspec.convert(defaults | settings, Settings), Startup(seed=0, base_dir=model), None
    )


@pytest.fixture(scope="session")
def make_fleet() -> Callable[..., WorkerFleet]:
    """Return a function: what the plug-in makes of a model and some settings."""
    return _make_fleet


@pytest.fixture(scope="session")
def start(run_engine: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that starts instance number ``index``."""

    def start(
        model: Path,
        index: int = 0,
        source: SourceSpec | None = None,
        kv_pool: KVPool | None = None,
        change: Callable[[Launch], Launch] | None = None,
        **settings: Any,
    ) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PYTHONPATH", str(Path(__file__).parent), os.pathsep)  # for ``sglang_sources``
            engine = _make_fleet(model, instances=index + 1, **settings).engines[index]
        if change is not None:
            engine.spec = change(engine.spec)
        return run_engine(engine, source, kv_pool)

    return start


@pytest.fixture(scope="session")
def roomy(run_engine: Any, start: Callable[..., Any], models: tuple[Path, Path]) -> Any:
    """An instance of the first model with KV memory for everything."""
    return run_engine.share(start(models[0]))


@pytest.fixture(scope="session")
def other(run_engine: Any, start: Callable[..., Any], models: tuple[Path, Path]) -> Any:
    """Another instance of the same model, which counts its own figures."""
    return run_engine.share(start(models[0], index=1, metrics=True))
