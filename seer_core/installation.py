"""How Seer is installed here, in a checkout or from wheels, for remedies that work."""

from __future__ import annotations

from pathlib import Path

__all__ = ["COMMAND_EXTRAS", "PLUGIN_EXTRAS", "how_to_install", "in_checkout"]

ROOT = Path(__file__).parents[1]
"""The checkout, where the core runs from one; else the directory of installed packages."""


COMMAND_EXTRAS = {
    "plot": "",
    "replay": "",
    "reproduce": "",
    "serve": "serve",
    "sim": "",
    "train": "train",
    "twin": "",
}
"""Commands of Seer's distributions beside the command line's own, with the extra that installs each."""

PLUGIN_EXTRAS = {
    "mooncake": "mooncake",
    "paced": "paced",
    "sglang": "sglang",
    "skyrl": "skyrl",
    "slime": "slime",
    "trl": "trl",
    "vllm": "vllm",
    "vllm_ngram": "vllm",
    "vllm_suffix": "vllm",
}
"""Plug-ins of Seer's that ``seer-rollout`` without extras lacks, with the extra that installs each."""


def in_checkout(root: Path = ROOT) -> bool:
    """Return whether the core runs from a checkout, where there are make targets and scripts."""
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
