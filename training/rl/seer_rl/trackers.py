"""Where metrics go beside ``metrics.jsonl``: TensorBoard's event files, and Weights & Biases.

A tracker that fails once training has begun is logged and dropped; training goes on.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

import msgspec
import structlog
from seer_cli.output import replacing

from seer_core.errors import ConfigError, OutputError
from seer_core.installation import how_to_install
from seer_rl.config import TrainTable

__all__ = ["Trackers", "points", "tracking"]

EVENTS = "tensorboard"
KINDS = ("train", "evaluation")
RUN = "wandb-run"

log = structlog.get_logger("seer")


class Tracker(Protocol):
    """Keeps numbers by name and step."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Keep the values of a step; steps do not fall."""

    def close(self) -> None:
        """Write what has not been written yet."""


class Trackers:
    """All trackers of a run; those that fail are dropped."""

    def __init__(self, trackers: Sequence[Tracker]) -> None:
        self._trackers = [*trackers]

    def iterated(self, record: Mapping[str, Any]) -> None:
        """Keep an iteration's metrics."""
        for tracker in [*self._trackers]:
            try:
                for step, values in sorted(points(record).items()):
                    tracker.log(step, values)
            except Exception as error:
                log.warning("tracker_failed", tracker=type(tracker).__name__, reason=str(error))
                self._trackers.remove(tracker)
                with suppress(Exception):
                    tracker.close()

    def close(self) -> None:
        """Close the trackers that have not failed."""
        for tracker in self._trackers:
            try:
                tracker.close()
            except Exception as error:
                log.warning("tracker_failed", tracker=type(tracker).__name__, reason=str(error))


def points(record: Mapping[str, Any]) -> dict[int, dict[str, float]]:
    """Return an iteration's numbers by step and name.

    The step is the iteration, and of an evaluation the weight version that was evaluated.
    """
    found = {record["iteration"]: _numbers("train", record)}
    for each in record["evaluations"]:
        found.setdefault(each["weight_version"], {}).update(_numbers("evaluation", each))
    return found


def _numbers(prefix: str, values: Mapping[str, Any]) -> dict[str, float]:
    return {
        f"{prefix}/{name}": float(value)
        for name, value in values.items()
        if isinstance(value, int | float) and name not in ("iteration", "weight_version")
    }


@contextmanager
def tracking(table: TrainTable, out: Path, records: Iterable[Mapping[str, Any]]) -> Iterator[Trackers]:
    """Open the trackers that ``[train.tracking]`` asks for; ``records`` are the iterations before.

    Raises:
        SeerError: one is not installed, or does not begin.
    """
    opened: list[Tracker] = []
    if table.tracking.tensorboard:
        opened.append(TensorBoard(out / EVENTS))
    if table.tracking.wandb:
        opened.append(WeightsAndBiases(table, out))
    trackers = Trackers(opened)
    try:
        for record in records:
            trackers.iterated(record)
        yield trackers
    finally:
        trackers.close()


class TensorBoard:
    """Event files in a directory, written anew when a run goes on, without iterations to be done again."""

    def __init__(self, directory: Path) -> None:
        try:
            from tensorboard.compat.proto import event_pb2, summary_pb2
            from tensorboard.summary.writer.event_file_writer import EventFileWriter
        except ImportError as error:
            raise ConfigError(
                f"[train.tracking].tensorboard needs TensorBoard ({error});"
                f" {how_to_install('train', '`make setup`')}"
            ) from error
        self._event: Any = event_pb2.Event
        self._summary: Any = summary_pb2.Summary
        try:
            for old in directory.glob("events.out.tfevents.*"):
                old.unlink()
            self._writer: Any = EventFileWriter(str(directory))
        except OSError as error:
            raise OutputError(f"cannot write event files to {directory}: {error}; make room") from error

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Write the values, and flush them, so that they can be viewed at once."""
        scalars = [self._summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._writer.add_event(
            self._event(wall_time=time.time(), step=step, summary=self._summary(value=scalars))
        )
        self._writer.flush()

    def close(self) -> None:
        """Close the file."""
        self._writer.close()


class WeightsAndBiases:
    """A run of Weights & Biases, the same one when training goes on."""

    def __init__(self, table: TrainTable, out: Path) -> None:
        try:
            import wandb
        except ImportError as error:
            raise ConfigError(
                f"[train.tracking].wandb needs Weights & Biases ({error}); pip install wandb"
            ) from error
        id_file = out / RUN
        again = {"id": id_file.read_text("utf-8"), "resume": "allow"} if id_file.exists() else {}
        try:
            self._run: Any = wandb.init(
                project=table.tracking.wandb, dir=str(out), config=msgspec.to_builtins(table), **again
            )
        except Exception as error:
            raise ConfigError(
                f"Weights & Biases does not begin: {error}; log in with `wandb login`, or set"
                " WANDB_MODE=offline"
            ) from error
        with replacing(id_file) as new:
            new.write_text(self._run.id, "utf-8")
        for kind in KINDS:
            self._run.define_metric(f"{kind}/*", step_metric=f"{kind}/iteration")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Log the values, except of steps that were logged before a resume: they were the same.

        Evaluations are of weights that are trained further only later, so each kind has steps of its own.
        """
        for kind in KINDS:
            new = {name: value for name, value in values.items() if name.startswith(f"{kind}/")}
            axis = f"{kind}/iteration"
            if new and step > self._run.summary.get(axis, -1):
                self._run.log(new | {axis: step})

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()
