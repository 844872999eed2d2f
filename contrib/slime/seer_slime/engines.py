"""The engines of slime's rollout process, and the weights that its trainer has written."""

from __future__ import annotations

import shutil
from argparse import Namespace
from pathlib import Path

from seer_journal import DiskJournal
from seer_session import Sampling, Session

from seer_core.errors import ConfigError

__all__ = ["Engines", "check"]


class Engines:
    """A session that lives as long as the process, and the directory of the weights it has loaded."""

    def __init__(self, config: str, journal: str | None = None) -> None:
        """Start the engines of a config's file, with a journal in that directory if one is named."""
        self._journal = None if journal is None else DiskJournal.of_session(journal)
        self.session = Session(config, journal=self._journal)
        self.session.runtime.refuse_environment("the adapter for slime")
        self.session.start()
        self._weights: Path | None = None

    def close(self) -> None:
        """Stop the engines, which would otherwise end with the process."""
        self.session.close()
        if self._journal is not None:
            self._journal.close()

    def load_weights(self, args: Namespace) -> None:
        """Load the newest weights of slime's trainer, unless the engines have them.

        The directory of the weights before is deleted then, as slime deletes those that its own engines have
        loaded.

        Raises:
            ConfigError: there are none.
            EngineError: they cannot be loaded.
        """
        if args.debug_rollout_only:  # there is no trainer
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


def check(args: Namespace) -> None:
    """Make sure that slime's arguments ask for what Seer's rollouts can give.

    Raises:
        ConfigError: they do not, and what to change.
    """
    if not getattr(args, "seer_config", None):
        raise ConfigError(
            "Seer's config is not named; give --custom-config-path FILE.yaml with the line"
            " `seer_config: /path/to/rollout.toml`"
        )
    if args.rollout_num_gpus != 0:
        raise ConfigError(
            f"slime starts SGLang servers of its own on {args.rollout_num_gpus} GPUs, and Seer has its own"
            " engines; give --rollout-num-gpus 0"
        )
    disk = args.update_weight_mode == "full" and args.update_weight_transport == "disk"
    if not args.debug_rollout_only and not (disk and args.update_weight_disk_keep_files):
        raise ConfigError(
            "Seer's engines load the weights from a directory; give --update-weight-mode full"
            " --update-weight-transport disk --update-weight-disk-dir DIRECTORY"
            " --update-weight-disk-keep-files"
        )
    for option in (
        "partial_rollout",
        "custom_generate_function_path",
        "use_rollout_routing_replay",
    ):
        if getattr(args, option):
            raise ConfigError(f"Seer's rollouts do not support --{option.replace('_', '-')}; leave it out")
    sampling = Sampling.of(args.rollout_temperature, args.rollout_top_p, args.rollout_top_k)
    if not sampling.raw:
        raise ConfigError(
            f"at temperature {sampling.temperature:g}, top_p {sampling.top_p:g} and top_k {sampling.top_k}"
            " the engines' log-probs, the model's own, are not those that slime trains on; sample at 1, 1 and"
            " -1"
        )


def _version(directory: Path) -> int:
    return int(directory.name.removeprefix("weight_v"))
