"""docs/guides/compare-policies.md: its commands run, and its tables are those of the code."""

import re
import shlex
from pathlib import Path

import pytest
from seer_lab.policies import POLICIES

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs/guides/compare-policies.md").read_text()
TEMPLATE = ROOT / "examples/plugins/prioritizer/seer_fewest_left/__init__.py"
"""The plug-in that `seer new-plugin --slot prioritizer` copies."""


def blocks(text, language):
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.M | re.S)


COMMANDS = [line for block in blocks(PAGE, "sh") for line in block.splitlines()]


@pytest.fixture
def folder(tmp_path, monkeypatch, distribution, seer, write_config, write_prompts):
    """A directory with the lengths, the finished run and the plug-in that the page names."""
    monkeypatch.chdir(tmp_path)
    (lengths,) = blocks(PAGE, "jsonl")
    (tmp_path / "lengths.jsonl").write_text(lengths)
    distribution("shortest_first", TEMPLATE.read_text())
    config = write_config(["divided_rollout", "context_sched", "grouped_spec"])
    config = config.rename(tmp_path / "config.toml")
    prompts = write_prompts(*({"prompt": "once more", "n": 4, "max_tokens": 300} for _ in range(3)))
    for command, *arguments in (
        ("run", "--prompts", prompts, "--out", "out/first"),
        ("profile", "--context", 64, "--context", 1024, "--out", "profile.json"),
        ("compare", "--json", "compare.json"),
    ):
        assert seer(command, config, *arguments).exit_code == 0
    return tmp_path


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_of_the_page_runs(folder, seer, command):
    program, *arguments = shlex.split(command)
    result = seer(*arguments)
    assert (program, result.exit_code) == ("seer", 0), result.output
    shown = {
        "sim": "ratio: to",
        "sweep": "over those of verl",
        "profile": "written to",
        "compare": "ratio to",
        "twin": "predicted",
    }
    assert shown[arguments[0]] in result.stdout


def test_lists_of_lengths_become_a_file_that_is_read(tmp_path, monkeypatch, seer):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lists.json").write_text("[[5, 90], [7, 8, 9]]")
    exec(blocks(PAGE, "python")[0], {})
    result = seer("sim", "lengths.jsonl")
    assert result.exit_code == 0, result.output
    assert "5 responses of 2 groups" in result.stdout


def test_the_python_of_the_page_runs(capsys):
    source = blocks(PAGE, "python")[-1]
    exec(compile(source, "compare-policies.md", "exec"), {})
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["verl", "mine"]


def test_the_page_lists_every_policy_and_no_other():
    section = PAGE.partition("## Policies")[2].partition("\n## ")[0]
    rows = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    assert {name for row in rows for name in re.findall(r"`([^`]+)`", row)} == set(POLICIES)
