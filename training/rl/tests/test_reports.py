"""``seer train --report``: a page of the latest rollouts, which no training depends on."""

import json
import re

import structlog
from seer_rl.reports import ReportWriter
from training_runs import RecordingListener, read_metrics, reproducible, run, seer_train


def shown(page):
    return json.loads(re.search(r'id="data">(.*?)</script>', page.read_text("utf-8")).group(1))["runs"]


def test_a_page_has_the_rollouts_of_all_iterations_and_changes_no_loss(config, tmp_path):
    page, path = tmp_path / "train.html", config()
    result = seer_train(path, tmp_path / "out", "train.iterations=3", f"--report={page}")
    assert result.exit_code == 0, result.output
    lines = read_metrics(tmp_path / "out")
    rollouts = shown(page)
    assert all(each["whole"] for each in rollouts)
    tokens, expected = [each["figures"]["tokens"] for each in rollouts], [line["tokens"] for line in lines]
    assert [each for each in tokens if each in expected] == expected  # evaluations are among them
    assert reproducible(lines) == reproducible(run(path, tmp_path / "without", "train.iterations=3"))


def test_a_page_that_cannot_be_written_ends_nothing(tmp_path):
    listener = RecordingListener()
    writer = ReportWriter(tmp_path / "none" / "page.html", "x", listener)
    with structlog.testing.capture_logs() as logs:
        writer.iterated({"iteration": 0})
    assert [each["event"] for each in logs] == ["no_report"]
    assert listener.lines == [{"iteration": 0}]
