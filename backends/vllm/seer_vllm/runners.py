"""Which of vLLM's two model runners computes the steps, and why.

vLLM 0.32 calls the second ("V2", ``vllm.v1.worker.gpu``) its default wherever Triton works, and the first
deprecated.  The settings choose by the variable ``VLLM_USE_V2_MODEL_RUNNER``; without it vLLM chooses.
"""

from __future__ import annotations

import os
from typing import NamedTuple

from vllm import envs
from vllm.triton_utils import HAS_TRITON

from seer_core.errors import EngineError
from seer_core.ports.drafting import SourceSpec
from seer_vllm.plugin import RUNNER_VARIABLE
from seer_vllm.proposer import own_method

__all__ = ["FIRST", "SECOND", "RunnerChoice", "settle_runner"]

FIRST, SECOND = "first", "second"
REMEDY = 'set [engine.vllm].runner = "first"'


class RunnerChoice(NamedTuple):
    """A model runner, or None where vLLM is to choose, and the reason for it."""

    runner: str | None
    reason: str


def settle_runner(source: SourceSpec | None, tensor_parallel: int) -> RunnerChoice:
    """Have vLLM take the runner that the settings name, or leave the choice to it.

    Raises:
        EngineError: the settings name the second, and it cannot run here, or not with this drafter.
    """
    wanted = envs.VLLM_USE_V2_MODEL_RUNNER
    if wanted is None:
        if source is None:
            why = "vLLM's choice" if HAS_TRITON else "vLLM's choice, as Triton does not work here"
            return RunnerChoice(None, why)
        os.environ[RUNNER_VARIABLE] = "0"  # vLLM itself lets no drafter but its own into the second
        return RunnerChoice(FIRST, "there is a drafter")
    runner = SECOND if wanted else FIRST
    if wanted and not HAS_TRITON:
        raise EngineError(
            f"vLLM's second model runner needs Triton, which does not work here, as on any CPU: {REMEDY}"
        )
    if wanted and source is not None:
        if own_method(source) is not None:
            raise EngineError(f"vLLM's second model runner does not draft by {source.path!r}: {REMEDY}")
        if tensor_parallel > 1:
            raise EngineError(
                f"vLLM's second model runner drafts on one device, and an instance has {tensor_parallel}:"
                f" {REMEDY}"
            )
    return RunnerChoice(runner, f'[engine.vllm].runner = "{runner}"')
