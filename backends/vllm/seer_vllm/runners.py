"""Which of vLLM's two model runners computes the steps, and whether they are planned ahead.

vLLM 0.32 calls the second ("V2", ``vllm.v1.worker.gpu``) its default wherever Triton works, and the first
deprecated.  The settings choose by the variable ``VLLM_USE_V2_MODEL_RUNNER``; without it vLLM chooses.

With async scheduling a step is planned, and given to the device, while the last one computes, so the device
does not wait for the host between steps.  It is vLLM's default on a GPU.
"""

from __future__ import annotations

import os
from typing import NamedTuple

from vllm import envs
from vllm.config import VllmConfig
from vllm.triton_utils import HAS_TRITON

from seer_core.errors import EngineError
from seer_core.ports.drafting import SourceSpec
from seer_vllm.plugin import RUNNER_VARIABLE
from seer_vllm.proposer import own_method

__all__ = [
    "FIRST",
    "SECOND",
    "RunnerChoice",
    "refuse_other_runners",
    "settle_runner",
    "settle_scheduler",
    "wanted_ahead",
]

FIRST, SECOND = "first", "second"
REMEDY = 'set [engine.vllm].runner = "first"'
SCHEDULER = "seer_vllm.scheduler.AccountingScheduler"
ASYNC_SCHEDULER = "seer_vllm.scheduler.AsyncAccountingScheduler"
SYNC_REMEDY = "drop async_scheduling from [engine.vllm]"


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


def refuse_other_runners(choice: RunnerChoice) -> None:
    """Refuse experts of responses where the second runner does not compute the steps.

    Raises:
        EngineError: it does not.
    """
    if choice.runner == FIRST or (choice.runner is None and not HAS_TRITON):
        remedy = 'set [engine.vllm].runner = "second"' if HAS_TRITON else "use SGLang, or a GPU"
        raise EngineError(
            "only vLLM's second model runner returns the experts that a mixture takes, and the first one"
            f" computes the steps ({choice.reason}): {remedy}"
        )


def wanted_ahead(set_to: bool | None, source: SourceSpec | None, *, pooled_ranks: int) -> bool | None:
    """Return whether vLLM is to schedule asynchronously, None for its own choice.

    Args:
        set_to: what the settings say.
        source: what drafts, if anything does.
        pooled_ranks: the ranks that have a part of each block in a KV pool, 0 without a pool.

    Raises:
        EngineError: the settings want it, and something needs each step's end before the next is planned.
    """
    because = None
    if source is not None:
        because = "drafts follow from the tokens of the last step"
    elif pooled_ranks > 1:
        because = f"{pooled_ranks} ranks copy blocks for the pool into memory that they share"
    if because and set_to:
        raise EngineError(f"no step can be planned ahead, since {because}: {SYNC_REMEDY}")
    return False if because else set_to


def settle_scheduler(config: VllmConfig, set_to: bool | None) -> None:
    """Name Seer's scheduler for what vLLM has decided; with its first model runner no step is planned ahead.

    Raises:
        EngineError: the settings want it, and vLLM has decided otherwise.
    """
    scheduler = config.scheduler_config
    if not config.use_v2_model_runner:
        scheduler.async_scheduling = False
    if set_to and not scheduler.async_scheduling:
        raise EngineError(
            "async scheduling needs vLLM's second model runner, on a device other than a CPU: " + SYNC_REMEDY
        )
    scheduler.scheduler_cls = ASYNC_SCHEDULER if scheduler.async_scheduling else SCHEDULER
