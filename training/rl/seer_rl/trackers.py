"""Where metrics go beside ``metrics.jsonl``: TensorBoard's event files, Weights & Biases, and MLflow.

A tracker that fails once training has begun is logged and dropped; training goes on.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import msgspec
import structlog
from seer_cli.output import replacing
from seer_host.installation import how_to_install

from seer_core.error_origin import describe_error, fact_of, is_ctrl_c
from seer_core.errors import ConfigError, OutputError
from seer_rl.config import TrainTable

__all__ = ["Trackers", "points", "tracking"]

EVENTS = "tensorboard"
KINDS = ("train", "evaluation")
WANDB_RUN = "wandb-run"
MLFLOW_RUN = "mlflow-run"

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
            with _reporting(tracker):
                for step, values in sorted(points(record).items()):
                    tracker.log(step, values)
                continue
            self._trackers.remove(tracker)  # it raised
            with _reporting(tracker):
                tracker.close()

    def close(self) -> None:
        """Close the trackers that have not failed."""
        for tracker in self._trackers:
            with _reporting(tracker):
                tracker.close()


@contextmanager
def _reporting(tracker: Tracker) -> Iterator[None]:
    """Log what a tracker raises, and go on."""
    try:
        yield
    except BaseException as error:
        if is_ctrl_c(error):
            raise
        fact = describe_error(error, tracker)
        log.warning("tracker_failed", tracker=type(tracker).__name__, reason=fact)


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
    if table.tracking.mlflow:
        opened.append(MLflow(table, out))
    trackers = Trackers(opened)
    try:
        for record in records:
            trackers.iterated(record)
        yield trackers
    finally:
        trackers.close()


def _by_kind(values: Mapping[str, float]) -> Iterator[tuple[str, dict[str, float]]]:
    """Yield each kind that is among the values, with its own."""
    for kind in KINDS:
        own = {name: value for name, value in values.items() if name.startswith(f"{kind}/")}
        if own:
            yield kind, own


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
        id_file = out / WANDB_RUN
        again = {"id": id_file.read_text("utf-8"), "resume": "allow"} if id_file.exists() else {}
        try:
            self._run: Any = wandb.init(
                project=table.tracking.wandb, dir=str(out), config=msgspec.to_builtins(table), **again
            )
        except BaseException as error:
            if is_ctrl_c(error):
                raise
            raise ConfigError(
                f"Weights & Biases does not begin: {fact_of(error)}; log in with `wandb login`, or set"
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
        for kind, new in _by_kind(values):
            axis = f"{kind}/iteration"
            if step > self._run.summary.get(axis, -1):
                self._run.log(new | {axis: step})

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()


class MLflow:
    """A run of MLflow, the same one when training goes on; ``MLFLOW_TRACKING_URI`` says where."""

    def __init__(self, table: TrainTable, out: Path) -> None:
        try:
            from mlflow.entities import Metric, Param
            from mlflow.tracking import MlflowClient
        except ImportError as error:
            raise ConfigError(
                f"[train.tracking].mlflow needs MLflow ({error}); pip install mlflow-skinny"
            ) from error
        self._metric: Any = Metric
        id_file = out / MLFLOW_RUN
        try:
            self._client: Any = MlflowClient()
            if id_file.exists():
                self._run_id = id_file.read_text("utf-8")
                self._client.update_run(self._run_id, status="RUNNING")
            else:
                self._run_id = self._create_run(table.tracking.mlflow)
                settings = [Param(*each) for each in _leaves(msgspec.to_builtins(table))]
                self._client.log_batch(self._run_id, params=settings)
            self._last_steps = {kind: self._last_step(kind) for kind in KINDS}
        except BaseException as error:
            if is_ctrl_c(error):
                raise
            raise ConfigError(
                f"MLflow does not begin: {fact_of(error)}; set MLFLOW_TRACKING_URI to a server, and"
                f" if the run was deleted there, remove {id_file}"
            ) from error
        with replacing(id_file) as new:
            new.write_text(self._run_id, "utf-8")

    def _create_run(self, name: str) -> str:
        """Begin a run of the experiment of this name."""
        experiment = self._client.get_experiment_by_name(name)
        found = self._client.create_experiment(name) if experiment is None else experiment.experiment_id
        return str(self._client.create_run(found).info.run_id)

    def _last_step(self, kind: str) -> int:
        """Return the last step of this kind that the run has; -1 for none."""
        names = self._client.get_run(self._run_id).data.metrics
        histories = [
            self._client.get_metric_history(self._run_id, name)
            for name in names
            if name.startswith(f"{kind}/")
        ]
        return max((point.step for history in histories for point in history), default=-1)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Log the values, except of steps that were logged before a resume: they were the same."""
        now_ms = round(time.time() * 1000)
        for kind, new in _by_kind(values):
            if step > self._last_steps[kind]:
                metrics = [self._metric(name, value, now_ms, step) for name, value in new.items()]
                self._client.log_batch(self._run_id, metrics=metrics)
                self._last_steps[kind] = step

    def close(self) -> None:
        """Finish the run."""
        self._client.set_terminated(self._run_id)


def _leaves(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield the name and the value of each setting, as ``torch.device``."""
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", str(value)
