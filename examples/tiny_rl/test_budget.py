"""The task under a budget: what fits, what does not, and that prompts are new each time."""

import importlib.util
import json
import random
import subprocess
import sys
from pathlib import Path

import pytest
from seer_rl import Response
from seer_rl.config import load_training

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def budget():
    spec = importlib.util.spec_from_file_location("tiny_rl_budget", HERE / "budget.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_shortest_response_is_right_and_the_budget_is_counted_from_it(budget):
    for row in budget.prompts(0, 20, 0):
        problem = budget.task.Problem(
            **{key: row["metadata"][key] for key in ("ring", "hop", "start", "goal")}
        )
        pad = budget.Terse(problem, random.Random(0))
        pad.walk(0.0)
        text = " ".join(["go", *pad.words, "answer", *problem.answer])
        assert budget.reward(Response(row["metadata"], text, [], "stop")) == 1.0
        assert row["max_tokens"] == len(budget.task.encode(text)) + 1 + budget.SLACK_TOKENS


def test_no_response_of_the_teacher_is_shorter(budget):
    rng = random.Random(5)
    for _ in range(200):
        problem = budget.make_problem(rng)
        text = budget.task.write_response(problem, rng)
        assert len(budget.task.encode(text)) + 1 >= budget.shortest_tokens(problem)


def test_each_iteration_and_seed_has_other_prompts_of_six_to_ten_hops(budget):
    rows = [list(budget.prompts(iteration, 8, seed)) for iteration, seed in ((0, 0), (1, 0), (0, 1), (0, 0))]
    texts = [[row["prompt"] for row in each] for each in rows]
    assert texts[0] == texts[3]
    assert len({tuple(each) for each in texts}) == 3
    assert {int(row["metadata"]["answer"]) for each in rows for row in each} == {6, 7, 8, 9, 10}


def test_the_example_can_be_loaded():
    table, config = load_training(HERE / "train.toml")
    assert (HERE / config.engine["vllm"]["model"] / "model.safetensors").exists()
    assert table.groups == 32


def test_the_rewards_of_several_runs_are_drawn(tmp_path):
    pytest.importorskip("matplotlib", reason="the extra 'plot' of seer-rl is not installed")
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        lines = [{"reward_mean": 0.5, "evaluations": [{"weight_version": 0, "reward_mean": 0.25}]}] * 2
        (tmp_path / name / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    command = [sys.executable, HERE / "curves.py", tmp_path / "one", tmp_path / "other"]
    subprocess.run([*command, "--out", tmp_path / "curves.png"], check=True)
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
