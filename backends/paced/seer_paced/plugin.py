"""The plug-in ``paced``: settings, and instances made from them.  Imports neither vLLM nor torch."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import msgspec
from seer_host.installation import how_to_install
from seer_host.labels import labels_of
from seer_host.launcher import Launcher
from seer_sim.clock import VirtualClock
from seer_sim.lengths import CONTROLS, PASSED_OVER
from seer_sim.settings import schedule_losses
from seer_sim.tokens import ByteTokenizer
from seer_worker.client.devices import inherited, worker_environment
from seer_worker.client.engine import InstanceSpec
from seer_worker.client.fleet import ProcessSettings, WorkerFleet, read_model_info
from seer_worker.client.process_client import ProcessClient
from seer_worker.client.tokenizer_reader import TokenizerReader
from seer_worker.tokenizer import ModelTokenizer, has_tokenizer
from seer_worker.wire import Start

from seer_core.errors import ConfigError, EngineError
from seer_core.plugins.hookspecs import Check, Startup, hookimpl
from seer_core.ports.clock import RealClock
from seer_core.ports.engine import ModelInfo, Tokenizer
from seer_paced.script import Script, read_script
from seer_paced.settings import TABLE, Settings, check
from seer_paced.stepper import Stepper
from seer_paced.virtual_engine import VirtualEngine

__all__ = ["ScaledClock", "Settings", "make_fleet", "seer_doctor", "seer_make_engines"]

GET_SGLANG = how_to_install("paced,sglang", "`make setup-sglang`")
GET_VLLM = how_to_install("paced,vllm", "`make setup`")

VLLM = "seer_paced.vllm_instance:EmulatedVllm"
VLLM_PRELOAD, SGLANG_PRELOAD = "seer_vllm.preload:preload", "seer_sglang.preload:preload"
SGLANG = "seer_paced.sglang_instance:EmulatedSglang"
CANNOT_DRAFT = (
    "does not draft on SGLang's scheduler: take the drafter out of [seer].plugins, or write"
    ' scheduler = "vllm" in [engine.paced]'
)
CANNOT_WIRE = 'is on a virtual clock and has no wire to its pool; set kv_pool = "local"'
QUIET = {"VLLM_LOGGING_LEVEL": "ERROR"}


class ScaledClock(RealClock):
    """The machine's time, so many times as fast."""

    def __init__(self, speed: float) -> None:
        super().__init__()
        self._speed = speed

    def now(self) -> float:
        """Return emulated seconds since the first call."""
        return super().now() * self._speed

    def call_at(self, when_s: float, callback: Callable[[], None]) -> Callable[[], None]:
        """Run ``callback`` at an emulated time."""
        return super().call_at(when_s / self._speed, callback)


@hookimpl
def seer_make_engines(settings: Settings, startup: Startup, launcher: Launcher | None) -> WorkerFleet:
    """Return the instances, not yet started."""
    changes: dict[str, str | int | ProcessSettings] = {"worker": settings.worker.resolve(startup)}
    tokenizer: Tokenizer | None = ByteTokenizer()
    if settings.model:
        model_dir = startup.path(settings.model)
        info = read_model_info(model_dir, settings.max_model_tokens, TABLE)
        changes["vocab_size"] = info.vocab_size
        tokenizer = _tokenizer(settings, startup, model_dir) if has_tokenizer(model_dir) else None
    if settings.script:
        changes["script"] = str(startup.path(settings.script))
    return make_fleet(msgspec.structs.replace(settings, **changes), tokenizer, launcher=launcher)


@hookimpl
def seer_doctor(settings: Settings | None, startup: Startup | None) -> list[Check]:
    """Look for SGLang where its scheduler is wanted; vLLM's is looked for by its own backend."""
    if settings is None or startup is None or settings.scheduler != "sglang":
        return []
    try:
        from seer_sglang.doctor import NEEDED, installation, interpreter
    except ImportError as error:
        return [Check("paced", False, f"seer-sglang is not here: {error}", GET_SGLANG)]
    python = settings.worker.resolve(startup).python or interpreter()
    return installation(python, (*NEEDED, "seer-paced", "seer-sglang", "seer-sim"))


def make_fleet(
    settings: Settings,
    tokenizer: Tokenizer | None = None,
    script: Script | None = None,
    launcher: Launcher | None = None,
) -> WorkerFleet:
    """Return the instances that settings describe; a ``script`` of one's own is for the virtual clock.

    On the real clock ``launcher`` starts the workers; without one they are child processes.

    Raises:
        ConfigError: settings contradict each other, or the script cannot be used.
    """
    check(settings)
    if launcher is not None and settings.clock == "virtual":
        raise ConfigError(
            f'{TABLE}: instances on the virtual clock run in this process; write clock = "real", or drop'
            " [seer].launcher"
        )
    labels = labels_of(settings.labels, settings.instances, TABLE)
    recorded = read_script(Path(settings.script), settings.vocab_size) if settings.script else None
    controls = CONTROLS if recorded is None else PASSED_OVER
    model = ModelInfo(settings.vocab_size, settings.max_model_tokens, controls=controls)
    sglang = _sglang(settings) if settings.scheduler == "sglang" else None
    environment = _environment(sglang, inherited(launcher))
    spec = InstanceSpec(
        VLLM if sglang is None else SGLANG,
        msgspec.to_builtins(settings),
        cannot_draft=None if sglang is None else CANNOT_DRAFT,
        cannot_wire=CANNOT_WIRE,
    )
    names = [f"paced-{number}" for number in range(settings.instances)]
    if settings.clock == "real":
        process = msgspec.structs.replace(settings.worker, python=sglang)
        launch = process.launch(
            "paced",
            spec.instance,
            spec.settings,
            environment,
            launcher,
            _preload(sglang),
            cannot_draft=spec.cannot_draft,
        )
        processes = [ProcessClient(name, launch, labels[number]) for number, name in enumerate(names)]
        return WorkerFleet(processes, ScaledClock(settings.speed), model, tokenizer)
    script = script or Script(settings.vocab_size, settings.lengths, recorded)
    if sglang is None:
        os.environ.update(environment | QUIET)  # before vLLM is imported, which reads some of it only then
        make = partial(_make_vllm, settings, script)
    else:
        make = partial(_make_sglang, settings, script, sglang, environment)
    clock = VirtualClock()
    engines = {
        name: VirtualEngine(name, spec, labels[number], clock, make) for number, name in enumerate(names)
    }
    schedule_losses(settings.kill_at_s, engines, clock, TABLE)
    return WorkerFleet(list(engines.values()), clock, model, tokenizer)


def _tokenizer(settings: Settings, startup: Startup, model_dir: Path) -> ModelTokenizer:
    """Return the tokenizer of a model, which a process with the scheduler reads."""
    worker = settings.worker.resolve(startup)
    sglang = _sglang(settings) if settings.scheduler == "sglang" else None
    launch = msgspec.structs.replace(worker, python=sglang).launch(
        "paced", "", {}, _environment(sglang, os.environ), None, _preload(sglang)
    )
    return ModelTokenizer(model_dir, reader=TokenizerReader(launch, model_dir))


def _preload(sglang: str | None) -> str:
    return VLLM_PRELOAD if sglang is None else SGLANG_PRELOAD


def _sglang(settings: Settings) -> str:
    """Return the interpreter that has SGLang."""
    try:
        from seer_sglang.doctor import beside, interpreter
    except ImportError as error:
        raise ConfigError(
            f'{TABLE}: scheduler = "sglang" needs seer-sglang ({error}); {GET_SGLANG}, or write "vllm"'
        ) from error
    found = settings.worker.python or interpreter()
    if found is None:
        raise ConfigError(
            f"{TABLE}: SGLang is neither here nor in {beside()}; {GET_SGLANG}, or name in"
            f" [{TABLE}.worker].python an interpreter that has it"
        )
    return found


def _environment(sglang: str | None, base: Mapping[str, str]) -> dict[str, str]:
    """Return what a process with the scheduler needs: no device, one thread, no network."""
    if sglang is not None:
        return worker_environment(base, 1, ())
    try:
        from seer_vllm import plugin
    except ImportError as error:
        raise ConfigError(f'{TABLE}: scheduler = "vllm" needs seer-vllm ({error}); {GET_VLLM}') from error
    return plugin.vllm_environment(base, 1, ())


def _make_vllm(settings: Settings, script: Script, start: Start) -> Stepper:
    """Make an instance of vLLM here."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what vLLM warns of itself
        from seer_paced.stepper import LocalStepper
        from seer_paced.vllm_instance import EmulatedVllm

        interval_s = settings.report_interval_s
        return LocalStepper(lambda clock: EmulatedVllm(start, clock, script), start, interval_s)


def _make_sglang(
    settings: Settings, script: Script, python: str, environment: dict[str, str], start: Start
) -> Stepper:
    """Make an instance of SGLang in a process of its own."""
    from seer_paced.fork_server import fork_server
    from seer_paced.remote_stepper import RemoteStepper

    server = fork_server(python, environment)
    connection = server.connect()
    limits_s = settings.worker.start_timeout_s, settings.worker.silence_timeout_s
    try:
        return RemoteStepper(connection, start, script, *limits_s)
    except EngineError as error:
        connection.close()
        raise EngineError(
            f"instance {start.instance_id!r} did not start: {error}; the last words of SGLang's process:"
            f" {server.last_words() or 'none'}; {GET_SGLANG}, which puts its environment right"
        ) from error
