"""``seer plot``: the chunks of a trace as bars, and the picture of them."""

import itertools
import json
import sys

import pytest
from seer_lab.chunk_bars import bars_of
from seer_trace.records import read_trace

from seer_core.errors import InputError


@pytest.fixture
def run(seer, write_config, write_prompts, tmp_path):
    """Return a function that rolls out on simulated engines and returns the run's directory."""
    prompts = write_prompts(*({"prompt": f"count to {number}", "n": 4} for number in range(6)))

    def roll_out(name, plugins=("divided_rollout", "context_sched"), more=""):
        lengths = "[engine.sim.lengths]\nmean_tokens = 100\n[plugin.divided_rollout]\nchunk_tokens = 32\n"
        tables = f"[rollout]\nmax_tokens = 300\n{lengths if 'divided_rollout' in plugins else ''}{more}"
        result = seer("run", write_config(plugins, tables), "--prompts", prompts, "--out", tmp_path / name)
        assert result.exit_code == 0, result.output
        return tmp_path / name

    return roll_out


def test_each_chunk_is_a_bar_and_no_two_share_a_lane_at_a_time(run):
    out = run("out")
    summary = json.loads((out / "summary.json").read_bytes())
    found = bars_of(read_trace(out / "trace.jsonl"))
    assert len(found.bars) == summary["chunks"]
    assert found.instances == ["sim-0", "sim-1"]
    assert found.end_s == pytest.approx(summary["total_time_s"])
    assert found.end_s - found.tail_s == pytest.approx(summary["tail_time_s"])
    key = lambda bar: (bar.instance_id, bar.lane)  # noqa: E731
    for _, lane in itertools.groupby(sorted(found.bars, key=lambda bar: (*key(bar), bar.begin_s)), key):
        assert all(one.end_s <= other.begin_s for one, other in itertools.pairwise(lane))
    assert {bar.probe for bar in found.bars} == {True, False}


def test_a_lost_instance_ends_its_chunks(run):
    kill = '[[engine.sim.kill_at_s]]\ninstance = "sim-0"\nat_s = 0.3\nrestart_after_s = 0.2\n'
    found = bars_of(read_trace(run("out", more=kill) / "trace.jsonl"))
    assert 0.3 in [bar.end_s for bar in found.bars if bar.instance_id == "sim-0"]


@pytest.mark.parametrize("suffix", [".svg", ".png"])
def test_runs_are_drawn_one_above_the_other(run, seer, tmp_path, suffix):
    path = tmp_path / f"rollouts{suffix}"
    result = seer("plot", run("verl", ("group_round_robin",)), run("seer"), "--out", path)
    assert result.exit_code == 0, result.output
    assert path.read_bytes().startswith({".svg": b"<?xml", ".png": b"\x89PNG"}[suffix])


def test_a_trace_without_a_response_is_refused():
    with pytest.raises(InputError, match="no response of the trace is over"):
        bars_of([])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("out", "--out", "a.pdf"), "name a .svg or a .png file"),
        (("nowhere", "--out", "a.png"), "nowhere/trace.jsonl"),
    ],
)
def test_what_cannot_be_drawn_is_a_sentence(run, seer, tmp_path, monkeypatch, arguments, message):
    run("out")
    monkeypatch.chdir(tmp_path)
    result = seer("plot", *arguments)
    assert result.exit_code == 2, result.output
    assert message in result.stderr


def test_without_matplotlib_it_says_how_to_get_it(run, seer, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "seer_lab.rollout_picture", None)
    result = seer("plot", run("out"), "--out", tmp_path / "a.png")
    assert result.exit_code == 2
    assert "`seer plot` needs matplotlib" in result.stderr
