"""Sessions from Python that are watched: a trace, a page of the latest rollouts, a dashboard with buttons."""

import http.client
import json
import re
import socket
from pathlib import Path

import pytest
import structlog
from click.testing import CliRunner
from seer_cli import main
from seer_cli.watching import LATEST, WatchedSession
from seer_trace.records import read_trace

from seer_core.errors import OutputError, SeerError
from seer_core.model.events import GroupsSubmitted, RolloutPaused
from seer_core.ports.policy import Observer
from tests.support.eventually import PATIENCE_S, eventually

PROMPTS = [{"prompt": "a", "group_id": "g", "n": 3}]


def shown(page):
    return json.loads(re.search(r'id="data">(.*?)</script>', page.read_text("utf-8")).group(1))["runs"]


def ask(address, path, method="GET", body=None):
    host, token = re.fullmatch(r"http://([^/]*)/\?token=(.*)", address).groups()
    connection = http.client.HTTPConnection(host, timeout=PATIENCE_S)
    connection.request(method, path, body, {"X-Seer-Token": token})
    answer = connection.getresponse()
    body = answer.read().decode()
    connection.close()
    return body


@pytest.fixture
def address_of(capsys):
    """Return a function: the address of the dashboard that was printed last."""
    return lambda: re.findall(r"dashboard: (\S+)", capsys.readouterr().err)[-1]


def test_a_session_writes_a_trace_that_the_commands_read(config, tmp_path):
    trace = tmp_path / "out" / "trace.jsonl"
    with WatchedSession(config, trace=trace) as session:
        for _ in range(2):
            session.rollout(PROMPTS)
    submitted = [each for each in read_trace(trace) if isinstance(each.event, GroupsSubmitted)]
    assert len(submitted) == 2
    for command in (["report", str(trace.parent)], ["explain", str(trace.parent), "g/0"]):
        result = CliRunner().invoke(main, command)
        assert result.exit_code == 0, result.output


def test_a_trace_goes_on_behind_fresh_strategies(config, tmp_path):
    trace = tmp_path / "trace.jsonl"
    with WatchedSession(config, trace=trace) as session:
        session.rollout(PROMPTS)
        session.reset_strategies()
        session.rollout(PROMPTS)
    assert len([each for each in read_trace(trace) if isinstance(each.event, GroupsSubmitted)]) == 2


def test_the_page_has_the_latest_rollouts_once_the_session_is_closed(config, tmp_path):
    page = tmp_path / "page.html"
    with WatchedSession(config, name="mine", report=page) as session:
        session.rollout(PROMPTS)
        eventually(lambda: page.exists() and len(shown(page)) == 1)
        for _ in range(LATEST):
            list(session.stream(PROMPTS))
    runs = shown(page)
    assert [run["name"] for run in runs] == [f"rollout {number}" for number in range(2, LATEST + 2)]
    assert all(run["whole"] and run["figures"]["requests"] == 3 for run in runs)
    assert "<title>Seer: mine</title>" in page.read_text("utf-8")


def test_the_dashboard_shows_a_rollout_that_goes_on_and_its_buttons_work(config, address_of, tmp_path):
    trace = tmp_path / "trace.jsonl"
    with WatchedSession(config, dashboard=0, trace=trace) as session, session.open() as rollout:
        address = address_of()
        rollout.add(PROMPTS)
        runs = eventually(lambda: json.loads(ask(address, "/figures"))["runs"])
        assert [run["all_requests"] for run in runs] == [3]
        said = [ask(address, "/command", "POST", json.dumps({"do": do})) for do in ("pause", "resume")]
        rollout.wait()
    assert said == ["paused: no chunk is sent until the rollout goes on", "the rollout goes on"]
    assert RolloutPaused("dashboard") in [each.event for each in read_trace(trace)]
    with pytest.raises(ConnectionRefusedError):
        ask(address, "/figures")


def test_a_session_that_is_watched_has_the_same_tokens_and_the_caller_s_observers(config, tmp_path):
    class Counter(Observer):
        events = 0

        def observe(self, now, event, commands):
            self.events += 1

    counter = Counter()
    with WatchedSession(config, [counter], trace=tmp_path / "t", report=tmp_path / "p") as session:
        watched = session.rollout(PROMPTS)
    with WatchedSession(config) as session:
        plain = session.rollout(PROMPTS)
    assert counter.events == len(list(read_trace(tmp_path / "t")))
    assert [list(each.token_ids) for each in watched.in_order([("g", 0), ("g", 1), ("g", 2)])] == [
        list(each.token_ids) for each in plain.in_order([("g", 0), ("g", 1), ("g", 2)])
    ]


def test_files_that_cannot_be_written_are_refused_at_once(config, tmp_path):
    (tmp_path / "file").touch()
    for settings in ({"trace": tmp_path / "file" / "trace"}, {"report": tmp_path}):
        with pytest.raises(OutputError):
            WatchedSession(config, **settings)


def test_a_page_that_cannot_be_written_any_more_ends_nothing(config, tmp_path):
    page = tmp_path / "pages" / "page.html"
    with structlog.testing.capture_logs() as logs, WatchedSession(config, report=page) as session:
        Path(page.parent).rmdir()
        assert session.rollout(PROMPTS).summary.requests == 3
    assert [each["event"] for each in logs if each["log_level"] == "warning"] == ["no_report"]


def test_a_port_that_is_taken_is_refused_and_nothing_is_left_open(config, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        session = WatchedSession(config, trace=tmp_path / "t", dashboard=taken.getsockname()[1])
        with pytest.raises(OutputError, match="cannot listen on port"):
            session.start()
    session.close()


def test_a_session_is_started_once(config, address_of):
    with WatchedSession(config, dashboard=0) as session:
        address = address_of()
        with pytest.raises(SeerError, match="has been started before"):
            session.start()
        assert json.loads(ask(address, "/figures")) == {"runs": []}
