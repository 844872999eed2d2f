"""Low precision: a sentence about each format in which vLLM does not start here."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import structlog
from vllm.platforms import current_platform

from seer_core.error_origin import one_line
from seer_core.errors import EngineError, name_of

__all__ = ["naming_format"]

log = structlog.get_logger("seer")

LONGEST_FACT = 300
ON_CPU = "on a CPU it quantises dense models by fp8_per_channel, and runs int8 checkpoints (W8A8)"
ELSEWHERE = "take it out of engine_args, or serve another checkpoint"
BESIDE = "lora_rank out of [engine.vllm] lets it start"


@contextmanager
def naming_format(form: str | None, *, lora: bool = False) -> Iterator[None]:
    """Say in one sentence that vLLM does not start with a format; the log has the rest.

    ``lora``: adapters are kept beside the model, which some formats do not take.
    """
    try:
        yield
    except EngineError:
        raise
    except Exception as error:
        if form is None:
            raise
        log.exception("format_does_not_start", quantization=form)
        beside = " and adapters beside the model" if lora else ""
        remedies = [ON_CPU if current_platform.is_cpu() else ELSEWHERE, *([BESIDE] if lora else [])]
        fact = f"{name_of(type(error))}: {one_line(error)}"[:LONGEST_FACT].rstrip(": .")
        raise EngineError(
            f"vLLM does not start with quantization = {form!r}{beside} here: {fact}; {'; '.join(remedies)}"
        ) from error
