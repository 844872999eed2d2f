"""The display and the log on a terminal and without one."""

import codecs
import fcntl
import io
import os
import pty
import re
import select
import signal
import struct
import subprocess
import termios

import pytest
import structlog
from seer_cli import display
from seer_cli.common import _configure_logs
from seer_cli.display import Display
from seer_cli.display_frame import frame_of
from seer_cli.progress import RunProgress

from seer_core.model import InstanceInfo
from seer_core.model.events import (
    ChunkFinished,
    Complete,
    Dispatch,
    GroupSpec,
    GroupsSubmitted,
    InstanceFailed,
    InstanceLost,
    InstanceStarted,
    InstanceWaiting,
)

from .helpers import BOUND_S, SMALL, lines_of


def test_a_terminal_shows_a_live_display_and_gets_its_cursor_back(start_seer, trickling, tmp_path):
    master, slave = pty.openpty()
    process = start_seer(
        *trickling(),
        stdin=slave,
        stdout=slave,
        stderr=slave,
        text=False,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "100", "LINES": "30"},
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )
    os.close(slave)
    with os.fdopen(master, "r+b", buffering=0) as terminal:
        text = read_terminal(terminal, until="requests 0/6")
        terminal.write(b"\x03")
        text += read_terminal(terminal)
    assert process.wait(BOUND_S) == 130
    assert "rollout: groups 0/3" in text
    assert "trickle-0" in text
    assert "running" in text
    assert "0/8" in text
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")
    assert text.endswith("interrupted; what had finished is kept\r\n")
    assert len(lines_of(tmp_path / "out" / "completions.jsonl")) <= 3


def read_terminal(terminal, until=None):
    """Read what is shown, until some text of it, until a function of it says so, or the end."""
    shown, decode = (
        "",
        codecs.getincrementaldecoder("utf-8")("replace").decode,
    )  # the last call cut a character
    seen = until if callable(until) else lambda shown: until is not None and until in shown
    while not seen(shown):
        assert select.select([terminal], [], [], BOUND_S)[0], f"shown so far: {shown!r}"
        try:
            shown += decode(terminal.read(4096))
        except OSError:  # EIO: no process holds the terminal any more
            break
    return shown


def test_a_terminal_that_is_resized_gets_frames_that_fit_it(start_seer):
    master, slave = pty.openpty()
    _resize(slave, 100, 30)
    sizes = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
    process = start_seer(
        *("sim", "synthetic", "--policy", "divided", "--lengths", "groups=4096", "--instances", "24"),
        stdin=slave,
        stdout=subprocess.DEVNULL,
        stderr=slave,
        text=False,
        env={**sizes, "TERM": "xterm"},
    )
    with os.fdopen(master, "r+b", buffering=0) as terminal:
        shown = read_terminal(terminal, until="running")
        _resize(slave, 44, 12)
        os.close(slave)
        shown += read_terminal(terminal, until=lambda shown: any(map(fits, whole_frames(shown))))
        process.send_signal(signal.SIGINT)
        shown += read_terminal(terminal)
    assert process.wait(BOUND_S) == 130
    assert "Traceback" not in shown
    small = next(filter(fits, whole_frames(shown)))
    assert small[0].startswith("divided: groups ")
    assert "reserved" in small[-1]


def whole_frames(shown):
    """Return the frames before the last, which may have been cut, as their lines without escapes."""
    frames = [
        re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", each) for each in re.split(r"(?:\x1b\[2K|\x1b\[1A)+", shown)
    ]
    return [each.strip().splitlines() for each in frames[:-1] if "instance" in each]


def fits(lines):
    """Return whether a frame fits the smaller terminal, and so has the sums of instances without a line."""
    return len(lines) <= 12 and max(map(len, lines)) <= 44 and lines[-1].startswith("and ")


def _resize(terminal, columns, rows):
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))


def test_a_file_gets_lines_without_escapes_that_say_tail_kv_and_waiting(seer, monkeypatch):
    monkeypatch.setattr(display, "LINE_EVERY_S", 0.0)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "80")
    result = seer("sim", "synthetic", "--policy", "divided", "--lengths", "groups=32", "--instances", "2")
    assert result.exit_code == 0, result.output
    lines = result.stderr.splitlines()
    assert result.stderr.replace("\n", "").isprintable()
    assert all(line.startswith("divided: groups ") and " reserved, running " in line for line in lines[:-1])
    assert any(re.search(r"waiting.*: .*for KV", line) for line in lines)
    assert any("tail: the last 25 of 256 responses, for " in line for line in lines)
    assert max(map(len, lines)) > 130


def test_a_terminal_that_obeys_no_escapes_gets_lines(monkeypatch):
    monkeypatch.setattr(display, "LINE_EVERY_S", 0.0)
    monkeypatch.setenv("TERM", "dumb")
    stream = io.StringIO()
    stream.isatty = lambda: True
    with Display("run", stream) as view:
        view.observe(0.0, InstanceStarted(InstanceInfo("x", 64, 16, 4, 64)), [])
    assert stream.getvalue().startswith("run: groups 0/0")
    assert stream.getvalue().replace("\n", "").isprintable()


@pytest.mark.parametrize("nodes", [("a-1", "a-1"), ("a-1", "b-2")])
def test_a_terminal_shows_the_node_of_each_instance_where_there_are_several(nodes):
    view = Display("run")
    for number, node in enumerate(nodes):
        view.observe(0.0, InstanceStarted(InstanceInfo(f"x-{number}", 64, 16, 4, 64, node=node)), [])
    shown = "".join(_shown(view))
    assert [node in shown for node in nodes] == [len(set(nodes)) > 1] * 2


def test_without_a_terminal_a_line_appears_now_and_then(monkeypatch):
    monkeypatch.setattr(display, "LINE_EVERY_S", 0.0)
    stream = io.StringIO()
    with Display("run", stream) as view:
        view.observe(0.0, InstanceStarted(InstanceInfo("x", 64, 16, 4, 64)), [])
        sent = [Dispatch(f"a/{number}", "x", 60, 16, False) for number in (0, 1)]
        view.observe(0.0, GroupsSubmitted((GroupSpec("a", 4, 2, 64),)), sent)
        view.observe(2.0, ChunkFinished("a/0", "x", 50, True), [Complete("a/0", "stop")])
        view.observe(3.0, InstanceLost("x", "gone"), [])
    lines = stream.getvalue().splitlines()
    assert lines[0] == (
        "run: groups 0/0  requests 0/0  tokens 0  0 tok/s  left ?"
        "  x: KV 0% used, 0% reserved, running 0/4, queued 0"
    )
    assert "KV 0% used, 50% reserved" in lines[1]
    assert lines[2].startswith("run: groups 0/1  requests 1/2  tokens 50  25 tok/s  left 0:00")
    assert lines[3].endswith("waiting: 1 for an instance  x lost, restarting")
    assert len(lines) == 4


def test_an_instance_without_a_place_says_what_is_missing_and_a_new_one_says_so_too():
    view = Display("run")
    view.observe(0.0, InstanceStarted(InstanceInfo("x", 64, 16, 4, 64)), [])
    view.observe(1.0, InstanceLost("x", "gone"), [])
    view.observe(2.0, InstanceWaiting("x", "1 GPU wanted, 0 of 8 free"), [])
    view.observe(2.0, InstanceWaiting("y", "none of the 2 nodes has 1 GPU"), [])
    assert _shown(view) == [
        "x  waits: 1 GPU wanted, 0 of 8 free",
        "y  waits: none of the 2 nodes has 1 GPU",
    ]
    view.observe(3.0, InstanceFailed("y", "lost too often"), [])
    view.observe(3.0, InstanceStarted(InstanceInfo("x", 64, 16, 4, 64)), [])
    assert _shown(view)[0] == "y  given up"
    assert _shown(view)[2].startswith("x ")


def _shown(view):
    """Return the lines of the terminal, but for the headline and the bar below."""
    return [line.plain for line in frame_of("run", view.progress, None, 200, 24)][2:]


def test_no_escape_of_a_file_reaches_the_screen_and_no_message_is_endless(
    seer, fails, write_config, write_prompts, tmp_path
):
    escape = "\x1b]0;owned\x07\x9b31m"
    config = write_config((), SMALL)
    bad = write_prompts(
        {"prompt": "a", "group_id": escape}, {"prompt": "a", escape: 1}, name=f"{escape}.jsonl"
    )
    message = fails("run", config, "--prompts", bad, "--out", tmp_path / "out")
    assert message.count(r"\x1b]0;owned\x07\x9b31m") == 4
    good = write_prompts({"prompt": "a"}, {"prompt": "a", "group_id": escape}, name=f"{escape}.jsonl")
    run = seer("run", config, "--prompts", good, "--out", tmp_path / escape, "--skip-bad")
    assert run.exit_code == 0, run.output
    listed = seer("config", config, "--set", f"compare.prompts={escape}")
    assert listed.exit_code == 0, listed.output
    huge = write_prompts({"prompt": "a", "k" * 20_000_000: 1}, name="huge.jsonl")
    endless = fails("run", config, "--prompts", huge, "--out", tmp_path / "out")
    assert len(endless) < 1000
    for shown in (message, run.output, listed.output, endless):
        assert shown.replace("\n", "").isprintable()


def test_logs_and_display_show_ids_without_their_escapes(capsys, monkeypatch):
    _configure_logs("info")
    structlog.get_logger("seer").warning("chunk_failed", instance="\x1b[2J", reason="gone\x9b1m")
    monkeypatch.setattr(display, "LINE_EVERY_S", 0.0)
    with Display("\x1b[2Jrun") as view:
        view.observe(0.0, InstanceStarted(InstanceInfo("\x1b[31m", 64, 16, 4, 64)), [])
        view.observe(1.0, InstanceLost("\x1b[31m", "gone"), [])
    errors = capsys.readouterr().err
    assert errors.replace("\n", "").isprintable()
    assert r"\x1b[31m lost" in errors
    assert r"gone\x9b1m" in errors


def test_the_time_left_is_what_the_last_response_needs_at_its_own_pace():
    progress = RunProgress()
    progress.observe(0.0, InstanceStarted(InstanceInfo("x", 64, 16, 4, 64)), [])
    groups = tuple(GroupSpec(name, 4, 10, 4000) for name in "ab")
    names = [f"{group}/{index}" for group in "ab" for index in range(10)]
    sent = [Dispatch(name, "x", 100, 128, False) for name in names]
    progress.observe(0.0, GroupsSubmitted(groups), sent)
    for name in names[1:]:
        progress.observe(10.0, ChunkFinished(name, "x", 100, True), [Complete(name, "stop")])
    for round_s in range(10, 110, 10):  # the last goes on at 10 tokens per second, alone
        progress.observe(float(round_s), ChunkFinished("a/0", "x", 100, False), [sent[0]])
    # 2,900 tokens came in 100 s, but what is missing comes at 10 per second; responses have 150 tokens.
    assert progress.left_s == pytest.approx(15.3, rel=0.1)
    for round_s in range(110, 400, 10):
        progress.observe(float(round_s), ChunkFinished("a/0", "x", 100, False), [sent[0]])
    assert progress.left_s == pytest.approx(10.0, rel=0.1)  # 100 tokens more are its limit
    progress.observe(400.0, ChunkFinished("a/0", "x", 100, False), [Complete("a/0", "length")])
    assert progress.left_s == 0
