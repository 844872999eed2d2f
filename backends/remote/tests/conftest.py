"""Servers that tests share: stand-ins in this process, and real ones of vLLM."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from seer_host.config_files import make_config
from seer_remote.fleet import RemoteFleet
from seer_remote.plugin import Settings, seer_make_engines
from seer_server import make_app
from seer_session.runtime import Runtime

from seer_core.model import Sampling
from seer_core.plugins.hookspecs import Startup
from tests.support.installed import skip_without

sys.path.insert(0, str(Path(__file__).parent))

from server_processes import ServerProcess, sglang_server, vllm_server

PLAIN = Sampling()


@pytest.fixture
def fake() -> Iterator[Callable[..., Any]]:
    """Return a function that starts a stand-in for ``vllm serve``, changed by attributes."""
    from fake_servers import FakeVllm, Thread

    thread = Thread()
    servers: list[Any] = []

    def start(**attributes: Any) -> Any:
        server = FakeVllm()
        for name, value in attributes.items():
            setattr(server, name, value)
        thread.call(server.start())
        server.kill = lambda: thread.call(server.stop())
        server.revive = lambda: thread.call(server.start())
        servers.append(server)
        return server

    yield start
    for server in servers:
        thread.call(server.stop())
        server.release()
    thread.stop()


@pytest.fixture(scope="session")
def serving() -> Any:
    """Return a module: that of the server's own tests, which has a server in a thread."""
    path = Path(__file__).parents[3] / "serving/server/tests/conftest.py"
    spec = importlib.util.spec_from_file_location("serving", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def fleet_of() -> Callable[..., RemoteFleet]:
    """Return a function that makes the fleet of servers, with settings."""

    def make(
        *servers: Any, base_dir: Path = Path(), sampling: Sampling = PLAIN, **settings: Any
    ) -> RemoteFleet:
        urls = {"urls": tuple(each.url for each in servers)} if servers else {}
        chosen = Settings(**{"start_timeout_s": 0.0, "poll_s": 0.05, **urls, **settings})
        return seer_make_engines(chosen, Startup(0, base_dir, sampling=sampling))

    return make


@pytest.fixture(scope="module")
def serve_vllm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., ServerProcess]]:
    """Return a function that starts a ``vllm serve``; all are ended in the end."""
    skip_without("vllm")
    site = tmp_path_factory.mktemp("vllm-site")
    servers: list[ServerProcess] = []

    def serve(model: Path, *more: str, folder: Path | None = None, **variables: str) -> ServerProcess:
        if folder is not None:  # of modules that it finds first
            paths = [str(folder), str(site), os.environ.get("PYTHONPATH", "")]
            variables["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        log = tmp_path_factory.mktemp("server") / "log"
        servers.append(vllm_server(site, model, log, *more, **variables))
        servers[-1].start()
        return servers[-1]

    yield serve
    for server in servers:
        server.close()


@pytest.fixture(scope="module")
def serve_seer(serve_vllm: Callable[..., ServerProcess]) -> Callable[..., ServerProcess]:
    """Return a function that starts a server that samples by key, and shares KV and drafts on demand."""
    kv = {
        "kv_connector": "SeerConnector",
        "kv_connector_module_path": "seer_vllm.served_kv",
        "kv_role": "kv_both",
    }
    drafts = {
        "method": "custom_class",
        "model": "seer_vllm.served_drafts.ServedProposer",
        "num_speculative_tokens": 8,
    }
    flags = ["--enable-scale-out", "--enable-prompt-tokens-details", "--max-num-batched-tokens=256"]
    flags += ["--kv-transfer-config", json.dumps(kv)]
    seer = {"SEER_KEYED_SAMPLING": "1", "VLLM_PLUGINS": "seer", "VLLM_SERVER_DEV_MODE": "1"}

    def serve(model: Path, *more: str, drafted: dict[str, Any] = drafts, **variables: Any) -> ServerProcess:
        spec = ["--speculative-config", json.dumps(drafted)]
        return serve_vllm(model, *flags, *spec, *more, **seer, **variables)

    return serve


@pytest.fixture(scope="module")
def pair(serve_seer: Callable[..., ServerProcess], models: tuple[Path, Path]) -> list[ServerProcess]:
    """Two servers that sample by key, and share KV and draft for runs that want it."""
    servers = [serve_seer(models[0]) for _ in range(2)]
    for server in servers:
        server.await_ready()
    return servers


@pytest.fixture(scope="module")
def address(
    pair: list[ServerProcess], serving: Any, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    """The address of Seer in front of the two, with its token as a password, as TRL sends it."""
    config = make_config(
        {
            "seer": {"engine": "remote", "plugins": ["divided_rollout", "context_sched"]},
            "plugin": {"divided_rollout": {"chunk_tokens": 16}},
            "engine": {"remote": {"urls": [each.url for each in pair]}},
        },
        base_dir=tmp_path_factory.mktemp("front"),
        origin="a test",
    )
    serving.PATIENCE_S = 300  # two servers are tested before it is ready
    token = "a-secret-of-these-tests"
    with serving.Served(make_app(partial(Runtime.from_config, config), token=token)) as served:
        yield served.url.replace("http://", f"http://trl:{token}@")


@pytest.fixture(scope="module")
def serve_sglang(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., ServerProcess]]:
    """Return a function that starts a SGLang server of a model, once; it is ended in the end."""
    servers: dict[Path, ServerProcess] = {}

    def serve(model: Path, *more: str) -> ServerProcess:
        if model not in servers:
            servers[model] = sglang_server(model, tmp_path_factory.mktemp("server") / "log", *more)
            servers[model].start()
            servers[model].await_ready()
        return servers[model]

    yield serve
    for server in servers.values():
        server.close()
