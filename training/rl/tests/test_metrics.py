"""The file of metrics: cut lines, missing ends of lines, a file that was moved away."""

import numpy as np
import pytest
import structlog
from seer_rl.errors import TrainError
from seer_rl.metrics import FIELDS
from seer_rl.trainer import REQUIRED_METRICS, checked_metrics
from training_runs import RecordingListener, fail, read_metrics, reproducible, run

from seer_core.errors import OutputError


def test_a_run_whose_metrics_were_moved_away_is_not_written_over_and_keeps_each_line_once(config, tmp_path):
    path, out = config(), tmp_path / "out"
    run(path, out, "train.iterations=1")
    (out / "metrics.jsonl").rename(tmp_path / "moved.jsonl")
    with pytest.raises(OutputError, match="--resume"):
        run(path, out)
    with pytest.raises(OSError, match="interrupted"):
        run(path, out, resume=True, listener=RecordingListener((2, "checkpoint"), fail))
    assert [line["iteration"] for line in read_metrics(out)] == [1, 2]
    run(path, out, resume=True)
    assert [line["iteration"] for line in read_metrics(out)] == [1, 2]


@pytest.mark.parametrize("rest", [b'{"iteration":1,"weight_ver', b"\0" * 40])
def test_a_last_line_that_was_cut_is_left_out_with_a_warning(config, tmp_path, uninterrupted, rest):
    path, out = config(), tmp_path / "out"
    run(path, out, "train.iterations=1")
    with (out / "metrics.jsonl").open("ab") as file:
        file.write(rest)
    run(path, out, "train.iterations=1", resume=True)  # nothing is left, and the plot needs no such line
    with structlog.testing.capture_logs() as logs:
        run(path, out, resume=True)
    [logged] = [log for log in logs if log["event"] == "metrics_cut"]
    assert logged["reason"].endswith("metrics.jsonl ends in a line that is cut; it is left out")
    assert reproducible(read_metrics(out)) == uninterrupted


def test_metrics_without_a_last_end_of_line_lose_none_and_others_are_one_error(config, tmp_path):
    path, out = config(), tmp_path / "out"
    run(path, out, "train.iterations=1")
    file = out / "metrics.jsonl"
    whole = file.read_bytes()
    file.write_bytes(whole.rstrip())
    run(path, out, "train.iterations=2", resume=True)
    assert [line["iteration"] for line in read_metrics(out)] == [0, 1]
    file.write_bytes(b"cut\n" + whole)
    with pytest.raises(OutputError, match=r"metrics\.jsonl:1: no metrics: .*; move it away"):
        run(path, out, resume=True)


def test_every_field_of_a_line_is_described_and_every_field_that_is_described_occurs(config, tmp_path):
    out = tmp_path / "out"
    run(config(), out)
    written = {name for line in read_metrics(out) for name in line}
    assert written - FIELDS.keys() == set()
    # This run has no evaluation, and its trainer shares no devices with the engines.
    assert FIELDS.keys() - written == {"evaluation_s", "sleep_s"}


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        (None, "returned None: return a dict of metrics"),
        ({}, "returned nothing as 'loss', where a finite number is needed"),
        (dict.fromkeys(REQUIRED_METRICS, 0.1) | {"dlogp_mean": float("nan")}, "returned nan as 'dlogp_mean'"),
        (dict.fromkeys(REQUIRED_METRICS, 0.1) | {"kl": "0.1"}, "returned '0.1' as 'kl': return a number"),
        (dict.fromkeys(REQUIRED_METRICS, 0.1) | {3: 0.1}, "returned 0.1 as 3: return a number"),
    ],
)
def test_what_a_trainer_of_ones_own_returns_is_metrics_or_an_error_that_names_them(
    config, tmp_path, monkeypatch, returned, words
):
    monkeypatch.setattr("seer_rl.torch_trainer.TorchTrainer.train", lambda self, samples: returned)
    with pytest.raises(TrainError, match=f"the trainer's train.. {words}"):
        run(config(), tmp_path / "out")


def test_metrics_may_be_numbers_of_numpy():
    returned = dict.fromkeys(REQUIRED_METRICS, np.float32(0.5)) | {"trained_tokens": np.int64(7)}
    found = checked_metrics(returned)
    assert found == returned
    assert {type(each) for each in found.values()} == {int, float}
