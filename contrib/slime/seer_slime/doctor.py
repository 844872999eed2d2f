"""The answer to ``seer doctor``: whether slime is installed beside this adapter."""

from __future__ import annotations

from seer_host.interpreters import check_framework

from seer_core.plugins.hookspecs import Check, hookimpl


@hookimpl
def seer_doctor() -> list[Check]:
    """Look for slime."""
    return [
        check_framework(
            "slime", "slime", "slime", "rollout/base_types.py", "git clone https://github.com/THUDM/slime"
        )
    ]
