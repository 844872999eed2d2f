"""The plug-in ``paced``: settings, and instances made from them.  Imports neither vLLM nor torch."""

from __future__ import annotations

import os
import secrets
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import attrs
import msgspec
from seer_host.engine import Launch, WorkerEngine
from seer_host.fleet import read_model_info
from seer_host.local import LocalLauncher
from seer_host.tokenizer import ModelTokenizer
from seer_sim.clock import VirtualClock
from seer_sim.tokens import ByteTokenizer
from seer_vllm.plugin import worker_environment

from seer_core.clock import RealClock
from seer_core.errors import ConfigError, quote
from seer_core.hookspecs import Check, Startup, hookimpl
from seer_core.labels import labels_of
from seer_core.ports import Clock, Engine, ModelInfo, Tokenizer
from seer_paced.script import Script, read_script
from seer_paced.settings import Settings, check
from seer_paced.virtual import CANNOT_DRAFT, INSTANCES, VirtualEngine

__all__ = ["PacedFleet", "ScaledClock", "Settings", "make_fleet", "seer_doctor", "seer_make_engines"]

TABLE = "engine.paced"
QUIET = {"VLLM_LOGGING_LEVEL": "ERROR"}


@attrs.frozen
class PacedFleet:
    """Paced instances, and the time they live on."""

    engines: Sequence[Engine]
    clock: Clock
    model: ModelInfo
    tokenizer: Tokenizer | None


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
def seer_make_engines(settings: Settings, startup: Startup) -> PacedFleet:
    """Return the instances, not yet started."""
    changes: dict[str, str | int] = {}
    tokenizer: Tokenizer | None = ByteTokenizer()
    if settings.model:
        model_dir = startup.path(settings.model)
        info = read_model_info(model_dir, settings.max_model_tokens, TABLE)
        changes["vocab_size"] = info.vocab_size
        tokenizer = ModelTokenizer(model_dir) if (model_dir / "tokenizer.json").exists() else None
    if settings.script:
        changes["script"] = str(startup.path(settings.script))
    if settings.log_dir:
        changes["log_dir"] = str(startup.path(settings.log_dir))
    if settings.python:
        changes["python"] = str(startup.path(settings.python))
    return make_fleet(msgspec.structs.replace(settings, **changes), tokenizer)


@hookimpl
def seer_doctor(settings: Settings | None, startup: Startup | None) -> list[Check]:
    """Look for SGLang where its scheduler is wanted; vLLM's is looked for by its own backend."""
    if settings is None or startup is None or settings.scheduler != "sglang":
        return []
    try:
        from seer_sglang.doctor import NEEDED, installation, interpreter
    except ImportError as error:
        return [Check("paced", False, f"seer-sglang is not here: {error}", "install it")]
    python = str(startup.path(settings.python)) if settings.python else interpreter()
    return installation(python, (*NEEDED, "seer-sglang", "seer-sim", "seer-vllm"))


def make_fleet(
    settings: Settings, tokenizer: Tokenizer | None = None, script: Script | None = None
) -> PacedFleet:
    """Return the instances that settings describe; a ``script`` of one's own is for the virtual clock.

    Raises:
        ConfigError: settings contradict each other, or the script cannot be used.
    """
    check(settings)
    labels = labels_of(settings.labels, settings.instances, TABLE)
    model = ModelInfo(settings.vocab_size, settings.max_model_tokens)
    recorded = read_script(Path(settings.script), settings.vocab_size) if settings.script else None
    sglang = _sglang(settings) if settings.scheduler == "sglang" else None
    if settings.clock == "real":
        return PacedFleet(_processes(settings, labels, sglang), ScaledClock(settings.speed), model, tokenizer)
    # Before vLLM is imported, which reads some of it only then.
    os.environ.update(worker_environment(os.environ, 1, ()) | QUIET)
    clock = VirtualClock()
    script = script or Script(settings.vocab_size, settings.lengths, recorded)
    engines = {
        f"paced-{number}": VirtualEngine(f"paced-{number}", clock, settings, labels[number], script, sglang)
        for number in range(settings.instances)
    }
    for kill in settings.kill_at_s:
        if kill.instance not in engines:
            known = ", ".join(engines)
            raise ConfigError(f"{TABLE}.kill_at_s: no instance {quote(kill.instance)}; there are {known}")
        die = partial(engines[kill.instance].kill, f"killed by {TABLE}.kill_at_s", kill.restart_after_s)
        clock.call_at(kill.at_s, die)
    return PacedFleet(list(engines.values()), clock, model, tokenizer)


def _sglang(settings: Settings) -> str:
    """Return the interpreter that has SGLang."""
    try:
        from seer_sglang.doctor import beside, interpreter
    except ImportError as error:
        raise ConfigError(
            f'{TABLE}: scheduler = "sglang" needs seer-sglang ({error}); install it, or write "vllm"'
        ) from error
    found = settings.python or interpreter()
    if found is None:
        raise ConfigError(
            f"{TABLE}: SGLang is neither here nor in {beside()}; run `make setup-sglang`, or name in"
            f" [{TABLE}].python an interpreter that has it"
        )
    return found


def _processes(
    settings: Settings, labels: Sequence[dict[str, str]], sglang: str | None
) -> list[WorkerEngine]:
    temporary = Path(tempfile.gettempdir(), f"seer-paced-{secrets.token_hex(8)}")
    launch = Launch(
        instance=INSTANCES[settings.scheduler],
        settings=msgspec.to_builtins(settings),
        environment=worker_environment(os.environ, 1, ()),
        launcher=LocalLauncher(Path(settings.log_dir or temporary), keep_logs=settings.log_dir is not None),
        start_timeout_s=settings.start_timeout_s,
        stop_timeout_s=settings.stop_timeout_s,
        control_timeout_s=settings.control_timeout_s,
        silence_timeout_s=settings.silence_timeout_s,
        interpreter=sglang or sys.executable,
        cannot_draft=None if sglang is None else CANNOT_DRAFT,
    )
    return [WorkerEngine(f"paced-{number}", launch, labels[number]) for number in range(settings.instances)]
