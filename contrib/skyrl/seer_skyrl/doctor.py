"""The answer to ``seer doctor``: whether SkyRL is installed beside this adapter."""

from __future__ import annotations

from seer_host.interpreters import check_framework

from seer_core.plugins.hookspecs import Check, hookimpl


@hookimpl
def seer_doctor() -> list[Check]:
    """Look for SkyRL."""
    return [
        check_framework(
            "skyrl",
            "SkyRL",
            "skyrl",
            "train/entrypoints/main_base.py",
            "git clone https://github.com/NovaSky-AI/SkyRL",
        )
    ]
