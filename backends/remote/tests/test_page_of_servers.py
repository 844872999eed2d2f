"""The first section of the page about servers, as it stands: two servers, three lines, and a run."""

import json
import re
import shlex
from pathlib import Path

import pytest

pytestmark = [pytest.mark.engine, pytest.mark.long]

PAGE = Path(__file__).parents[3] / "docs/guides/keep-your-engines.md"
PORTS = ("8000", "8001")
PROMPTS = [
    {"group_id": f"g{i}", "prompt": " ".join(f"w{3 + (i * 31 + j * 7) % 120}" for j in range(20)), "n": 4}
    for i in range(4)
]
LENGTH = ["--set", "rollout.max_tokens=150", "--set", "rollout.temperature=1.0"]
OWN = """
[seer]
engine = "vllm"
[engine.vllm]
model = "MODEL"
instances = 1
dtype = "float32"
threads = 1
max_model_tokens = 1024
kv_cache_bytes = 33554432
"""


def blocks(text, language):
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.M | re.S)


def completions(folder):
    lines = map(json.loads, (folder / "completions.jsonl").read_text("utf-8").splitlines())
    return {line["request_id"]: (line["token_ids"], line["text"], line["finish_reason"]) for line in lines}


def test_two_servers_and_three_lines_give_the_responses_of_seer_s_own_engine(
    serve_vllm, models, seer, tmp_path, monkeypatch
):
    section = PAGE.read_text("utf-8").partition("\n## ")[2].partition("\n## ")[0]
    (starts, runs), [config] = blocks(section, "sh"), blocks(section, "toml")
    lines = [shlex.split(line, comments=True) for line in starts.splitlines()]
    variables = dict(words[1].split("=") for words in lines if words[0] == "export")
    servers = []
    for words, port in zip((words for words in lines if words[0] == "vllm"), PORTS, strict=True):
        assert words[:5] == ["vllm", "serve", "MODEL", "--port", port]
        servers.append(serve_vllm(models[0], *words[5:], **variables))
        config = config.replace(f"127.0.0.1:{port}", servers[-1].url.removeprefix("http://"))
    for server in servers:
        server.await_ready()

    monkeypatch.chdir(tmp_path)
    Path("rollout.toml").write_text(config, encoding="utf-8")
    Path("own.toml").write_text(OWN.replace("MODEL", str(models[0])), encoding="utf-8")
    Path("prompts.jsonl").write_text("".join(json.dumps(each) + "\n" for each in PROMPTS), encoding="utf-8")
    assert seer("doctor", "rollout.toml").exit_code == 0
    [run] = [shlex.split(line) for line in runs.splitlines() if line.startswith("seer ")]
    for arguments in (run[1:], ["run", "own.toml", "--prompts", "prompts.jsonl", "--out", "out/own"]):
        result = seer(*arguments, *LENGTH)
        assert result.exit_code == 0, result.output
    found = completions(Path("out/first"))
    assert found == completions(Path("out/own"))
    assert len(found) == 16
    assert json.loads(Path("out/first/summary.json").read_text("utf-8"))["exactness"] == "exact"
