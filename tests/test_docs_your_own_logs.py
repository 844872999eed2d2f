"""docs/guides/your-own-logs.md: its commands run on dumps that the trainers' own code wrote."""

import json
import re
import shlex
import shutil
from pathlib import Path

import pytest
from seer_lab.foreign.formats import FORMATS
from seer_lab.foreign.slime_dump import GUIDE
from seer_lab.recorded import read_recorded
from seer_lab.traces import read_lengths

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / GUIDE).read_text()
DATA = ROOT / "lab/tests/data"
REQUEST = {"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, 48]}


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.M | re.S)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A directory with the logs that the page names."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(DATA / "verl", "rollouts")
    shutil.copytree(DATA / "slime", "dumps")
    (tmp_path / "my_model").symlink_to(ROOT / "examples/tiny_reasoner/weights")
    (tmp_path / "requests.jsonl").write_text(json.dumps(REQUEST) + "\n")
    exec(compile(blocks("python")[0], GUIDE, "exec"), {})
    return tmp_path


@pytest.mark.parametrize("command", [line for block in blocks("sh") for line in block.splitlines()])
def test_a_command_of_the_page_runs(folder, seer, command):
    program, *arguments = shlex.split(command)
    result = seer(*arguments)
    assert (program, result.exit_code) == ("seer", 0), result.output


def test_the_page_s_conversion_of_slime_s_dumps_gives_what_is_read_from_them(folder):
    converted = read_lengths(folder / "lengths.jsonl")
    recorded = read_recorded(folder / "dumps").iterations
    assert [[(group.prompt_tokens, group.output_tokens) for group in groups] for groups in converted] == [
        [(group.prompt_tokens, group.output_tokens) for group in groups] for groups in recorded
    ]


def test_the_page_has_a_row_for_each_format():
    assert len(re.findall(r"^\| (verl|slime|vLLM and Mooncake)", PAGE, re.M)) == len(FORMATS)
