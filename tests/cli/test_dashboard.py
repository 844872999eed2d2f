"""The page of a run while it goes on: who may see it, what it commands, what viewers cost."""

import http.client
import json
import re
import threading

import pytest
from seer_cli.report.dashboard import TOKEN_HEADER, Dashboard
from seer_cli.report.feed import RunFeed

from seer_core.errors import InputError, OutputError
from seer_core.model import InstanceInfo
from seer_core.model.events import (
    AskEnvironment,
    ChunkFinished,
    Complete,
    Dispatch,
    GroupSpec,
    GroupsSubmitted,
    InstanceReported,
    InstanceStarted,
    RolloutPaused,
    RolloutResumed,
)
from tests.cli.helpers import BOUND_S, lines_of
from tests.support.eventually import eventually


def show_rollout(observer, now, name, open_requests=0):
    """Show an observer a group of two requests, so many of which go on."""
    group = GroupSpec(name, prompt_tokens=4, n=2, max_tokens=100)
    requests = [f"{name}/{index}" for index in range(2)]
    observer.observe(
        now, GroupsSubmitted((group,)), [Dispatch(each, "x", 100, 16, False) for each in requests]
    )
    for request in requests[open_requests:]:
        observer.observe(now + 1, ChunkFinished(request, "x", 7, True), [Complete(request, "stop")])


def started():
    return InstanceStarted(InstanceInfo("x", 1024, 16, 4, 1024))


class Viewer:
    """A browser of its own."""

    def __init__(self, address):
        self.host, self.token = re.fullmatch(r"http://([^/]*)/\?token=(.*)", address).groups()

    def ask(self, path="/figures", method="GET", body=None, token=None, **headers):
        connection = http.client.HTTPConnection(self.host, timeout=BOUND_S)
        headers = {name.replace("_", "-"): value for name, value in headers.items()}
        connection.request(
            method, path, body, {TOKEN_HEADER: self.token if token is None else token} | headers
        )
        answer = connection.getresponse()
        body = answer.read()
        connection.close()
        return answer, body

    def runs(self):
        answer, body = self.ask()
        assert answer.status == 200
        return json.loads(body)["runs"]

    def command(self, **command):
        answer, body = self.ask("/command", "POST", json.dumps(command))
        return answer.status, body.decode()


@pytest.fixture
def dashboard():
    commands = []

    def control(command):
        if command.do != "pause":
            raise InputError("no such command")
        commands.append(command)
        return "paused"

    with Dashboard("Seer: <b>", control=control) as dashboard:
        dashboard.commands = commands
        yield dashboard


@pytest.mark.parametrize("port", [-1, 99_999])
def test_a_port_that_there_is_not_is_refused(port):
    with pytest.raises(OutputError, match=f"cannot listen on port {port}; name one from 0 to 65535"):
        Dashboard("a run", port)


def test_a_late_viewer_sees_everything_so_far(dashboard, capsys):
    observer = dashboard.watch("mine")
    viewer = Viewer(dashboard.address)
    assert viewer.runs() == []
    observer.observe(5.0, started(), [])
    show_rollout(observer, 10.0, "a", open_requests=1)
    late = Viewer(dashboard.address)
    runs = eventually(late.runs)
    assert [each["name"] for each in runs] == ["mine"]
    assert (runs[0]["whole"], runs[0]["figures"]["requests"], runs[0]["figures"]["tokens"]) == (False, 1, 7)
    assert runs[0]["lanes"][0]["running"][-1] > 0


def test_ten_viewers_get_figures_that_were_made_once(dashboard, monkeypatch):
    observer = dashboard.watch("mine")
    observer.observe(5.0, started(), [])
    show_rollout(observer, 10.0, "a")
    viewer = Viewer(dashboard.address)
    viewer.runs()
    made = []
    monkeypatch.setattr(RunFeed, "runs", lambda self: made.append(self) or [])
    monkeypatch.setattr("seer_cli.report.dashboard.LEAST_AGE_S", 3600.0)
    answers = []
    viewers = [threading.Thread(target=lambda: answers.append(viewer.ask()[1])) for _ in range(10)]
    for each in viewers:
        each.start()
    for each in viewers:
        each.join(BOUND_S)
    assert len(answers) == 10
    assert len(set(answers)) == 1
    assert len(made) <= 1


@pytest.mark.parametrize("path", ["/", "/figures", "/command", "/other"])
def test_without_the_token_or_from_another_origin_nothing_is_seen(dashboard, path):
    viewer = Viewer(dashboard.address)
    dashboard.watch("mine")
    port = viewer.host.rpartition(":")[2]
    for method in ("GET", "POST"):
        for wrong in (
            {"token": "x"},
            {"token": ""},
            {"Host": "evil.example"},
            {"Host": f"evil.example:{port}"},
        ):
            answer, body = viewer.ask(path, method, "{}", **wrong)
            assert (answer.status, body) == (403, b"open the address that the command has printed")
            assert answer.headers["Access-Control-Allow-Origin"] is None
    # the address alone, as another page could have a browser open it, commands nothing
    answer, _ = viewer.ask(f"/command?token={viewer.token}", "POST", '{"do": "pause"}', token="")
    assert answer.status == 403
    assert dashboard.commands == []


def test_the_page_may_ask_its_own_server_and_its_title_is_text(dashboard):
    viewer = Viewer(dashboard.address)
    answer, body = viewer.ask(f"/?token={viewer.token}", token="")
    assert answer.status == 200
    assert b"<title>Seer: &lt;b&gt;</title>" in body
    policy = answer.headers["Content-Security-Policy"]
    assert "connect-src 'self'" in policy
    assert "default-src 'none'" in policy
    assert answer.headers["Cache-Control"] == "no-store"
    assert viewer.ask("/other")[0].status == 404


def test_commands_are_carried_out_or_refused_with_a_reason(dashboard):
    viewer = Viewer(dashboard.address)
    assert viewer.command(do="pause", what="x") == (200, "paused")
    assert [(each.do, each.what) for each in dashboard.commands] == [("pause", "x")]
    assert viewer.command(do="drain") == (400, "no such command")
    assert viewer.command(do="stop")[0] == 400
    assert viewer.command(undo="pause")[0] == 400
    assert viewer.ask("/command", "POST", b"\xff{")[0].status == 400
    assert viewer.ask("/command", "POST", b"x" * 100_000)[0].status == 413
    assert viewer.ask("/figures", "POST", b"{}")[0].status == 404
    with Dashboard("x") as other:
        assert Viewer(other.address).command(do="pause")[0] == 404


def test_a_port_that_is_taken_is_named(dashboard):
    with pytest.raises(
        OutputError, match=f"cannot listen on port {dashboard.port}: .*; name another, or none"
    ):
        Dashboard("x", dashboard.port)


def test_a_feed_keeps_the_latest_rollouts_of_a_training_on_the_same_instances():
    feed, whole = RunFeed("rollout", 2), RunFeed("run")
    for each in (feed, whole):
        each.observe(0.0, started(), [])
        for number, name in enumerate("abc"):
            show_rollout(each, 10.0 * (number + 1), name)
    assert [(run.name, run.figures["requests"], run.all_lanes) for run in feed.runs()] == [
        ("rollout 2", 2, 1),
        ("rollout 3", 2, 1),
    ]
    assert all(run.total_s == pytest.approx(1.0) for run in feed.runs())
    assert [(run.name, run.figures["requests"]) for run in whole.runs()] == [("run", 6)]
    show_rollout(feed, 50.0, "d", open_requests=2)
    show_rollout(feed, 51.0, "e")
    assert [(run.name, run.all_groups) for run in feed.runs()] == [("rollout 3", 1), ("rollout 4", 2)]


def test_a_run_without_an_end_is_read_in_windows_and_open_requests_go_on_in_the_next():
    feed, whole = RunFeed("served", window_s=60.0), RunFeed("served")
    for each in (feed, whole):
        each.observe(0.0, started(), [])
        show_rollout(each, 1.0, "a")
        show_rollout(each, 50.0, "b", open_requests=1)
        show_rollout(each, 70.0, "c")  # beyond the first window
        each.observe(90.0, ChunkFinished("b/0", "x", 30, True), [Complete("b/0", "stop")])
        show_rollout(each, 95.0, "d")
    before, now = feed.runs()
    [everything] = whole.runs()
    assert (before.name, now.name) == ("before", "now")
    assert before.figures["tokens"] + now.figures["tokens"] == everything.figures["tokens"]
    assert before.figures["requests"] + now.figures["requests"] == everything.figures["requests"] == 8
    assert [(row.id, row.n, row.finished, row.longest_tokens) for row in now.groups if row.id == "b"] == [
        ("b", 2, 2, 30)
    ]
    assert sum(lane.chunks for run in (before, now) for lane in run.lanes) == 8
    assert now.lanes[0].running[0] > 0  # b/0 was there from the window's begin
    for number in range(10):
        show_rollout(feed, 200.0 + 100 * number, f"later{number}")
    assert [run.all_groups for run in feed.runs()] == [1, 1]


def test_more_open_requests_than_a_window_has_begin_no_window_with_each_event(monkeypatch):
    monkeypatch.setattr("seer_cli.report.feed.MOST_REQUESTS", 3)
    feed = RunFeed("served", window_s=60.0)
    feed.observe(0.0, started(), [])
    feed.observe(1.0, GroupsSubmitted((GroupSpec("a", prompt_tokens=4, n=5, max_tokens=100),)), [])
    for second in range(2, 12):
        feed.observe(float(second), InstanceReported("x", 0, 0, 0.0), [])
    before, now = feed.runs()
    assert (before.total_s, now.total_s) == (0.0, 10.0)


def test_a_window_that_begins_in_a_pause_counts_waits_as_paused():
    feed = RunFeed("served", window_s=60.0)
    feed.observe(0.0, started(), [])
    show_rollout(feed, 1.0, "a", open_requests=1)
    feed.observe(50.0, RolloutPaused(), [])
    feed.observe(51.0, ChunkFinished("a/0", "x", 7, False), [])
    feed.observe(70.0, InstanceReported("x", 0, 0, 0.0), [])  # beyond the first window
    feed.observe(90.0, RolloutResumed(), [Dispatch("a/0", "x", 93, 16, False)])
    now = feed.runs()[-1]
    assert {cause: seconds for cause, seconds in now.waited_s.items() if seconds} == {"paused": 39.0}


def test_in_a_window_that_begins_beside_an_environment_its_response_does_not_wait():
    feed = RunFeed("served", window_s=60.0)
    feed.observe(0.0, started(), [])
    group = GroupSpec("a", prompt_tokens=4, n=1, max_tokens=100, turns=True)
    feed.observe(1.0, GroupsSubmitted((group,)), [Dispatch("a/0", "x", 100, 16, False)])
    feed.observe(50.0, ChunkFinished("a/0", "x", 7, True), [AskEnvironment("a/0")])
    feed.observe(70.0, InstanceReported("x", 0, 0, 0.0), [])  # beyond the first window
    feed.observe(90.0, InstanceReported("x", 0, 0, 0.0), [])
    now = feed.runs()[-1]
    assert not any(now.waited_s.values())
    assert not any(now.waiting)


def test_a_response_that_moves_in_the_next_window_has_moved():
    feed, whole = RunFeed("served", window_s=60.0), RunFeed("served")
    for each in (feed, whole):
        each.observe(0.0, started(), [])
        each.observe(0.0, InstanceStarted(InstanceInfo("y", 1024, 16, 4, 1024)), [])
        show_rollout(each, 1.0, "a", open_requests=1)
        each.observe(51.0, ChunkFinished("a/0", "x", 7, False), [Dispatch("a/0", "y", 93, 16, True)])
        each.observe(70.0, InstanceReported("x", 0, 0, 0.0), [])  # beyond the first window
        each.observe(90.0, ChunkFinished("a/0", "y", 30, True, 30, 10, 5), [Complete("a/0", "stop")])
    [everything], (before, now) = whole.runs(), feed.runs()
    assert before.figures["migrations"] + now.figures["migrations"] == everything.figures["migrations"] == 1
    assert now.drafts_by_siblings == [each for each in everything.drafts_by_siblings if each.key == 1]


def test_a_run_is_paused_drained_and_given_up_from_its_page(start_seer, trickling, tmp_path):
    process = start_seer(*trickling(instances=2), "--dashboard")
    errors = []
    try:
        while not (found := re.search(r"dashboard: (http\S+)", errors[-1] if errors else "")):
            errors.append(process.stderr.readline())
            assert process.poll() is None
        viewer = Viewer(found[1])
        threading.Thread(target=lambda: errors.extend(process.stderr), daemon=True).start()
        eventually(lambda: (runs := viewer.runs()) and runs[0]["figures"]["requests"] >= 3)
        assert viewer.command(do="drain", what="trickle-9")[0] == 400
        assert viewer.command(do="limit", what="trickle-0")[0] == 400
        assert viewer.command(do="limit", what="trickle-0", max_running=1, by="Ada") == (
            200,
            "trickle-0 gets no chunk while 1 run there",
        )
        assert viewer.command(do="drain", what="trickle-1") == (
            200,
            "trickle-1 is drained and ended; others take over its requests",
        )
        status, said = viewer.command(do="drain", what="trickle-0")
        assert status == 400
        assert "is the last instance" in said
        assert viewer.command(do="resume") == (200, "the rollout goes on")
        assert viewer.command(do="give_up", what="none")[0] == 400
        for group in ("1", "2", "3"):
            assert viewer.command(do="give_up", what=group) == (
                200,
                f"1 requests of {group} were given up with the tokens that they have",
            )
        assert process.wait(BOUND_S) == 0
    finally:
        process.kill()
        process.communicate()
    responses = {
        each["request_id"]: each["finish_reason"] for each in lines_of(tmp_path / "out/completions.jsonl")
    }
    assert responses == {
        f"{group}/{index}": ("stop", "aborted")[index] for group in (1, 2, 3) for index in (0, 1)
    }
    events = [line["event"] for line in lines_of(tmp_path / "out/trace.jsonl")]
    kinds = [event["type"] for event in events]
    asked = {(event["type"], event["by"]) for event in events if event.get("by")}
    assert asked == {
        ("InstanceLimited", "Ada (dashboard)"),
        ("InstanceLeaving", "dashboard"),
        ("RolloutResumed", "dashboard"),
        ("RequestsAborted", "dashboard"),
    }
    assert kinds.count("RequestsAborted") == 3
    assert sum("run_command" in line for line in errors) == 10
