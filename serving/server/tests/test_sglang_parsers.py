"""Calls and reasoning by SGLang's own parsers, in SGLang's environment."""

import json
import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PYTHON = ROOT / ".venv-sglang/bin/python"
FOLDERS = ("serving/server", "cli", "host", "session", "trace", "plugins/prometheus", "plugins/journal")

pytestmark = pytest.mark.engine

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
CALLED = [["weather", {"city": "Paris"}]]


@pytest.fixture(scope="module")
def read(byte_model):
    """Return a function that reads answers, each as a whole and in pieces."""

    def run(*asked):
        lines = "".join(json.dumps(each) + "\n" for each in asked)
        paths = os.pathsep.join(str(ROOT / each) for each in FOLDERS)
        command = [PYTHON, Path(__file__).with_name("sglang_readings.py"), byte_model]
        done = subprocess.run(
            command, input=lines, env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr[-3000:]
        return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]

    return run


def test_sglang_reads_calls_and_reasoning_whole_and_in_pieces(read):
    asked = {"tools": [WEATHER]}
    both = ["qwen25", "qwen3"]
    auto, required, thought, closed, named, plain = read(
        {"parsers": ["qwen25", None], "chat": asked, "text": f"so {CALL}"},
        {"parsers": ["qwen25", None], "chat": {**asked, "tool_choice": "required"}, "text": CALL},
        {"parsers": both, "chat": asked, "text": f"hm</think>{CALL}", "prompt": "a<think>"},
        {"parsers": both, "chat": asked, "text": CALL, "prompt": "a<think></think>"},
        {
            "parsers": ["pythonic", None],
            "chat": {**asked, "tool_choice": {"type": "function", "function": {"name": "weather"}}},
            "text": '[{"name": "weather", "parameters": {"city": "Paris"}}]',
        },
        {"parsers": both, "chat": {"include_reasoning": False}, "text": "hm</think>so", "prompt": "<think>"},
    )
    for found in (auto, required, thought, closed, named):
        assert found["whole"]["calls"] == found["pieces"]["calls"] == CALLED
    assert {found[how]["content"].strip() for found in (auto,) for how in ("whole", "pieces")} == {"so"}
    assert "weather" in required["form"]["structural_tag"]
    assert (auto["form"], auto["reasoning_end"]) == (None, None)
    assert thought["whole"]["reasoning"] == thought["pieces"]["reasoning"] == "hm"
    assert (thought["reasoning_end"], closed["reasoning_end"]) == ("</think>", None)
    assert closed["whole"]["reasoning"] is None
    assert plain["whole"] == plain["pieces"] == {"content": "so", "reasoning": None, "calls": []}
    assert named["form"]["json"]["items"]["properties"]["name"]["enum"] == ["weather"]
