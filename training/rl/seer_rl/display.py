"""The display of a training run: a line per iteration, and on a terminal the current phase."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import Any, TextIO

from rich.console import Console
from rich.live import Live
from rich.text import Text

__all__ = ["TrainDisplay"]

STARTING = "starting trainer and engines"


class TrainDisplay:
    """A ``ProgressListener`` that writes to standard error; a context manager."""

    def __init__(self, iterations: int, stream: TextIO | None = None) -> None:
        self._iterations = iterations
        self._phase = STARTING
        self._progress = ""
        self._quantization: list[str] = []
        self._since = time.monotonic()
        self._console = Console(
            file=stream or sys.stderr, highlight=False, markup=False, emoji=False, soft_wrap=True
        )
        self._live = (
            Live(get_renderable=self._now, console=self._console, transient=True)
            if self._console.is_terminal
            else None
        )

    def __enter__(self) -> TrainDisplay:
        if self._live is not None:
            self._live.start(refresh=True)
        else:
            self._console.print("starting trainer and engines ...")
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def phase(self, iteration: int, name: str) -> None:
        """Show the phase that begins; before the first, how long the start has taken."""
        if self._phase == STARTING:
            self._console.print(f"trainer and engines started in {time.monotonic() - self._since:.0f} s")
        self._phase = f"iteration {iteration + 1} of {self._iterations}: {name}"
        self._progress = ""
        self._since = time.monotonic()

    def responses(self, finished: int, wanted: int) -> None:
        """Show how far the rollout is."""
        self._progress = f"  {finished} of {wanted} responses"

    def iterated(self, metrics: Mapping[str, Any]) -> None:
        """Print an iteration's line, after one that names new formats of the engines' weights."""
        if metrics["quantization"] not in ([], self._quantization):
            self._quantization = metrics["quantization"]
            formats = ", ".join(self._quantization)
            self._console.print(f"the engines' log-probs are those of weights quantised by {formats}")
        failed = "".join(
            f"  {metrics[key]} {key.replace('failed_', '').upper()} FAILED"
            for key in ("failed_responses", "failed_rewards")
            if metrics[key]
        )
        resumed = f", {metrics['resumed_tokens']:,} tokens resumed" if metrics["resumed_tokens"] else ""
        held_out = "".join(f"  held out {each['reward_mean']:.3f}" for each in metrics["evaluations"])
        self._console.print(
            f"iteration {metrics['iteration'] + 1} of {self._iterations}"
            f"  reward {metrics['reward_mean']:.3f}{held_out}  length {metrics['mean_tokens']:.0f}"
            f"  loss {metrics['loss']:.4f}  |dlogp| {metrics['dlogp_mean']:.1e}"
            f"  rollout {metrics['rollout_s']:.1f} s at {metrics['tokens_per_s']:.0f} tokens/s{resumed}"
            f"  training {metrics['training_s']:.1f} s  weights {metrics['weights_s']:.1f} s{failed}"
        )

    def _now(self) -> Text:
        return Text(f"{self._phase}  {time.monotonic() - self._since:.0f} s{self._progress}", style="bold")
