"""How Seer is installed here, in a checkout or from wheels, for remedies that work."""

from __future__ import annotations

from pathlib import Path

__all__ = ["COMMAND_EXTRAS", "PLUGINS", "how_to_get_plugin", "how_to_install", "in_checkout"]

ROOT = Path(__file__).parents[2]
"""The checkout, where Seer runs from one; else a directory above the installed packages."""

COMMAND_EXTRAS = {
    "fit": "",
    "plot": "",
    "replay": "",
    "reproduce": "",
    "serve": "serve",
    "shadow": "",
    "sim": "",
    "sweep": "",
    "train": "train",
    "twin": "",
}
"""Commands of Seer's distributions beside the command line's own, with the extra that installs each."""

PLUGINS = {
    "grouped_spec": ("", "`make setup`"),
    "mooncake": ("mooncake", "`make setup`"),
    "openenv": ("openenv", "`make setup`"),
    "opentelemetry": ("opentelemetry", "`make setup`"),
    "paced": ("paced", "`make setup`"),
    "prometheus": ("prometheus", "`make setup`"),
    "ray": ("ray", "`make setup`"),
    "remote": ("remote", "`make setup`"),
    "sglang": ("sglang", "`make setup-sglang`"),
    "skyrl": ("skyrl", "`make setup`"),
    "slime": ("slime", "`make setup`"),
    "trl": ("trl", "`make setup`"),
    "vllm": ("vllm", "`make setup`"),
    "vllm_ngram": ("vllm", "`make setup`"),
    "vllm_suffix": ("vllm", "`make setup`"),
}
"""Seer's own plug-ins that an environment may lack: the extra and the command that bring each."""


def in_checkout(root: Path = ROOT) -> bool:
    """Return whether Seer runs from a checkout, where there are make targets and scripts."""
    return (root / "scripts" / "setup").is_file()


def how_to_install(extra: str, command: str, *, again: bool = False, root: Path = ROOT) -> str:
    """Return how to get what is missing: by a command of the checkout, or by an extra of ``seer-rollout``.

    ``command`` is that of a checkout, in backquotes.  ``extra`` may name several
    extras with commas between, or be empty for what comes without one.  ``again`` replaces a broken one.
    """
    if in_checkout(root):
        return f"run {command} in Seer's checkout"
    name = f"'seer-rollout[{extra}]'" if extra else "seer-rollout"
    return f"run `pip install {'--force-reinstall ' if again else ''}{name}`"


def how_to_get_plugin(name: str) -> str:
    """Return how to install a plug-in of Seer's own, or nothing for another name."""
    return how_to_install(*PLUGINS[name]) if name in PLUGINS else ""
