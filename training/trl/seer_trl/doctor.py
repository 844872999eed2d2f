"""The answer to ``seer doctor``: whether TRL is installed beside this adapter."""

from __future__ import annotations

from seer_host.interpreters import check_framework

from seer_core.plugins.hookspecs import Check, hookimpl


@hookimpl
def seer_doctor() -> list[Check]:
    """Look for TRL."""
    return [check_framework("trl", "TRL", "trl", "trainer/grpo_trainer.py", "pip install 'trl>=1.16,<1.17'")]
