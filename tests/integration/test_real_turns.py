"""Responses with turns on real vLLM engines: whole, divided, moved, drafted, and with an instance killed."""

from __future__ import annotations

import asyncio
import importlib
from pathlib import Path

import attrs
import msgspec
import pytest
from seer_host.config_files import load_config
from seer_session.assembly import fill_slots
from seer_session.runtime import Runtime

from seer_core.model import PromptGroup
from seer_core.model.events import Complete
from seer_core.plugins.slots import Strategies
from seer_core.ports.drafting import StepTimes
from seer_core.scheduling.scheduler import Policies, Slot
from tests.support.installed import skip_without
from tests.support.killer import Killer, kill_worker_of

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "tiny_reasoner"
SETTINGS = [
    "engine.vllm.instances=2",
    "engine.vllm.max_model_tokens=600",
    "engine.vllm.max_running=16",
    "engine.vllm.start_timeout_s=300",
    "plugin.divided_rollout.chunk_tokens=8",
    "seer.restarts.attempts=0",  # it goes on without the instance that is killed
]
SAMPLING = {"stop": ["="], "min_tokens": 2, "presence_penalty": 0.1, "max_tokens": 300, "n": 3}
"""Controls that look at the tokens of a turn."""
FREE = StepTimes((1, 64), (0, 8), ((1.0, 1.0), (1.0, 1.0)))
"""Drafts cost nothing, so as many as there are get verified; and no instance measures its steps."""
KILL_AFTER = 3
"""Responses that have finished when the kill comes."""

pytestmark = pytest.mark.engine
skip_without("vllm", reason="vLLM is not installed: `make setup` installs it")


class Migrating:
    """Placer that lets no request stay, where it can go elsewhere."""

    def place(self, request, chunk_tokens, instances):
        free = [each for each in instances if each.running < each.info.max_running]
        return next((each for each in free if each.id != request.instance or len(instances) == 1), None)


@pytest.fixture
def calculator(monkeypatch):
    """Return a function that makes the example's environment."""
    monkeypatch.syspath_prepend(str(ROOT / "examples/plugins/environment"))
    return importlib.import_module("seer_pocket_calculator").PocketCalculator


def test_a_trajectory_is_the_same_whole_divided_moved_drafted_and_after_a_kill(tmp_path, calculator):
    profile = tmp_path / "profile.json"
    profile.write_bytes(msgspec.json.encode(FREE))
    config = load_config(EXAMPLE / "demo.toml", [*SETTINGS, f"plugin.grouped_spec.profile={profile}"])
    lines = (EXAMPLE / "prompts.jsonl").read_text("utf-8").splitlines()[:4]
    records = [msgspec.json.decode(line) | SAMPLING for line in lines]
    filled = fill_slots(config)
    moving = attrs.evolve(filled.policies, placer=Slot("placer", "test", Migrating()))
    found, asked = {}, {}

    async def main():
        runtime = Runtime.from_config(config)
        await runtime.use(Strategies(Policies()))
        async with runtime:
            groups = runtime.groups(records)
            environment = calculator()
            found["whole"] = await runtime.rollout(groups, environment=environment).wait()
            asked["whole"] = environment.asked
            found["turns alone"] = await runtime.rollout(list(turns_alone(found["whole"], groups))).wait()
            await runtime.use(attrs.evolve(filled, policies=moving))
            environment = calculator()
            found["moved"] = await runtime.rollout(groups, environment=environment).wait()
            asked["moved"] = environment.asked
            killer = Killer(kill_worker_of(runtime), after=KILL_AFTER, of=Complete, instance="vllm-1")
            await runtime.use(attrs.evolve(filled, policies=moving).with_observer(killer))
            environment = calculator()
            found["killed"] = await runtime.rollout(groups, environment=environment).wait()
            asked["killed"] = environment.asked
            assert killer.killed == "vllm-1"

    asyncio.run(main())
    whole = found["whole"]
    assert {each.finish_reason for each in whole.completions} <= {"stop", "length"}
    assert whole.summary.turns == asked["whole"] > 4 * len(whole.completions)
    assert whole.summary.chunks < asked["whole"] + len(whole.completions) + 1
    assert trajectories(found["moved"]) == trajectories(found["killed"]) == trajectories(whole)
    assert asked["whole"] == asked["moved"] == asked["killed"]
    moved = found["moved"].summary
    assert moved.migrations == moved.chunks - moved.requests > whole.summary.chunks
    assert moved.accepted_tokens > 0
    assert found["killed"].summary.instances_lost == 1
    alone = {each.group_id: list(each.token_ids) for each in found["turns alone"].completions}
    assert alone == dict(turns_of(whole))
    assert len(alone) > 8


def trajectories(result):
    """Return what must be the same of each response, by its request."""
    return {
        each.request_id: (
            list(each.token_ids),
            each.loss_mask,
            each.reward,
            each.finish_reason,
            each.text,
            [(turn.tokens, turn.answer_tokens) for turn in each.turns],
        )
        for each in result.completions
    }


def turns_of(result):
    """Yield the tokens of each turn of the first responses that a stop ended, by a name for each."""
    for completion in result.completions:
        start = 0
        for number, turn in enumerate(completion.turns):
            end = start + turn.tokens
            if completion.index == 0 and turn.answer_tokens:
                yield f"{completion.group_id}-{number}", list(completion.token_ids[start:end])
            start = end + turn.answer_tokens


def turns_alone(result, groups):
    """Yield a group for each of these turns: a prompt that has all before it, and one response."""
    by_id = {group.id: group for group in groups}
    for completion in result.completions:
        group, start = by_id[completion.group_id], 0
        for number, turn in enumerate(completion.turns):
            if completion.index == 0 and turn.answer_tokens:
                prompt = (*group.prompt_token_ids, *completion.token_ids[:start])
                name = f"{group.id}-{number}"
                yield PromptGroup(name, prompt, 1, 300 - start, group.sampling, group.seed)
            start += turn.tokens + turn.answer_tokens
