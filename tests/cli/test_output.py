"""Commands write whole files or none, and never over their inputs."""

import json
import os
import resource
import subprocess
import sys
import threading

import pytest
from seer_host.line_files import LineFile

from .helpers import BOUND_S, SMALL, lines_of

LENGTHS = '{"group": "a", "prompt_tokens": 4, "output_tokens": [5, 9]}\n'
RECORDING = '{"group": "a", "responses": [[1, 2, 3, 1, 2], [1, 2, 3]]}\n'


def names_in(directory):
    return sorted(path.name for path in directory.iterdir())


# An output that is also an input.

OVERWRITES = {
    "run --json onto the prompts": ("run {config} --prompts {prompts} --out {new} --json {out}", "prompts"),
    "run --json onto the config": ("run {config} --prompts {prompts} --out {new} --json {out}", "config"),
    "compare --json onto its prompts": ("compare {config} --json {out}", "prompts"),
    "compare --json onto other prompts": ("compare {config} --prompts {lengths} --json {out}", "lengths"),
    "profile": ("profile {config} --out {out}", "config"),
    "config": ("config {config} --json {out}", "config"),
    "plugins": ("plugins {config} --json {out}", "config"),
    "doctor": ("doctor {config} --json {out}", "config"),
    "sim": ("sim {lengths} --json {out}", "lengths"),
    "twin, the profile": ("twin {config} --profile {prompts} --lengths {lengths} --json {out}", "prompts"),
    "twin, the lengths": ("twin {config} --profile {prompts} --lengths {lengths} --json {out}", "lengths"),
    "replay": ("replay {recording} --json {out}", "recording"),
}


@pytest.fixture
def folder(write_config, tmp_path):
    """Return a file of each kind, and the name of one that is not there."""
    files = {
        "config": write_config(["divided_rollout"], SMALL),
        "prompts": tmp_path / "prompts.jsonl",
        "lengths": tmp_path / "lengths.jsonl",
        "recording": tmp_path / "recording.jsonl",
    }
    files["prompts"].write_text('{"prompt": "a"}\n')
    files["lengths"].write_text(LENGTHS)
    files["recording"].write_text(RECORDING)
    return {**files, "new": tmp_path / "new"}


@pytest.mark.parametrize("way", ["itself", "symbolic link", "hard link", "another spelling"])
@pytest.mark.parametrize("case", OVERWRITES)
def test_no_command_writes_over_what_it_reads(seer, folder, tmp_path, case, way):
    words, name = OVERWRITES[case]
    read, out = folder[name], tmp_path / "out"
    match way:
        case "itself":
            out = read
        case "symbolic link":
            out.symlink_to(read)
        case "hard link":
            out.hardlink_to(read)
        case "another spelling":
            (tmp_path / "folder").mkdir()
            out = tmp_path / "folder" / ".." / read.name
    before, names = read.read_bytes(), names_in(tmp_path)
    result = seer(*(word.format(**{**folder, "out": out}) for word in words.split()))
    assert result.exit_code == 2, result.output
    assert result.stderr == f"error: cannot write {out}: this command reads it; name another file\n"
    assert read.read_bytes() == before
    assert names_in(tmp_path) == names


def test_a_run_does_not_write_over_its_prompts_where_they_are_an_earlier_run_s_results(
    seer, folder, tmp_path
):
    run = ("run", folder["config"], "--prompts", folder["prompts"], "--out", tmp_path / "o")
    assert seer(*run).exit_code == 0
    for name in ("completions.jsonl", "trace.jsonl", "summary.json"):
        path = tmp_path / "o" / name
        before = path.read_bytes()
        result = seer("run", folder["config"], "--prompts", path, "--out", tmp_path / "o", "--overwrite")
        assert result.exit_code == 2
        assert f"cannot write {path}: this command reads it" in result.stderr
        assert path.read_bytes() == before
    trace = tmp_path / "o" / "trace.jsonl"
    result = seer("sim", tmp_path / "o", "--json", trace)
    assert result.exit_code == 2
    assert f"cannot write {trace}: this command reads it" in result.stderr


def test_two_outputs_are_two_files(seer, folder, tmp_path):
    for words, out in [
        ("run {config} --prompts {prompts} --out {new} --json {out}", tmp_path / "new" / "trace.jsonl"),
        ("sim {lengths} --json {out} --plot {out}", tmp_path / "x.svg"),
    ]:
        result = seer(*(word.format(**{**folder, "out": out}) for word in words.split()))
        assert result.exit_code == 2, result.output
        assert result.stderr == (
            f"error: cannot write {out}: this command writes it already; name another file\n"
        )
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("case", OVERWRITES)
def test_a_directory_is_refused_before_the_work(seer, folder, tmp_path, case):
    words, _ = OVERWRITES[case]
    result = seer(*(word.format(**{**folder, "out": tmp_path}) for word in words.split()))
    assert result.exit_code == 2, result.output
    [line] = result.stderr.splitlines()
    assert line.startswith(f"error: cannot write {tmp_path}: Is a directory")


# Whole or not there.


def limited(size, *arguments):
    """Run the command line in a process whose files cannot grow beyond ``size`` bytes: EFBIG, for real."""
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", "from seer_main import main; main()", *map(str, arguments)],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (size, size)),
        capture_output=True,
        text=True,
        timeout=BOUND_S,
    )


def test_a_result_that_does_not_fit_the_disk_leaves_the_earlier_one(folder, tmp_path):
    out = tmp_path / "config.json"
    out.write_text("precious")
    names = names_in(tmp_path)
    result = limited(100, "config", folder["config"], "--json", out)
    assert result.returncode == 2, result.stderr
    assert result.stderr.startswith(f"error: cannot write {out}: File too large; make room")
    assert out.read_text() == "precious"
    assert names_in(tmp_path) == names


@pytest.fixture
def wordy(write_prompts):
    """Return prompts whose completions are long, by what is written of them, and whose trace is short."""
    lines = ({"prompt": "a", "group_id": f"g{n}", "metadata": {"x": "y" * 30_000}} for n in range(4))
    return write_prompts(*lines, name="wordy.jsonl")


def test_completions_on_a_disk_that_fills_up_end_in_a_whole_line(folder, wordy, tmp_path):
    out = tmp_path / "out"
    result = limited(100_000, "run", folder["config"], "--prompts", wordy, "--out", out)
    assert result.returncode == 2, result.stderr
    assert "Traceback" not in result.stderr
    assert result.stderr.splitlines()[-1].startswith(
        f"error: cannot write {out}/completions.jsonl: File too large; make room or name another place"
    )
    assert (out / "completions.jsonl").read_bytes().endswith(b"\n")
    assert len(lines_of(out / "completions.jsonl")) == 3
    assert lines_of(out / "trace.jsonl")
    summary = json.loads((out / "summary.json").read_bytes())
    assert (summary["ended"], summary["requested"]) == ("failed", 8)
    assert "File too large" in summary["error"]


def test_a_trace_on_a_disk_that_fills_up_ends_in_a_whole_line(folder, write_prompts, tmp_path):
    prompts = write_prompts(*({"prompt": "a", "group_id": f"{n}" + "g" * 100} for n in range(12)), name="p")
    out = tmp_path / "out"
    result = limited(
        17_000, "run", folder["config"], "--prompts", prompts, "--out", out, "--set", "rollout.max_tokens=1"
    )
    assert result.returncode == 2, result.stderr
    assert f"cannot write the trace {out}/trace.jsonl: File too large" in result.stderr.splitlines()[-1]
    assert (out / "trace.jsonl").read_bytes().endswith(b"\n")
    assert len(lines_of(out / "trace.jsonl")) > 2
    assert 0 < len(lines_of(out / "completions.jsonl")) < 24


def test_a_line_that_cannot_be_written_whole_is_not_there(tmp_path):
    program = (
        "import resource, sys\n"
        "from seer_host.line_files import LineFile\n"
        "file = LineFile(sys.argv[1])\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))\n"
        "for size in (60, 60, 30, 30, 5):\n"
        "    try:\n"
        "        file.write(b'x' * size)\n"
        "    except OSError as error:\n"
        "        print(size, error.strerror)\n"
    )
    path = tmp_path / "lines"
    result = subprocess.run(
        [sys.executable, "-c", program, path], capture_output=True, text=True, check=True, timeout=BOUND_S
    )
    assert result.stdout == "60 File too large\n30 File too large\n"
    assert [len(line) for line in path.read_bytes().splitlines()] == [60, 30, 5]


def test_an_output_keeps_its_link_and_its_rights(seer, folder, tmp_path):
    real = tmp_path / "real.json"
    real.write_text("[]")
    real.chmod(0o600)
    (tmp_path / "link.json").symlink_to(real)
    assert seer("config", folder["config"], "--json", tmp_path / "link.json").exit_code == 0
    assert (tmp_path / "link.json").is_symlink()
    assert {row["key"] for row in json.loads(real.read_text())} > {"seer.plugins", "rollout.n"}
    assert real.stat().st_mode & 0o777 == 0o600
    umask = os.umask(0o022)
    try:
        assert seer("config", folder["config"], "--json", tmp_path / "new.json").exit_code == 0
    finally:
        os.umask(umask)
    assert (tmp_path / "new.json").stat().st_mode & 0o777 == 0o644


def test_an_output_may_be_a_pipe(seer, folder, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    read = []
    reader = threading.Thread(target=lambda: read.append((tmp_path / "pipe").read_bytes()), daemon=True)
    reader.start()
    assert seer("config", folder["config"], "--json", tmp_path / "pipe").exit_code == 0
    reader.join(BOUND_S)
    assert json.loads(read[0])
    assert (tmp_path / "pipe").is_fifo()


# A start that failed.


def test_a_start_that_failed_leaves_nothing_and_the_mended_command_runs(seer, folder, tmp_path):
    out = tmp_path / "deep" / "out"
    run = ("run", folder["config"], "--prompts", folder["prompts"], "--out", out)
    result = seer(*run, "--set", "plugin.divided_rollout.chunk_tokens=20000")
    assert result.exit_code == 2
    assert "starting 2 sim instances" in result.stderr
    assert not (tmp_path / "deep").exists()
    out.mkdir(parents=True)
    result = seer(*run, "--set", "plugin.divided_rollout.chunk_tokens=20000")
    assert result.exit_code == 2
    assert names_in(out) == []
    result = seer(*run)
    assert result.exit_code == 0, result.output
    assert names_in(out) == ["completions.jsonl", "summary.json", "trace.jsonl"]


def test_a_start_that_failed_leaves_an_earlier_run_s_results_even_where_they_may_be_replaced(
    seer, folder, tmp_path
):
    run = ("run", folder["config"], "--prompts", folder["prompts"], "--out", tmp_path / "out", "--overwrite")
    assert seer(*run).exit_code == 0
    before = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    assert seer(*run, "--set", "plugin.divided_rollout.chunk_tokens=20000").exit_code == 2
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == before


def test_a_run_says_how_it_ended_and_which_iteration_it_was(seer, folder, tmp_path):
    run = ("run", folder["config"], "--prompts", folder["prompts"])
    texts = {}
    for name, options in {"a": (), "b": ("--iteration", 0), "c": ("--iteration", 7)}.items():
        assert seer(*run, "--out", tmp_path / name, *options).exit_code == 0
        summary = json.loads((tmp_path / name / "summary.json").read_bytes())
        assert (summary["ended"], summary["error"], summary["requested"]) == ("finished", None, 2)
        assert summary["iteration"] == (7 if name == "c" else 0)
        completions = lines_of(tmp_path / name / "completions.jsonl")
        texts[name] = {each["request_id"]: each["token_ids"] for each in completions}
    assert texts["a"] == texts["b"]
    assert texts["a"].keys() == texts["c"].keys()
    assert all(texts["a"][name] != texts["c"][name] for name in texts["a"])


def test_a_hidden_file_takes_its_place_when_shown_and_goes_when_closed_before(tmp_path):
    path = tmp_path / "lines.jsonl"
    path.write_text("old")
    first = LineFile(path, hidden=True)
    first.write(b"new")
    assert path.read_text() == "old"
    first.close()
    assert names_in(tmp_path) == ["lines.jsonl"]
    second = LineFile(path, hidden=True)
    second.write(b"one")
    second.show()
    second.write(b"two")
    second.close()
    assert path.read_text() == "one\ntwo\n"
    assert names_in(tmp_path) == ["lines.jsonl"]


def test_a_file_that_must_not_be_written_is_not_replaced(seer, folder, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK)  # root may all
    (tmp_path / "kept.json").write_text("kept")
    result = seer("config", folder["config"], "--json", tmp_path / "kept.json")
    assert result.exit_code == 2
    assert "kept.json: Permission denied" in result.stderr
    assert (tmp_path / "kept.json").read_text() == "kept"
    with pytest.raises(OSError, match="Permission denied"):
        LineFile(tmp_path / "kept.json", hidden=True)


def test_a_plug_in_that_does_not_fit_the_disk_is_not_left_in_half(tmp_path):
    command = ("new-plugin", "half_there", "--slot", "placer", "--path", tmp_path / "half")
    result = limited(500, *command)
    assert result.returncode == 2, result.stderr
    assert f"cannot write {tmp_path / 'half'}: File too large" in result.stderr
    assert names_in(tmp_path) == []
    assert limited(1_000_000, *command).returncode == 0


@pytest.mark.parametrize("name", ["x" * 5000, "\udcff"], ids=["long", "bytes"])
def test_a_name_that_no_file_can_have_is_refused_in_a_sentence(seer, write_config, tmp_path, name):
    for option in ("--prompts", "--json"):
        paths = {"--prompts": tmp_path / "p.jsonl", "--json": tmp_path / "s.json", option: name}
        (tmp_path / "p.jsonl").write_text('{"prompt": "hi"}')
        named = [word for pair in paths.items() for word in pair]
        result = seer("run", write_config(), "--out", tmp_path / "out", *named)
        assert result.exit_code == 2, result.output
        assert result.stderr.lower().count("error: ") == 1
