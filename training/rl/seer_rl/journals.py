"""The journals of a training run's rollouts, kept until a checkpoint has what was learnt from them."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from seer_journal import DiskJournal, Safety

__all__ = ["RolloutJournals"]


class RolloutJournals:
    """A directory with a journal for each rollout since the last checkpoint; none if ``safety`` is "none"."""

    def __init__(self, root: Path, safety: Safety | Literal["none"]) -> None:
        self._root, self._safety = root, safety

    @contextmanager
    def open(self, iteration: int, held_out: int | None = None) -> Iterator[DiskJournal | None]:
        """Open the journal of an iteration's rollout, or of an evaluation in it, by its weight version.

        Raises:
            InputError: it is damaged, or of another form.
            OutputError: it cannot be written.
        """
        if self._safety == "none":
            yield None
            return
        name = f"{iteration:06d}" + ("" if held_out is None else f"-held-out-{held_out}")
        with DiskJournal(self._root / name, safety=self._safety) as journal:
            yield journal

    def drop(self, iterations: int) -> None:
        """Delete the journals of the first so many iterations, which need not be done again."""
        for path in self._root.glob("*"):
            number = path.name.partition("-")[0]
            if number.isdecimal() and int(number) < iterations:
                shutil.rmtree(path, ignore_errors=True)
