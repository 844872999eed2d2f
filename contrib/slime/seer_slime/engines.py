"""The engines of slime's rollout process: slime's own SGLang servers, or Seer's; and their weights."""

from __future__ import annotations

import json
import shutil
import tomllib
from argparse import Namespace
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from seer_journal import DiskJournal
from seer_session import Config, Sampling, Session, load_config

from seer_core.errors import ConfigError, quote
from seer_slime.canary import canary_limits
from seer_slime.nucleus import FIELD

__all__ = ["Engines", "check", "kept_config", "router_of", "seed_of_run"]

DEFAULT = Path(__file__).with_name("kept.toml")
"""The settings over slime's own servers where no file is named."""


class Engines:
    """A session that lives as long as the process, and the directory of the weights it has loaded.

    With a ``router`` the engines are the servers that it lists, which are slime's.
    """

    def __init__(self, config: str | None, journal: str | None = None, router: str | None = None) -> None:
        """Start the engines of a config's file, with a journal in that directory if one is named."""
        self.kept = router is not None
        with ExitStack() as opened:  # a step that tries again opens the journal again
            self._journal = None if journal is None else opened.enter_context(DiskJournal.of_session(journal))
            chosen = load_config(config or "") if router is None else kept_config(config, router)
            self.session = Session(chosen, journal=self._journal)
            self.session.runtime.refuse_environment("the adapter for slime")
            self.session.start()
            opened.pop_all()
        self._weights: Path | None = None
        self.label = ""
        """The name that slime gives the weights in its servers; empty where engines are Seer's own."""

    def close(self) -> None:
        """Stop the engines, which would otherwise end with the process."""
        self.session.close()
        if self._journal is not None:
            self._journal.close()

    def load_weights(self, args: Namespace) -> None:
        """Load the newest weights of slime's trainer, unless the engines have them.

        Where the servers are slime's, slime has loaded them, and Seer looks whether all have the same.

        The directory of the weights before is deleted then, as slime deletes those that its own engines have
        loaded.

        Raises:
            ConfigError: there are none.
            EngineError: they cannot be loaded.
        """
        if self.kept:
            if not args.debug_rollout_only:  # or else there is no trainer
                self.session.weights_changed()
            runtime = self.session.runtime
            labels = (getattr(runtime.engines[name], "weights_label", "") for name in runtime.alive)
            self.label = next(labels, "")
            return
        if args.debug_rollout_only:
            return
        found = sorted(Path(args.update_weight_disk_dir).glob("weight_v*"), key=_version)
        if not found:
            raise ConfigError(
                f"slime's trainer has written no weights to {args.update_weight_disk_dir}; give"
                " --update-weight-disk-keep-files, and a directory that all machines share"
            )
        newest, before = found[-1], self._weights
        if newest == before:
            return
        self.session.update_weights(newest, _version(newest))
        self._weights = newest
        if before is not None:
            shutil.rmtree(before, ignore_errors=True)


def router_of(args: Namespace) -> str | None:
    """Return the address of slime's router, None where slime has no servers of its own."""
    if args.rollout_num_gpus == 0:
        return None
    return f"http://{args.sglang_router_ip}:{args.sglang_router_port}"


def kept_config(path: str | None, router: str) -> Config:
    """Return the config of that file, or the default one, over the servers that slime's router lists.

    Raises:
        ConfigError: it is none, or names other engines.
    """
    place = DEFAULT if path is None else Path(path)
    named = _tables(place)
    engine = named.get("seer", {}).get("engine", "remote")
    if engine != "remote":
        raise ConfigError(
            f"{path} names engine {quote(engine)}, and the engines are slime's; leave it out, or give"
            " --rollout-num-gpus 0 for engines of Seer's own"
        )
    remote = named.get("engine", {}).get("remote", {})
    settings = ["seer.engine=remote", f'engine.remote.router="{router}"', "engine.remote.dialect=sglang"]
    if "plugins" not in named.get("seer", {}):
        settings.append('seer.plugins=["divided_rollout", "context_sched"]')
    if "require" not in remote:
        settings.append("engine.remote.require=distributed")
    if "processed_logprobs" not in remote:
        settings.append("engine.remote.processed_logprobs=true")
    named_too = [*remote.get("divided_attachments", ()), FIELD]
    settings.append(f"engine.remote.divided_attachments={json.dumps(named_too)}")
    return load_config(place, settings)


def seed_of_run(args: Namespace) -> int | None:
    """Return the seed from which those of responses follow, None where slime's servers need not heed any."""
    router, path = router_of(args), getattr(args, "seer_config", None)
    if router is None or not path or not _is_exact(path):
        return None
    return kept_config(path, router).seer.seed


def _is_exact(path: str) -> bool:
    """Return whether a config wants tokens that follow from seeds alone."""
    return bool(_tables(Path(path)).get("engine", {}).get("remote", {}).get("require") == "exact")


def _tables(place: Path) -> dict[str, Any]:
    """Return the tables of a config's file; what is wrong with it, ``load_config`` says."""
    try:
        return tomllib.loads(place.read_text("utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError):
        return {}


def check(args: Namespace) -> None:
    """Make sure that slime's arguments ask for what Seer's rollouts can give.

    Raises:
        ConfigError: they do not, and what to change.
    """
    for option in ("partial_rollout", "custom_generate_function_path"):
        if getattr(args, option):
            raise ConfigError(f"Seer's rollouts do not support --{option.replace('_', '-')}; leave it out")
    if router_of(args) is None:
        _check_own(args)
    if canary_limits(args)[0]:
        _check_canary(args)


def _check_own(args: Namespace) -> None:
    """Make sure of the same where engines are Seer's own."""
    if not getattr(args, "seer_config", None):
        raise ConfigError(
            "Seer's config is not named; give --custom-config-path FILE.yaml with the line"
            " `seer_config: /path/to/rollout.toml`, or keep slime's servers: leave out --rollout-num-gpus 0"
        )
    disk = args.update_weight_mode == "full" and args.update_weight_transport == "disk"
    if not args.debug_rollout_only and not (disk and args.update_weight_disk_keep_files):
        raise ConfigError(
            "Seer's engines load the weights from a directory; give --update-weight-mode full"
            " --update-weight-transport disk --update-weight-disk-dir DIRECTORY"
            " --update-weight-disk-keep-files"
        )
    sampling = Sampling.of(args.rollout_temperature, args.rollout_top_p, args.rollout_top_k)
    if not sampling.raw:
        raise ConfigError(
            f"at temperature {sampling.temperature:g}, top_p {sampling.top_p:g} and top_k {sampling.top_k}"
            " the engines' log-probs, the model's own, are not those that slime trains on; sample at 1, 1 and"
            " -1"
        )


def _check_canary(args: Namespace) -> None:
    """Make sure that a response which is written again has the same tokens."""
    if router_of(args) is None:
        raise ConfigError("seer_canary asks slime's own servers, and there are none; leave it out")
    path = getattr(args, "seer_config", None)
    if not path or not _is_exact(path):
        raise ConfigError(
            "seer_canary compares tokens, which depend on chance; start slime with"
            ' --sglang-enable-deterministic-inference, and write require = "exact" into [engine.remote] of'
            " seer_config"
        )


def _version(directory: Path) -> int:
    return int(directory.name.removeprefix("weight_v"))
