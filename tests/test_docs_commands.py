"""Pages whose commands and Python run here, on simulated engines; long ones on smaller workloads."""

import json
import re
import shlex
import shutil
from pathlib import Path

import pytest
from seer_lab.foreign.slime_dump import GUIDE
from seer_lab.policies import POLICIES
from seer_lab.recorded import read_recorded
from seer_lab.traces import read_lengths

ROOT = Path(__file__).parents[1]
DATA = ROOT / "lab/tests/data"
REQUEST = {"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, 48]}
SHORT = {
    "synthetic": ("--lengths", "groups=6", "--lengths", "mean_tokens=200", "--lengths", "cap_tokens=900"),
    "qwen2-vl-72b": ("--scale", "0.0625", "--lengths", "mean_tokens=400", "--lengths", "cap_tokens=900"),
}
"""Options that make a workload of a page small; the last one of a name holds."""


def page(name):
    return (ROOT / name).read_text("utf-8")


def blocks(text, language):
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.M | re.S)


def commands(text):
    return [line for block in blocks(text, "sh") for line in block.splitlines()]


FIRST, COMPARE, LOGS = map(page, ("docs/start/first-rollout.md", "docs/guides/compare-policies.md", GUIDE))


@pytest.fixture
def run(seer):
    """Return a function that runs a command of a page, which has to succeed, and returns what it printed."""

    def run(command):
        program, *arguments = shlex.split(command)
        small = SHORT.get(arguments[1], ()) if arguments[0] in ("sim", "sweep") else ()
        result = seer(*arguments, *small)
        assert (program, result.exit_code) == ("seer", 0), result.output
        return result.stdout

    return run


def test_the_python_of_the_readme_runs_as_it_stands(monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    (source,) = blocks(page("README.md"), "python")
    exec(compile(source, "README.md", "exec"), {})
    steps = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in steps] == ["step 0", "step 1", "step 2"]


def test_the_commands_of_the_first_rollout_run_and_its_table_is_what_its_example_gives(
    run, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    printed = {command: run(command) for command in commands(FIRST) if "examples/first_rollout" in command}
    found = {
        cells[1].strip(): [cell.strip() for cell in cells[2:-1]]
        for line in printed["seer compare examples/first_rollout/rollout.toml"].splitlines()
        if len(cells := line.split("│")) > 3
    }
    table = FIRST.partition("| figure |")[2].partition("\n\n")[0].splitlines()[2:]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table]
    assert len(rows) == 9
    assert {name: found[name] for name, *_ in rows} == {name: cells for name, *cells in rows}


@pytest.fixture
def lengths(tmp_path, monkeypatch, distribution, seer, write_config, write_prompts):
    """A directory with the lengths, the finished run and the plug-in that the page about policies names."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lengths.jsonl").write_text(blocks(COMPARE, "jsonl")[0])
    distribution("shortest_first", page("examples/plugins/prioritizer/seer_fewest_left/__init__.py"))
    config = write_config(["divided_rollout", "context_sched", "grouped_spec"])
    config = config.rename(tmp_path / "config.toml")
    prompts = write_prompts(*({"prompt": "once more", "n": 2, "max_tokens": 60} for _ in range(2)))
    for command, *arguments in (
        ("run", "--prompts", prompts, "--out", "out/first"),
        ("profile", "--context", 64, "--context", 1024, "--out", "profile.json"),
        ("compare", "--json", "compare.json"),
    ):
        assert seer(command, config, *arguments).exit_code == 0


@pytest.mark.usefixtures("lengths")
def test_the_commands_of_the_page_about_policies_run(run):
    for command in commands(COMPARE):
        run(command)


def test_the_page_about_policies_lists_every_one_and_no_other():
    section = COMPARE.partition("## Policies")[2].partition("\n## ")[0]
    rows = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    assert {name for row in rows for name in re.findall(r"`([^`]+)`", row)} == set(POLICIES)


def test_the_commands_of_the_page_about_logs_run_and_its_python_reads_dumps_alike(tmp_path, monkeypatch, run):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(DATA / "verl", "rollouts")
    shutil.copytree(DATA / "slime", "dumps")
    (tmp_path / "my_model").symlink_to(ROOT / "examples/tiny_reasoner/weights")
    (tmp_path / "requests.jsonl").write_text(json.dumps(REQUEST) + "\n")
    exec(compile(blocks(LOGS, "python")[0], GUIDE, "exec"), {})
    for command in commands(LOGS):
        run(command)
    converted = read_lengths(tmp_path / "lengths.jsonl")
    recorded = read_recorded(tmp_path / "dumps").iterations
    assert [[(group.prompt_tokens, group.output_tokens) for group in groups] for groups in converted] == [
        [(group.prompt_tokens, group.output_tokens) for group in groups] for groups in recorded
    ]


def test_the_placer_of_its_guide_fills_the_slot_in_the_commands_shown(distribution, run):
    guide = page("docs/guides/write-a-placer.md")
    distribution("fewest", blocks(guide, "python")[0])
    for command in commands(guide):
        if command.startswith("seer sim"):
            assert "mine" in run(command)


def test_the_python_of_the_engine_s_guide_is_that_of_the_example():
    files = (ROOT / "examples/plugins/engine").rglob("*.py")
    example = "\n".join(plain(file.read_text("utf-8")) for file in files)
    for source in blocks(page("docs/guides/write-an-engine.md"), "python"):
        assert plain(source) in example


def plain(source):
    """Return code without indentation."""
    return "\n".join(line.strip() for line in source.strip().splitlines())


def test_the_lines_for_wheels_name_the_pytorch_that_the_set_up_installs():
    torch = re.search(r"^torch='?([^'\n]+)'?$", page("scripts/environment.sh"), re.M)[1]
    assert f"pip install '{torch}' --extra-index-url" in page("docs/start/install.md")
