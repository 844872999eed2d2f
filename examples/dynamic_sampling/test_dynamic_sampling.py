"""The batch is full, each group in it has a gradient, and replaced groups leave nothing behind."""

import asyncio
import importlib.util
import re
import sys
from itertools import count
from pathlib import Path

import pytest
from seer_host.config_files import make_config
from seer_session import Runtime

from tests.support.patience import PATIENCE_S

HERE = Path(__file__).parent


def load():
    spec = importlib.util.spec_from_file_location("dynamic_sampling", HERE / "dynamic_sampling.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_groups_whose_rewards_are_equal_are_replaced_until_the_batch_is_full(tmp_path):
    tables = {
        "seer": {"engine": "sim", "plugins": ["divided_rollout", "context_sched"]},
        "rollout": {"n": 4, "max_tokens": 200},
    }
    config = make_config(tables, base_dir=tmp_path, origin="a test")
    used = []

    def prompts():
        for number in count():
            used.append(f"g{number}")
            yield {"prompt_token_ids": [7, number], "group_id": f"g{number}"}

    def reward(completion):
        hard = int(completion.group_id[1:]) % 3
        return completion.index % 2 if hard else 0

    async def run():
        async with Runtime.from_config(config) as runtime:
            return await asyncio.wait_for(load().fill_batch(runtime, prompts(), reward, 8), PATIENCE_S)

    batch = asyncio.run(run())
    assert len(batch) == 8
    for group in batch:
        assert {each.index for each in group} == {0, 1, 2, 3}
        assert len({each.group_id for each in group}) == 1
        assert len({reward(each) for each in group}) == 2
    # Of every three prompts one has no gradient; one more may have been under way when the batch was full.
    assert 11 <= len(used) <= 13


def test_the_example_of_the_page_runs(tmp_path, monkeypatch, capsys):
    tables = {"seer": {"engine": "sim"}, "rollout": {"max_tokens": 20}}
    config = make_config(tables, base_dir=tmp_path, origin="a test")
    started = Runtime.from_config
    monkeypatch.setattr(Runtime, "from_config", lambda path: started(config))
    monkeypatch.chdir(HERE.parents[1])
    monkeypatch.setattr(sys, "path", list(sys.path))
    (source,) = re.findall(r"^```python\n(.*?)^```$", (HERE / "README.md").read_text("utf-8"), re.M | re.S)
    exec(source.replace("reward(done.metadata, done.text)", "done.index % 2"), {})
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("ring-5-")]
    assert [line.split()[1] for line in lines] == ["4"] * 8


def test_when_prompts_run_out_the_batch_is_what_there_is_and_an_error_leaves_nothing_open(tmp_path):
    tables = {"seer": {"engine": "sim"}, "rollout": {"n": 2, "max_tokens": 20}}
    config = make_config(tables, base_dir=tmp_path, origin="a test")
    prompts = [{"prompt_token_ids": [7, number], "group_id": f"g{number}"} for number in range(3)]

    def reward(completion):
        return completion.index if completion.group_id == "g1" else 0

    def broken(completion):
        raise ValueError("no reward")

    async def run():
        async with Runtime.from_config(config) as runtime:
            with pytest.raises(ValueError, match="no reward"):
                await load().fill_batch(runtime, prompts, broken, 2)
            return [await load().fill_batch(runtime, prompts, reward, most) for most in (2, 4)]

    for batch in asyncio.run(asyncio.wait_for(run(), PATIENCE_S)):
        assert [group[0].group_id for group in batch] == ["g1"]
