"""An engine plug-in's half in the runtime's process: settings that all engines have, and the fleet."""

from __future__ import annotations

import os
import secrets
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Self

import attrs
import msgspec
from msgspec import Meta, Struct
from seer_host.json_files import JsonFormat, describe_flaw
from seer_host.labels import InstanceLabels, labels_of
from seer_host.launcher import Launcher

from seer_core.errors import ConfigError
from seer_core.plugins.config_types import Seconds
from seer_core.plugins.hookspecs import Startup
from seer_core.ports.clock import RealClock
from seer_core.ports.engine import Clock, ModelInfo, Tokenizer
from seer_worker.client.digest import digest_of
from seer_worker.client.engine import WorkerClient
from seer_worker.client.local import LocalLauncher
from seer_worker.client.process_client import Launch, ProcessClient
from seer_worker.client.tokenizer_reader import TokenizerReader
from seer_worker.tokenizer import ModelTokenizer, has_tokenizer
from seer_worker.tokenizer.images import ImagePlaces

__all__ = [
    "Few",
    "Positive",
    "ProcessSettings",
    "WorkerFleet",
    "WorkerSettings",
    "make_fleet",
    "read_model_info",
]

OLD_LOGS_S = 7 * 24 * 3600.0
"""Age from which logs of a failure are taken for read."""

Positive = Annotated[int, Meta(ge=1)]
"""Type of a setting that is an integer, 1 or more."""

Few = Annotated[int, Meta(ge=1, le=10_000)]
"""Type of a setting that is an integer from 1 to 10,000, such as a number of instances or threads."""

NEEDS_TOKENIZER = ("bad_words", "structured_outputs", "stop", "include_stop_str_in_output")
"""The fields of ``Sampling`` that are about text."""

NAME_A_MODEL = "give a directory with a Hugging Face model's files; nothing is downloaded"


class ProcessSettings(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How the workers of an engine run, and how long they may take."""

    python: str | None = None
    """The interpreter that runs the workers, where the engine has an environment of its own; relative to the
    config file. Without it: the running one, or the one that the engine's plug-in finds.
    """
    start_timeout_s: Seconds = 600.0
    """A worker that is not ready after so long counts as failed."""
    stop_timeout_s: Seconds = 10.0
    """How long a worker may take to end by itself before it is killed."""
    control_timeout_s: Seconds = 120.0
    """How long a worker may take for one call, such as an update of weights or sleep."""
    silence_timeout_s: Seconds = 300.0
    """An instance that sends nothing for so long while it has chunks counts as lost."""
    fork_server: bool = True
    """Whether workers on this machine are forks of a process that has imported the engine, which stays for as
    long as this one and starts each further worker in a second or two. Without it each imports the engine.
    """
    log_dir: str | None = None
    """The directory of the workers' logs, relative to the config file. Without it they go to a temporary
    directory, and stay only if something goes wrong.
    """

    def resolve(self, startup: Startup) -> Self:
        """Return them with absolute paths."""
        paths = {
            name: str(startup.path(value))
            for name in ("python", "log_dir")
            if (value := getattr(self, name)) is not None
        }
        return msgspec.structs.replace(self, **paths)

    def launch(
        self,
        name: str,
        instance: str,
        settings: Mapping[str, Any],
        environment: Mapping[str, str],
        launcher: Launcher | None,
        preload: str | None = None,
        **spec: Any,
    ) -> Launch:
        """Return how workers of the engine ``name`` are launched: by ``launcher``, or on this machine.

        ``instance``, ``settings`` and ``spec`` are as ``InstanceSpec`` has them; paths are absolute.
        ``preload`` is as ``LocalLauncher`` has it.
        """
        _remove_old_logs(f"seer-{name}-")
        temporary = Path(tempfile.gettempdir(), f"seer-{name}-{secrets.token_hex(8)}")
        return Launch(
            instance=instance,
            settings=settings,
            environment=environment,
            launcher=launcher or LocalLauncher(preload if self.fork_server else None),
            log_dir=Path(self.log_dir or temporary),
            keep_logs=self.log_dir is not None,
            start_timeout_s=self.start_timeout_s,
            stop_timeout_s=self.stop_timeout_s,
            control_timeout_s=self.control_timeout_s,
            silence_timeout_s=self.silence_timeout_s,
            interpreter=self.python or sys.executable,
            **spec,
        )


def _remove_old_logs(prefix: str) -> None:
    """Remove logs that workers of killed or failed runs left in the temporary directory, after a week."""
    for left in Path(tempfile.gettempdir()).glob(f"{prefix}{'[0-9a-f]' * 16}"):
        with suppress(OSError):
            status = left.lstat()
            if status.st_uid == os.getuid() and time.time() - status.st_mtime > OLD_LOGS_S:
                shutil.rmtree(left, ignore_errors=True)


class WorkerSettings(ProcessSettings, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The keys that the table of every engine in worker processes has."""

    model: str
    """The directory of a Hugging Face model, relative to the config file; nothing is downloaded."""
    instances: Few = 1
    """How many instances there are."""
    max_model_tokens: Annotated[int, Meta(ge=0)] = 0
    """The longest context, prompt and response together; 0 means the model's own limit."""
    max_running: Positive = 64
    """The most requests that one instance decodes in a step."""
    labels: InstanceLabels = {}
    """Labels that placers see: one table for all instances, or a list with one for each."""


@attrs.frozen
class WorkerFleet:
    """Instances over workers, and the clock they live on."""

    engines: Sequence[WorkerClient]
    """The instances."""
    clock: Clock
    """The clock that they run on."""
    model: ModelInfo
    """The limits that prompts must respect."""
    tokenizer: Tokenizer | None
    """The model's tokenizer, if there is one."""


def make_fleet(
    name: str,
    settings: WorkerSettings,
    startup: Startup,
    instance: str,
    arguments: Mapping[str, Any],
    environments: Sequence[Mapping[str, str]],
    *,
    preload: str | None = None,
    launcher: Launcher | None = None,
    max_temperature: float | None = None,
    controls: tuple[str, ...] = (),
    own_methods: tuple[str, ...] = (),
    cannot_draft: str | None = None,
    ignores_kv_pool: bool = False,
    keeps_adapters: bool = False,
    trust_remote_code: bool = False,
    skip_tokenizer: bool = False,
    takes_images: bool = False,
) -> WorkerFleet:
    """Return the instances of the table ``[engine.<name>]``, not yet started.

    Args:
        name: the plug-in's.
        settings: the table's.
        startup: where relative paths start.
        instance: the import path of the class that a worker makes.
        arguments: plain data for it, its ``start.settings``.
        environments: one for each instance's worker, beside what is set where it runs.
        preload: the import path of the function by which a fork server imports the engine, if it can.
        launcher: starts the workers; without one they run on this machine.
        max_temperature: the highest that the engine samples with, None without a limit.
        controls: the fields of ``Sampling`` that the engine has, as ``ModelInfo`` has them; those that need a
            tokenizer are left out where there is none.
        own_methods: as ``Launch`` has it, like the arguments that follow.
        cannot_draft: likewise.
        ignores_kv_pool: likewise.
        keeps_adapters: likewise.
        trust_remote_code: whether the tokenizer may run code of the model's directory.
        skip_tokenizer: whether the model's tokenizer, if there is one, is left alone.
        takes_images: whether the engine takes images, with a model for which they can be placed.

    Raises:
        ConfigError: there is no such model, or a setting does not fit it.
    """
    table = f"engine.{name}"
    model_dir = startup.path(settings.model)
    model = read_model_info(model_dir, settings.max_model_tokens, table, max_temperature)
    digest = digest_of(model_dir)
    textual = has_tokenizer(model_dir) and not skip_tokenizer
    launch = settings.resolve(startup).launch(
        name,
        instance,
        arguments,
        {},
        launcher,
        preload,
        own_methods=own_methods,
        cannot_draft=cannot_draft,
        ignores_kv_pool=ignores_kv_pool,
        keeps_adapters=keeps_adapters,
        model=digest,
        model_dir="" if launcher is None else str(model_dir),
        tokenizer_dir=str(model_dir.absolute()) if textual else "",
        trust_remote_code=trust_remote_code,
    )
    read = TokenizerReader(
        attrs.evolve(launch, environment=environments[0]), model_dir, trust_remote_code, textual
    )
    launch = attrs.evolve(launch, end_tokens=lambda: read().end_token_ids)
    labels = labels_of(settings.labels, settings.instances, table)
    engines = [
        ProcessClient(f"{name}-{index}", attrs.evolve(launch, environment=environment), labels[index])
        for index, environment in enumerate(environments)
    ]
    if not textual:
        controls = tuple(each for each in controls if each not in NEEDS_TOKENIZER)
    seeing = takes_images and textual and ImagePlaces.read(model_dir) is not None
    model = msgspec.structs.replace(model, digest=digest, controls=controls, takes_images=seeing)
    tokenizer = ModelTokenizer(model_dir, trust_remote_code, read) if textual else None
    return WorkerFleet(engines, RealClock(), model, tokenizer)


class TextConfig(Struct, frozen=True):
    """The part of a language model's ``config.json`` that is needed."""

    vocab_size: Positive | None = None
    max_position_embeddings: Positive | None = None


class ModelConfig(TextConfig, frozen=True):
    """That part, of a model that may see as well."""

    text_config: TextConfig | None = None


MODEL_CONFIG = JsonFormat[ModelConfig](ModelConfig, "no model's configuration", NAME_A_MODEL, ConfigError)


def read_model_info(
    model_dir: Path, max_model_tokens: int, table: str, max_temperature: float | None = None
) -> ModelInfo:
    """Read the vocabulary size and the length limit from the model's ``config.json``.

    Raises:
        ConfigError: there is no such model, or ``max_model_tokens`` is more than it can take.
    """
    path = model_dir / "config.json"
    if not model_dir.is_dir():
        raise ConfigError(f"{table}.model: {model_dir} is no directory; {NAME_A_MODEL}")
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise ConfigError(
            f"{table}.model: {path} cannot be read: {describe_flaw(error)}; {NAME_A_MODEL}"
        ) from error
    config = MODEL_CONFIG.decode(raw, f"{table}.model: {path} is")
    text = config.text_config or config
    for name in ("vocab_size", "max_position_embeddings"):
        if getattr(text, name) is None:
            raise ConfigError(f"{table}.model: {path} lacks {name!r}; {NAME_A_MODEL}")
    assert text.vocab_size is not None
    assert text.max_position_embeddings is not None
    limit = text.max_position_embeddings
    if max_model_tokens > limit:
        raise ConfigError(
            f"{table}.max_model_tokens = {max_model_tokens}, but the model in {model_dir} takes {limit};"
            " lower it"
        )
    return ModelInfo(text.vocab_size, max_model_tokens or limit, max_temperature)
