"""Rollouts that verl writes to ``trainer.rollout_data_dir``: texts, one file of JSON lines per step.

verl 0.9.1, ``_write_generations`` of verl/trainer/ppo/ray_trainer.py and v1/trainer_base.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from sys import intern

import msgspec

from seer_lab.foreign.responses import LoggedResponse, keys_of, read_lines

__all__ = ["KIND", "recognises", "responses"]

KIND = "a rollout dump of verl's"


class _VerlLine(msgspec.Struct, frozen=True):
    """A response; both texts are without special tokens, and without the prompt's padding."""

    input: str
    output: str
    step: int


def recognises(head: bytes) -> bool:
    """Return whether a file that begins with this line is such a dump."""
    return keys_of(head).issuperset(_VerlLine.__struct_fields__)


def responses(path: Path, count: Callable[[str], int]) -> Iterator[LoggedResponse]:
    """Yield the responses of a file; ``count`` returns the tokens of a text.

    Raises:
        InputError: see ``read_lines``.
    """
    prompts: dict[str, int] = {}
    for line in read_lines(path, _VerlLine, KIND):
        prompt = intern(line.input)  # kept once, for all its responses
        if prompt not in prompts:
            prompts[prompt] = max(1, count(prompt))
        yield LoggedResponse(line.step, prompt, prompts[prompt], max(1, count(line.output)))
