"""``seer report``: sums over a trace, what cost most, and the page as a file."""

import hashlib
import json
import re
from importlib.resources import files

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from seer_cli.explain import life_of
from seer_cli.report import data, page, reading
from seer_cli.report.bins import TimeBins
from seer_cli.report.data import run_of
from seer_cli.report.lanes import SECONDS
from seer_cli.report.page import page_of
from seer_cli.report.reading import RunReader
from seer_cli.report.waiting import CAUSES, WaitingTimes
from seer_trace.records import TraceRecord, read_trace
from seer_trace.request_life import Wait

from seer_core.model import InstanceInfo
from seer_core.model.events import (
    Abort,
    AskEnvironment,
    ChunkFinished,
    Complete,
    Dispatch,
    EnvironmentAnswered,
    EnvironmentFailed,
    GroupSpec,
    GroupsSubmitted,
    InstanceDegraded,
    InstanceLeaving,
    InstanceLost,
    InstanceReported,
    InstanceStarted,
    RequestsAborted,
    RolloutPaused,
    RolloutResumed,
)
from tests.cli.helpers import SMALL

HOSTILE = '</script><img src=x onerror="hacked=1"><b>'
LOSSES = """[plugin.divided_rollout]
chunk_tokens = 64
[engine.sim]
instances = 3
max_running = 4
max_model_tokens = 2048
kv_capacity_tokens = 4096
kill_at_s = [{ instance = "sim-1", at_s = 1.5, restart_after_s = 1.0 }]
lengths = { mean_tokens = 300, sigma = 0.8, group_share = 0.5, cap_tokens = 900 }
"""


def read(*records):
    reader = RunReader()
    for now, event, *commands in records:
        reader.read(TraceRecord(now, event, list(commands)))
    return reader


def started(name, slots=2, kv=1000):
    return InstanceStarted(InstanceInfo(name, kv, 1, slots, 1024))


def sent(request, instance, kv=10):
    return Dispatch(request, instance, 500, kv, False)


def over(request, instance, tokens=100, stopped=True, **more):
    return ChunkFinished(request, instance, tokens, stopped, steps=tokens, **more)


@pytest.fixture
def run(seer, write_config, write_prompts, tmp_path):
    """The directory of a run on three instances, one of which was lost."""
    config = write_config(["divided_rollout", "context_sched"], LOSSES)
    groups = [{"prompt_token_ids": [5] * 8, "n": 4, "max_tokens": 900} for _ in range(12)]
    groups[0]["group_id"] = HOSTILE
    result = seer("run", config, "--prompts", write_prompts(*groups), "--out", tmp_path / "out")
    assert result.exit_code == 0, result.output
    return tmp_path / "out"


@pytest.fixture
def reader(run):
    reader = RunReader()
    for record in read_trace(run / "trace.jsonl"):
        reader.read(record)
    return reader


def test_its_figures_are_those_of_the_summary(run, reader):
    summary = json.loads((run / "summary.json").read_text())
    assert summary["instances_lost"] == 1
    figures = run_of(reader, "x").figures
    assert len(figures) > 10
    for name, value in figures.items():
        assert value == (summary[name] if isinstance(value, dict) else pytest.approx(summary[name])), name


def test_each_life_is_that_of_explain(run, reader):
    run_of(reader, "x")
    assert len(reader.kept) == 48
    for request in reader.kept:
        found, expected = reader.life(request), life_of(request.request_id, read_trace(run / "trace.jsonl"))
        assert found.chunks == expected.chunks
        assert found.tokens == expected.tokens
        assert found.finished_s == pytest.approx(expected.finished_s)
        assert found.waited_s() == pytest.approx(expected.waited_s(), abs=1e-6)
        assert [tokens for _, tokens in found.siblings_done] == [
            tokens for _, tokens in expected.siblings_done
        ]


def test_seconds_of_each_instance_add_up_to_the_run_and_what_requests_lacked_to_their_waits(run, reader):
    shown = run_of(reader, "x")
    assert [lane.name for lane in shown.lanes] == ["sim-0", "sim-1", "sim-2"]
    for lane in shown.lanes:
        assert tuple(lane.seconds) == SECONDS
        assert min(lane.seconds.values()) >= 0
        assert sum(lane.seconds.values()) == pytest.approx(shown.total_s, abs=0.01)
    assert shown.lanes[1].seconds["down"] > 0
    assert any(change.what.startswith("lost") for change in shown.lanes[1].changes)
    waited = sum(
        part.end_s - part.begin_s
        for request in reader.kept
        for part in reader.life(request).parts
        if not hasattr(part, "tokens") and hasattr(part, "causes_s")
    )
    assert sum(shown.waited_s.values()) == pytest.approx(waited, abs=0.01)
    assert sum(shown.waiting) * shown.total_s / len(shown.waiting) == pytest.approx(waited, rel=0.02)
    tokens = sum(shown.tokens_per_s) * shown.total_s / len(shown.tokens_per_s)
    assert tokens == pytest.approx(reader.finished.tokens, rel=0.02)


def test_what_it_keeps_one_by_one_is_bounded_and_of_the_last(run, reader, monkeypatch):
    whole = run_of(reader, "x")
    monkeypatch.setattr(reading, "MOST_CHUNKS", 20)
    monkeypatch.setattr(data, "MOST_CHUNKS", 20)
    monkeypatch.setattr(data, "MOST_GROUPS", 3)
    small = RunReader()
    for record in read_trace(run / "trace.jsonl"):
        small.read(record)
    shown = run_of(small, "x")
    assert 0 < len(shown.chunks["begin"]) <= 20
    assert shown.all_chunks == whole.all_chunks > 100
    assert shown.chunk_requests == whole.chunk_requests[-len(shown.chunk_requests) :]
    assert (len(shown.groups), shown.all_groups) == (3, 12)
    assert shown.groups == whole.groups[:3]
    assert shown.figures == whole.figures
    assert shown.waited_s == pytest.approx(whole.waited_s, abs=0.01)


def test_it_names_the_slow_instance_and_the_group_that_was_taken_for_short():
    groups = [GroupSpec(name, prompt_tokens=1, n=2, max_tokens=900) for name in "abcdefghij"]
    records = [(0.0, started("quick")), (0.0, started("lame"))]
    records.append((1.0, GroupsSubmitted(tuple(groups))))
    now = 1.0
    for group in groups:
        for index, instance in enumerate(("quick", "lame")):
            records.append(
                (now, InstanceReported(instance, 0, 0, 0.0), sent(f"{group.id}/{index}", instance))
            )
        if group.id != "j":
            records.append((now + 1, over(f"{group.id}/0", "quick"), Complete(f"{group.id}/0", "stop")))
            records.append((now + 2, over(f"{group.id}/1", "lame"), Complete(f"{group.id}/1", "stop")))
            now += 2
    records.append((now + 0.1, over("j/0", "quick", 10), Complete("j/0", "stop")))
    records.append((now + 9, over("j/1", "lame", 450), Complete("j/1", "stop")))
    found = run_of(read(*records), "x").findings
    slow = next(each for each in found if each.instance == "lame")
    assert slow.title == "Instance lame was slow"
    assert "took 2.00 times as long" in slow.text
    assert "machine" not in slow.text  # nothing says that it is a real one
    short = next(each for each in found if each.title == "Group j looked short")
    assert short.request == "j/1"
    assert "had 10 tokens" in short.text
    assert "the longest has 450" in short.text
    assert short.share == pytest.approx(9 / 27, rel=0.01)  # it waited for longer than the tail took
    assert [each.share for each in found] == sorted((each.share for each in found), reverse=True)


def test_what_was_given_up_or_failed_foretells_no_length():
    group = GroupSpec("a", prompt_tokens=1, n=3, max_tokens=900)
    reader = read(
        (0.0, started("x", slots=3)),
        (1.0, GroupsSubmitted((group,)), *(sent(f"a/{index}", "x") for index in range(3))),
        (2.0, RequestsAborted(("a/0",)), Abort("a/0", "x"), Complete("a/0", "aborted")),
        (5.0, over("a/1", "x", 100), Complete("a/1", "stop")),
        (9.0, over("a/2", "x", 200), Complete("a/2", "stop")),
    )
    shown = run_of(reader, "x")
    assert shown.groups[0].first_tokens == 100
    assert shown.groups[0].estimates == [(4.0, 100), (8.0, 200)]
    assert not any("looked short" in each.title for each in shown.findings)
    assert reader.life(reader.kept[-1]).estimate_at(4.5) is None


@pytest.mark.parametrize(("reason", "words"), [("aborted", "was given up at"), ("error", "failed at")])
def test_a_response_that_was_cut_last_is_not_called_done(reason, words):
    reader = read(
        (0.0, started("x", slots=1)),
        (1.0, GroupsSubmitted((GroupSpec("a", 1, 10, 900),)), sent("a/0", "x")),
        (5.0, over("a/0", "x"), *(Complete(f"a/{index}", "stop") for index in range(9))),
        (9.0, RequestsAborted(("a/9",)), Complete("a/9", reason)),
    )
    late = next(each for each in run_of(reader, "x").findings if each.request == "a/9")
    assert f"Response a/9 {words} 8.0 s" in late.text


def test_a_loss_costs_its_time_down_and_its_chunks_and_a_pause_is_a_wait_of_its_own():
    group = GroupSpec("a", prompt_tokens=1, n=2, max_tokens=900)
    reader = read(
        (0.0, started("x")),
        (0.0, started("y")),
        (0.0, GroupsSubmitted((group,)), sent("a/0", "x"), sent("a/1", "y")),
        (4.0, InstanceLost("y", "killed")),
        (5.0, RolloutPaused()),
        (6.0, RolloutResumed(), sent("a/1", "x")),
        (8.0, over("a/0", "x"), Complete("a/0", "stop")),
        (10.0, over("a/1", "x"), Complete("a/1", "stop")),
    )
    shown = run_of(reader, "x")
    lost = next(each for each in shown.findings if each.instance == "y")
    assert "at 4.0 s (lost: killed), and down for 6.0 s. 1 chunk " in lost.text
    assert lost.share == pytest.approx(10 / 20)
    assert shown.lanes[1].seconds["down"] == pytest.approx(6.0)
    assert shown.waited_s == {"slots": 0, "kv": 0, "turn": 1.0, "paused": 1.0, "instances": 0}


@given(
    st.lists(
        st.tuples(st.floats(0, 50), st.floats(0, 3), st.floats(0, 9), st.floats(0, 9)),
        min_size=1,
        max_size=30,
    )
)
def test_bins_lose_no_time_however_often_they_widen(spans):
    bins, now = TimeBins(2), 0.0
    whole = np.zeros(2)
    for pause, length, *values in spans:
        bins.add(now + pause, now + pause + length, values)
        whole += np.array(values) * length
        now += pause + length
    assert bins.integrals(np.array([0.0, now + 1]))[:, 0] == pytest.approx(whole, abs=1e-6)
    parts = bins.integrals(np.linspace(0, now + 1, 17))
    assert parts.sum(axis=1) == pytest.approx(whole, abs=1e-6)


@given(
    st.lists(st.tuples(st.floats(0.01, 2), st.sampled_from(["slots", "paused", "instances", 0, 5, 50, 500]))),
    st.lists(
        st.tuples(st.floats(0, 20), st.floats(0.01, 9), st.integers(0, 600), st.integers(0, 3)), min_size=1
    ),
)
def test_what_requests_lacked_adds_up_to_their_waits(states, waits):
    lacks, now = WaitingTimes(), 0.0
    lacks.note(0.0, "instances")
    for length, state in states:
        now += length
        lacks.note(now, state)
    expected = np.zeros((4, len(CAUSES)))
    for begin_s, length, need, row in waits:
        lacks.wait(row, begin_s, begin_s + length, need)
        for cause, seconds in lacks.causes_s(begin_s, begin_s + length, need).items():
            expected[row, CAUSES.index(cause)] += seconds
    found = lacks.by_request(4)
    assert found == pytest.approx(expected, abs=1e-6)
    assert found.sum() == pytest.approx(sum(length for _, length, *_ in waits), abs=1e-6)


def test_the_page_holds_hostile_ids_as_data_and_says_what_may_run(seer, run, tmp_path):
    result = seer("report", run, "--json", tmp_path / "figures.json")
    assert result.exit_code == 0, result.output
    assert "of the time). " in result.output
    page = (run / "report.html").read_text()
    assert HOSTILE not in page
    assert page.count("</script>") == 3
    inside = re.search(r'<script type="application/json" id="data">(.*?)</script>', page).group(1)
    (shown,) = json.loads(inside)["runs"]
    assert any(group["id"] == HOSTILE for group in shown["groups"])
    policy = re.search('Content-Security-Policy" content="([^"]*)"', page).group(1)
    assert "default-src 'none'" in policy
    assert policy.count("sha256-") == 2
    assert [shown] == json.loads((tmp_path / "figures.json").read_text())


def test_several_runs_are_side_by_side_under_their_names(seer, run, write_config, prompts, tmp_path):
    other = tmp_path / "b" / "out"
    assert seer("run", write_config((), SMALL), "--prompts", prompts, "--out", other).exit_code == 0
    result = seer("report", run, other, "--out", tmp_path / "both.html")
    assert result.exit_code == 0, result.output
    inside = re.search(r'id="data">(.*?)</script>', (tmp_path / "both.html").read_text()).group(1)
    assert [each["name"] for each in json.loads(inside)["runs"]] == [str(run), str(other)]


def test_a_run_that_was_ended_is_shown_as_far_as_it_came(seer, run, tmp_path):
    lines = (run / "trace.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "part").mkdir()
    (tmp_path / "part" / "trace.jsonl").write_text("".join(lines[: len(lines) // 2]))
    result = seer("report", tmp_path / "part")
    assert result.exit_code == 0, result.output
    page = (tmp_path / "part" / "report.html").read_text()
    (shown,) = json.loads(re.search(r'id="data">(.*?)</script>', page).group(1))["runs"]
    assert shown["whole"] is False
    assert 0 < shown["figures"]["requests"] < 48


def test_what_is_no_run_is_refused(fails, run, tmp_path):
    assert "cannot read" in fails("report", tmp_path / "none")
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "trace.jsonl").write_text("")
    assert "has no groups yet; wait until" in fails("report", tmp_path / "empty")
    assert "this command reads it" in fails("report", run, "--out", run / "trace.jsonl")
    (run / "summary.json").write_text("[1")
    assert "not the summary of a run" in fails("report", run)


def test_compare_writes_its_arms_first_repeats_and_changes_no_token(seer, write_config, prompts, tmp_path):
    config = write_config(["divided_rollout"], SMALL)
    arguments = ("compare", config, "--prompts", prompts, "--repeat", 2, "--out", tmp_path / "arms")
    page = tmp_path / "arms.html"
    result = seer(*arguments, "--report", page)
    assert result.exit_code == 0, result.output
    assert "a page of 3 arms" in result.output
    runs = json.loads(re.search(r'id="data">(.*?)</script>', page.read_text()).group(1))["runs"]
    assert [each["name"] for each in runs] == ["baseline", "+ divided_rollout", "oracle"]
    assert all(each["whole"] and each["figures"]["requests"] == 4 for each in runs)
    result = seer(*arguments, "--resume", "--report", tmp_path / "again.html")
    assert result.exit_code == 0, result.output
    assert "not written, as an earlier command had finished all arms" in result.output
    assert not (tmp_path / "again.html").exists()


def test_a_page_of_structs_is_one_of_plain_json(reader):
    shown = run_of(reader, "x", {"preemptions": 3}, 1.5)
    plain = msgspec.json.decode(msgspec.json.encode(shown))
    assert plain["bound_s"] == 1.5
    assert plain["figures"]["preemptions"] == 3


def test_a_run_that_goes_on_has_all_its_requests_beside_those_that_are_done():
    groups = tuple(GroupSpec(name, prompt_tokens=1, n=2, max_tokens=900) for name in "ab")
    shown = run_of(
        read(
            (0.0, started("x")),
            (0.0, GroupsSubmitted(groups), sent("a/0", "x"), sent("a/1", "x")),
            (1.0, over("a/0", "x"), Complete("a/0", "stop")),
            (2.0, over("a/1", "x"), Complete("a/1", "stop"), sent("b/0", "x")),
            (3.0, over("b/0", "x"), Complete("b/0", "stop")),
        ),
        "x",
    )
    assert not shown.whole
    assert (shown.figures["requests"], shown.all_requests) == (3, 4)
    assert (shown.figures["groups"], shown.all_groups) == (1, 2)


def test_runs_side_by_side_have_fewer_chunks_and_requests_one_by_one(reader, monkeypatch):
    shown = run_of(reader, "x")

    def on_a_page(runs):
        text = re.search(r'id="data">(.*?)</script>', page_of("x", [shown] * runs)).group(1)
        return json.loads(text)["runs"][-1]

    monkeypatch.setattr(page, "MOST_CHUNKS", 120)
    monkeypatch.setattr(page, "LEAST_CHUNKS", 10)
    monkeypatch.setattr(page, "MOST_LIVES", 90)
    whole = on_a_page(2)
    assert whole == msgspec.json.decode(msgspec.json.encode(shown))
    assert set(whole["chunks"]["end"]) == set(range(len(whole["chunk_ends"])))
    few = on_a_page(3)
    count, requests = len(few["chunks"]["begin"]), few["chunk_requests"]
    assert 0 < count <= 40 < len(whole["chunks"]["begin"])
    assert few["all_chunks"] == whole["all_chunks"]
    assert requests == whole["chunk_requests"][-len(requests) :]
    for name in ("begin", "instance", "tokens", "end"):
        assert few["chunks"][name] == whole["chunks"][name][-count:]
    named = [requests[each] for each in few["chunks"]["request"]]
    assert named == [whole["chunk_requests"][each] for each in whole["chunks"]["request"][-count:]]
    assert few["lives"] == whole["lives"][:30]
    assert few["findings"] == whole["findings"]


def test_a_page_of_six_long_runs_has_less_than_three_megabytes(reader):
    shown = run_of(reader, "x")
    columns = {
        name: [column[place % len(column)] for place in range(20_000)]
        for name, column in shown.chunks.items()
    }
    columns["request"] = [place // 8 for place in range(20_000)]
    requests = [f"group-{place // 8}/{place % 8}" for place in range(2_500)]
    long = msgspec.structs.replace(shown, chunks=columns, chunk_requests=requests)
    least = len(page_of("x", [shown]))  # with the library of charts
    assert least < len(page_of("x", [long] * 6)) < 3_000_000


def test_the_chart_library_is_the_published_file():
    parts = files("seer_cli.report")
    digest = hashlib.sha256((parts / "echarts.min.js").read_bytes()).hexdigest()
    assert f"SHA-256: {digest}" in (parts / "echarts.txt").read_text()


def test_an_instance_that_loses_a_part_or_leaves_stays_as_it_is_up_or_down():
    group = GroupSpec("a", prompt_tokens=1, n=1, max_tokens=900)
    reader = read(
        (0.0, started("x")),
        (0.0, started("y")),
        (0.0, GroupsSubmitted((group,)), sent("a/0", "x")),
        (1.0, InstanceReported("x", 1, 0, 0.5, stepping_s=100.0)),
        (2.0, InstanceDegraded("x", "drafting", "it is broken")),
        (2.0, InstanceReported("x", 1, 0, 0.5, stepping_s=100.25)),
        (3.0, InstanceLost("y", "killed")),
        (4.0, InstanceDegraded("y", "kv_pool", "no memory")),
        (5.0, InstanceLeaving("x", "drained")),
        (10.0, over("a/0", "x"), Complete("a/0", "stop")),
    )
    x, y = run_of(reader, "x").lanes
    assert [change.what for change in x.changes][1:] == [
        "goes on without drafting: it is broken",
        "leaves: drained",
    ]
    assert (x.seconds["down"], y.seconds["down"]) == (0.0, 7.0)
    assert x.seconds["decode"] == pytest.approx(1.25)  # what it did before the run is not the run's
    assert x.kv_used[60] == 0.5


def test_the_time_of_an_environment_is_no_wait_of_a_report():
    group = GroupSpec("a", 10, 1, 100, turns=True)
    reader = read(
        (1.0, started("x")),
        (1.0, GroupsSubmitted((group,)), sent("a/0", "x")),
        (2.0, over("a/0", "x", 20), AskEnvironment("a/0")),
        (5.0, EnvironmentAnswered("a/0", 5, False)),
        (6.0, InstanceReported("x", 0, 0, 0.0), sent("a/0", "x")),
        (7.0, over("a/0", "x", 7), AskEnvironment("a/0")),
        (8.0, EnvironmentFailed("a/0", "no network"), Complete("a/0", "error")),
    )
    [request] = reader.kept
    assert request.tokens == 32
    waits = [part for part in reader.life(request).parts if isinstance(part, Wait)]
    assert waits == [
        Wait(2.0, 5.0, {"environment": 3.0}),
        Wait(5.0, 6.0, {"turn": 1.0}),
        Wait(7.0, 8.0, {"environment": 1.0}),
    ]
    assert reader.waited_s().sum() == 1.0


def test_an_environment_s_answer_is_no_context_that_is_prefilled_again():
    group = GroupSpec("a", 10, 2, 400, turns=True)
    reader = read(
        (1.0, started("x")),
        (1.0, GroupsSubmitted((group,)), sent("a/0", "x"), sent("a/1", "x")),
        (2.0, over("a/0", "x", 20, prefilled_tokens=10), AskEnvironment("a/0")),
        (5.0, EnvironmentAnswered("a/0", 50, False), sent("a/0", "x")),
        (6.0, over("a/0", "x", 7, False, prefilled_tokens=51), sent("a/0", "x")),
        (7.0, over("a/0", "x", 7, prefilled_tokens=4), Complete("a/0", "stop")),
    )
    reader.catch_up()
    assert reader.finished.prefilled_tokens == 65
    assert reader.finished.again_tokens == 5


def test_the_requests_of_a_rollout_that_failed_are_not_taken_for_those_of_the_next():
    def group(name):
        return GroupsSubmitted((GroupSpec(name, 10, 3, 400),))

    reader = read(
        (0.0, started("x")),
        (0.0, started("y")),
        (0.0, group("a"), sent("a/0", "x"), sent("a/1", "y")),
        (1.0, InstanceReported("x", 1, 0, 0.5, stepping_s=100.0)),
        (2.0, over("a/0", "x"), Complete("a/0", "stop")),
        (3.0, started("x")),  # as a session does with new strategies
        (3.0, started("y")),
        (4.0, group("b"), sent("b/0", "x")),
        (5.0, InstanceReported("x", 1, 0, 0.5, stepping_s=100.5)),
        (6.0, over("b/0", "x"), Complete("b/0", "stop")),
    )
    assert reader.open_requests == 2
    shown = run_of(reader, "run")
    assert [lane.chunks for lane in shown.lanes] == [2, 0]
    x, y = reader.lanes.values()
    assert (x.running, y.running, y.lost_chunks) == (0, 0, 1)
    assert x.stepping_s == pytest.approx(1.5)
    successor = reader.successor()
    assert list(successor._open_groups) == ["b"]
