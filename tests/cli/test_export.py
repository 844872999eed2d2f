"""``seer export``: a run as trace events and as a table."""

import csv
import json
import sys
from collections import defaultdict
from itertools import pairwise

import pyarrow.parquet
import pytest
from seer_cli.chunk_tables import write_parquet
from seer_cli.perfetto import trace_events
from seer_trace.chunk_runs import ChunkRun
from seer_trace.records import TraceRecord

from seer_core.errors import InputError
from seer_core.model import InstanceInfo
from seer_core.model.events import (
    ChunkFinished,
    Complete,
    Dispatch,
    GroupSpec,
    GroupsSubmitted,
    InstanceLost,
    InstanceStarted,
)

HOSTILE = '</script><b>"=1+1,'


@pytest.fixture
def run(seer, write_config, write_prompts, tmp_path):
    """A run on two instances of two slots each, and its responses by request."""
    config = write_config(
        ["divided_rollout"],
        "[plugin.divided_rollout]\nchunk_tokens = 64\n[engine.sim]\ninstances = 2\nmax_running = 2\n",
    )
    groups = [{"prompt_token_ids": [5] * 8, "n": 4, "max_tokens": 600} for _ in range(3)]
    groups[0]["group_id"] = HOSTILE
    result = seer("run", config, "--prompts", write_prompts(*groups), "--out", tmp_path / "out")
    assert result.exit_code == 0, result.output
    lines = (tmp_path / "out" / "completions.jsonl").read_text("utf-8").splitlines()
    responses = {each["request_id"]: each for each in map(json.loads, lines)}
    assert len(responses) == 12
    return tmp_path / "out", responses


def test_the_chunks_of_a_table_add_up_to_the_responses(seer, run, tmp_path):
    out, responses = run
    result = seer("export", out, "--csv", tmp_path / "chunks.csv")
    assert result.exit_code == 0, result.output
    with (tmp_path / "chunks.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert f"{len(rows):,} chunks" in result.output
    tokens = defaultdict(int)
    for row in rows:
        tokens[row["request_id"]] += int(row["tokens"])
        assert float(row["begin_s"]) < float(row["end_s"])
    assert tokens == {name: len(each["token_ids"]) for name, each in responses.items()}


def test_a_parquet_file_has_the_rows_of_the_table_with_types(seer, run, tmp_path):
    out, _ = run
    result = seer("export", out, "--csv", tmp_path / "chunks.csv", "--parquet", tmp_path / "chunks.parquet")
    assert result.exit_code == 0, result.output
    with (tmp_path / "chunks.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.reader(file))
    assert f"chunks.parquet: {len(rows) - 1:,} chunks" in result.output
    table = pyarrow.parquet.read_table(tmp_path / "chunks.parquet")
    assert table.column_names == rows[0]
    assert {str(field.type) for field in table.schema} == {"string", "double", "int64", "bool"}
    read = [["" if value is None else str(value) for value in row.values()] for row in table.to_pylist()]
    assert read == rows[1:]


def chunk(**changes):
    fields = {
        "request_id": "a/0",
        "begin_s": 0.0,
        "end_s": 1.0,
        "instance_id": "x",
        "max_tokens": 9,
        "kv_tokens": 9,
        "why": "",
        "migrated": False,
        "end": "aborted",
    }
    return ChunkRun(**fields | changes)


def test_the_figures_of_a_chunk_that_brought_nothing_are_null(tmp_path):
    assert write_parquet(tmp_path / "chunks.parquet", [chunk()]) == 1
    (row,) = pyarrow.parquet.read_table(tmp_path / "chunks.parquet").to_pylist()
    assert (row["request_id"], row["tokens"], row["migrated"]) == ("a/0", None, False)


def test_chunks_beyond_one_batch_are_all_written(tmp_path, monkeypatch):
    monkeypatch.setattr("seer_cli.chunk_tables.ROWS", 2)
    assert write_parquet(tmp_path / "chunks.parquet", [chunk(kv_tokens=n) for n in range(5)]) == 5
    table = pyarrow.parquet.read_table(tmp_path / "chunks.parquet")
    assert table["kv_tokens"].to_pylist() == list(range(5))


def test_a_number_that_parquet_has_no_room_for_is_one_sentence(tmp_path):
    with pytest.raises(InputError, match=r"the trace holds what Parquet cannot: .*; use --csv"):
        write_parquet(tmp_path / "chunks.parquet", [chunk(kv_tokens=2**64)])
    assert list(tmp_path.iterdir()) == []


def test_parquet_without_its_library_is_one_sentence(seer, run, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    result = seer("export", run[0], "--parquet", tmp_path / "chunks.parquet")
    assert result.exit_code == 2
    assert "--parquet needs the library pyarrow" in result.output
    assert "make setup" in result.output


def test_slices_of_a_lane_follow_each_other_and_bring_all_tokens(seer, run, tmp_path):
    out, responses = run
    result = seer("export", out, "--perfetto", tmp_path / "run.json")
    assert result.exit_code == 0, result.output
    events = json.loads((tmp_path / "run.json").read_bytes())["traceEvents"]
    assert f"{len(events):,} events" in result.output
    slices = [each for each in events if each["ph"] == "X"]
    tokens, lanes = defaultdict(int), defaultdict(list)
    for each in slices:
        tokens[each["name"]] += each["args"]["tokens"]
        lanes[each["pid"], each["tid"]].append((each["ts"], each["ts"] + each["dur"]))
    assert tokens == {name: len(each["token_ids"]) for name, each in responses.items()}
    assert set(lanes) == {(process, lane) for process in (1, 2) for lane in (1, 2)}
    assert all(a[1] <= b[0] for lane in lanes.values() for a, b in pairwise(sorted(lane)))
    names = {each["pid"]: each["args"]["name"] for each in events if each["ph"] == "M"}
    assert names == {0: "rollout", 1: "sim-0", 2: "sim-1"}
    ends = {(each["name"], each["pid"]): each["args"]["value"] for each in events if each["ph"] == "C"}
    assert set(ends.values()) == {0}
    assert len(ends) == 5
    moved = [each for each in events if each["ph"] in "sf"]
    assert {each["id"]: each["ph"] for each in moved if each["ph"] == "s"}.keys() == {
        each["id"] for each in moved if each["ph"] == "f"
    }
    assert all(any(each["ts"] == one["ts"] for one in slices) for each in moved if each["ph"] == "f")


def test_a_chunk_lost_with_its_instance_ends_there_and_an_arrow_leads_on():
    group = GroupSpec("a", prompt_tokens=10, n=1, max_tokens=100)
    records = [
        TraceRecord(0.0, InstanceStarted(InstanceInfo("x", 100, 1, 2, 1024)), []),
        TraceRecord(0.0, InstanceStarted(InstanceInfo("y", 100, 1, 2, 1024)), []),
        TraceRecord(1.0, GroupsSubmitted((group,)), [Dispatch("a/0", "x", 50, 40, False)]),
        TraceRecord(2.0, InstanceLost("x", "killed"), [Dispatch("a/0", "y", 50, 40, True, why="room")]),
        TraceRecord(4.5, ChunkFinished("a/0", "y", 50, True), [Complete("a/0", "stop")]),
    ]
    events = list(trace_events(records))
    lost, whole = (each for each in events if each["ph"] == "X")
    assert (lost["pid"], lost["ts"], lost["dur"]) == (1, 1_000_000, 1_000_000)
    assert lost["args"]["end"] == "lost with its instance: killed"
    assert (whole["pid"], whole["dur"], whole["args"]["why"]) == (2, 2_500_000, "room")
    start, end = (each for each in events if each["ph"] in "sf")
    assert (start["pid"], start["ts"], end["pid"], end["ts"]) == (1, 2_000_000, 2, 2_000_000)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ([], "name a file with --perfetto, --csv or --parquet"),
        (["--csv", "out/trace.jsonl"], "this command reads it"),
        (["--csv", "one", "--perfetto", "one"], "writes it already"),
        (["--csv", "one", "--parquet", "one"], "writes it already"),
    ],
)
def test_what_cannot_be_written_is_one_sentence(seer, tmp_path, monkeypatch, options, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "trace.jsonl").write_text("")
    result = seer("export", "out", *options)
    assert result.exit_code == 2
    assert words in " ".join(result.output.split())


def test_a_run_without_a_trace_is_one_sentence(seer, tmp_path):
    result = seer("export", tmp_path, "--csv", tmp_path / "chunks.csv")
    assert result.exit_code == 2
    assert not (tmp_path / "chunks.csv").exists()
