"""``seer reproduce``: every number of the paper, once, beside one of ours."""

import json
import signal
from functools import partial
from multiprocessing import active_children

import pytest
from click.testing import CliRunner
from seer_lab.paper.cli import reproduce_command
from seer_lab.paper.rows import ROWS, TABLES
from seer_lab.paper.runs import FIGURES, PaperArm, arm_of, run_arms, workload_of
from seer_lab.paper.show import Outcome, outcomes_of, summary_of
from seer_lab.policies import POLICIES
from seer_lab.simulate import simulate
from seer_lab.workloads import WORKLOADS, scaled

from tests.support.eventually import eventually

COUNTS = {
    "end-to-end": 12,
    "ablation": 9,
    "group-sizes": 24,
    "speculation": 12,
    "length-context": 6,
    "partial": 1,
    "verl": 3,
    "acceptance": 12,
}
"""Numbers in each of the paper's tables."""


def reproduce(*arguments):
    return CliRunner().invoke(reproduce_command, [str(argument) for argument in arguments])


def test_every_number_of_the_paper_has_one_row():
    assert {name: sum(row.table == name for row in ROWS) for name in TABLES} == COUNTS
    assert len({(row.table, row.workload, row.name) for row in ROWS}) == len(ROWS)
    assert {row.table for row in ROWS} == set(TABLES)


@pytest.mark.long  # test_one_table_can_be_had_alone does so for one table
def test_the_json_holds_every_row_with_the_paper_s_value_and_the_error(tmp_path):
    path, page, plots = tmp_path / "all.json", tmp_path / "page.md", tmp_path / "plots"
    pytest.importorskip("matplotlib")
    result = reproduce("all", "--quick", "--json", path, "--report", page, "--plots", plots)
    assert result.exit_code == 0, result.output
    found = json.loads(path.read_text())
    assert [(each["table"], each["workload"], each["name"], each["paper"]) for each in found] == [
        (row.table, row.workload, row.name, row.paper) for row in ROWS
    ]
    for each in found:
        assert each["here"] >= 0
        if each["paper"] > 0.05:
            assert each["error"] == pytest.approx(each["here"] / each["paper"] - 1)
        else:
            assert each["error"] is None
    text = page.read_text()
    assert "{" not in text
    assert text.count("| qwen2-vl-72b |") == sum(row.workload == "qwen2-vl-72b" for row in ROWS)
    assert {each.stem for each in plots.iterdir()} == {*TABLES, "moonlight", "qwen2-vl-72b", "kimi-k2"}


def has_ended(worker):
    return worker.exitcode is not None


def test_an_interrupt_waits_for_no_simulation_under_way():
    workers = []

    def interrupt(line):
        workers.extend(active_children())
        raise KeyboardInterrupt

    arms = [PaperArm("moonlight", "verl"), PaperArm("qwen2-vl-72b", "seer")]
    with pytest.raises(KeyboardInterrupt):
        run_arms(arms, range(8), 1 / 32, report=interrupt)
    for worker in workers:
        worker.join()
        eventually(partial(has_ended, worker))  # another thread has waited for it
    assert [worker.exitcode for worker in workers] == [-signal.SIGTERM]


def test_one_table_can_be_had_alone(tmp_path):
    path = tmp_path / "acceptance.json"
    result = reproduce("acceptance", "--json", path)
    assert result.exit_code == 0, result.output
    assert {each["table"] for each in json.loads(path.read_text())} == {"acceptance"}
    assert "15 finished, 4 paths" in result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["ablations"], "; did you mean 'ablation'?"),
        (["ablation", "--report", "page.md"], "--report writes a page of all tables; leave the names out"),
    ],
)
def test_what_cannot_be_done_is_said_before_anything_runs(arguments, message):
    result = reproduce(*arguments)
    assert result.exit_code == 2
    assert message in result.output
    assert "simulated in" not in result.output


def test_groups_of_another_size_are_as_many_requests():
    for size in (8, 16):
        lengths = workload_of(PaperArm("kimi-k2", "verl", size)).lengths
        assert (lengths.group_size, lengths.groups * size) == (size, 6400)
    assert arm_of("kimi-k2", "verl", 8) == PaperArm("kimi-k2", "verl")


def test_only_predictions_count_as_such():
    given, predicted = (next(row for row in ROWS if row.kind == kind) for kind in ("given", "predicted"))
    outcomes = [Outcome(given, given.paper * 2), Outcome(predicted, predicted.paper * 1.04)]
    assert summary_of(outcomes) == "1 of 1 predictions are within 10 %, and the median error is 4.0%"
    assert summary_of(outcomes[:1]) == ""


def test_what_is_said_of_verl_alone_was_fitted():
    verl = [row for row in ROWS if {arm.policy for arm in row.arms} == {"verl"}]
    assert len(verl) == 9
    assert {row.kind for row in verl} == {"fitted"}
    assert "fitted" not in {row.kind for row in ROWS if row not in verl}


def test_partial_rollout_is_credited_with_what_it_keeps():
    run = simulate(scaled(WORKLOADS["qwen2-vl-72b"], 1 / 16), POLICIES["partial"])
    kept, generated = (FIGURES[name](run) for name in ("kept_throughput", "throughput"))
    assert run.deferred_tokens > 0
    assert (generated - kept) * run.summary.total_time_s == pytest.approx(run.deferred_tokens)


def test_what_is_given_comes_out_as_it_went_in():
    for outcome in outcomes_of([row for row in ROWS if row.table == "acceptance"], {}):
        assert outcome.ours == pytest.approx(outcome.row.paper, abs=1e-6)
