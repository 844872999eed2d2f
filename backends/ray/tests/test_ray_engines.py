"""Real vLLM instances on a cluster that `seer run` starts: the tokens of child processes."""

import json
from pathlib import Path

import pytest

pytest.importorskip("ray")
EXAMPLE = Path(__file__).parents[3] / "examples/tiny_reasoner"


@pytest.mark.engine
def test_vllm_on_a_cluster_writes_the_tokens_of_child_processes(start_seer, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join((EXAMPLE / "prompts.jsonl").read_text().splitlines(keepends=True)[:3]))
    tokens = {}
    for launcher in ("local", "ray"):
        out = tmp_path / launcher
        arguments = ["run", EXAMPLE / "demo.toml", "--prompts", prompts, "--out", out]
        arguments += ["--set", "seer.kv_pool=none", "--set", f"seer.launcher={launcher}"]
        _, errors = (process := start_seer(*arguments)).communicate(timeout=300)
        assert process.returncode == 0, errors
        lines = (out / "completions.jsonl").read_text().splitlines()
        tokens[launcher] = {each["request_id"]: each["token_ids"] for each in map(json.loads, lines)}
    assert len(tokens["local"]) == 24
    assert tokens["ray"] == tokens["local"]
