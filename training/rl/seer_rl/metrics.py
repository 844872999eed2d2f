"""``metrics.jsonl``: one line per iteration, also after a process was killed while it wrote one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import structlog
from seer_host.json_files import JsonFormat, read_bytes
from seer_host.line_files import LineFile

from seer_core.errors import OutputError
from seer_rl.trackers import Trackers

__all__ = ["FIELDS", "METRICS", "MetricsLog", "metrics_file", "records"]

METRICS = "metrics.jsonl"
REMEDY = "move it away"

FIELDS = {
    "iteration": "the iteration, from 0",
    "weight_version": "the version of the weights that wrote the responses",
    "responses": "the responses that were rolled out",
    "failed_responses": "responses that an engine failed or that were aborted",
    "failed_rewards": "responses whose reward failed",
    "reward_mean": "the mean reward",
    "mixed_groups": "the share of the groups whose rewards are not all the same",
    "tokens": "the tokens of all responses, those of their environment included",
    "environment_tokens": "the part of `tokens` that the environment answered",
    "turns": "the turns of all responses, 0 without an environment",
    "mean_tokens": "the mean length of a response",
    "max_tokens": "the longest response",
    "cut": "the share of the responses that their limit ended",
    "rewards_sha256": "the digest of all rewards",
    "tokens_sha256": "the digest of all tokens",
    "engine_logprobs_sha256": "the digest of the engine's log-probs",
    "trained_tokens": "the tokens that were trained on",
    "loss": "the loss, as a mean over the updates",
    "grad_norm": "the norm of the gradient, as a mean over the updates",
    "learning_rate": "the learning rate of the last update",
    "clipped": "the share of the tokens at which the loss was clipped",
    "kl": "the mean distance from the first weights, 0 unless `[train.loss].kl` is above 0",
    "dlogp_mean": "the mean difference of the engine's log-probs and the trainer's, in nats",
    "dlogp_p9999": "the difference that one token in 10,000 exceeds, in nats",
    "dlogp_max": "the largest difference, in nats",
    "weights_sha256": "the digest of the new weights",
    "evaluations": "of each evaluation that ended: `weight_version`, `reward_mean`, `mean_tokens`, failures",
    "tokens_per_s": "the throughput of the rollout",
    "tail_s": "the seconds spent solely on the last tenth of the requests to finish",
    "chunks": "the chunks of the rollout",
    "preemptions": "how often engines preempted chunks",
    "instances_lost": "how often an instance was lost",
    "resumed_tokens": "the tokens that an earlier process wrote",
    "acceptance_length": "the tokens per step and request",
    "quantization": "the formats of the engines' weights, if they are quantised: the log-probs are of these",
    "rollout_s": "the seconds of the rollout",
    "environment_s": "the seconds that the environment worked, as a sum over all turns",
    "rewards_s": "the seconds that training waited for rewards",
    "training_s": "the seconds of training",
    "weights_s": "the seconds of the update of the engines' weights",
    "evaluation_s": "the seconds that training waited for evaluations",
    "checkpoint_s": "the seconds that training waited for the checkpoint before",
    "sleep_s": "the seconds in which engines fell asleep or woke",
}
"""The fields of a line, and their meanings; a trainer of another kind may add its own."""

log = structlog.get_logger("seer")


class _Line(msgspec.Struct):
    iteration: int


FORM: JsonFormat[_Line] = JsonFormat(_Line, "no metrics", REMEDY, OutputError)


def records(out: Path) -> list[dict[str, Any]]:
    """Return the metrics in a directory, a mapping per iteration; a last line that is cut is left out.

    Raises:
        OutputError: they cannot be read.
    """
    return [msgspec.json.decode(line) for line in _lines(out / METRICS)]


class MetricsLog:
    """Keeps the metrics of each iteration: a line in the file, and points in the trackers."""

    def __init__(self, file: LineFile, trackers: Trackers) -> None:
        self._file, self._trackers = file, trackers

    def write(self, record: Mapping[str, Any]) -> None:
        """Write the metrics of one iteration.

        Raises:
            OutputError: the file cannot be written.
        """
        try:
            self._file.write(msgspec.json.encode(record))
            self._file.sync()  # before the checkpoint that follows is there
        except OSError as error:
            raise OutputError(f"cannot write {self._file.path}: {error.strerror}; make room") from error
        self._trackers.iterated(record)


@contextmanager
def metrics_file(out: Path, done: int) -> Iterator[LineFile]:
    """Open the metrics of the iterations that are done; lines of later ones, which are repeated, go.

    Raises:
        OutputError: they cannot be read or written.
    """
    path = out / METRICS
    kept = [line for line in _lines(path) if msgspec.json.decode(line, type=_Line).iteration < done]
    try:
        file = LineFile(path, hidden=True)
    except OSError as error:
        raise OutputError(f"cannot write {path}: {error.strerror}; name another directory") from error
    try:
        for line in kept:
            file.write(line)
        file.show()
        yield file
    finally:
        file.close()


def _lines(path: Path) -> list[bytes]:
    """Return the whole lines: a process that is killed, or a full disk, may cut the last one."""
    if not path.exists():
        return []
    *lines, last = read_bytes(path, REMEDY, OutputError).split(b"\n")
    for number, line in enumerate(lines, 1):
        FORM.decode(line, f"{path}:{number}:")
    if last:
        try:
            FORM.decode(last, f"{path}:{len(lines) + 1}:")
        except OutputError:
            log.warning("metrics_cut", reason=f"{path} ends in a line that is cut; it is left out")
        else:
            lines.append(last)
    return lines
