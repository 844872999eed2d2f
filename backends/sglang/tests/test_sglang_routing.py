"""Routed experts of SGLang: those that the model chooses for the same text, however a rollout is divided."""

import asyncio
import os
import signal

import attrs
import msgspec
import numpy as np
import pytest
from seer_host.config_files import load_config
from seer_host.routed_experts import routed_experts
from seer_journal import DiskJournal
from seer_session.assembly import assemble
from seer_session.runtime import Runtime
from seer_testing.families import VOCABULARY, write_family

from backends.tests.families import TOKENIZER
from seer_core.model.events import ChunkFinished
from seer_core.scheduling.scheduler import Slot

pytestmark = pytest.mark.engine

SETTINGS = """
[seer]
plugins = [{plugins}]
engine = "sglang"
kv_pool = "{kv_pool}"
[engine.sglang]
model = "{model}"
dtype = "float32"
instances = 2
max_model_tokens = 256
max_running = 8
block_size = 1
kv_cache_bytes = 16_777_216
engine_args = {{ enable_return_routed_experts = true }}
[rollout]
n = 3
max_tokens = 60
{more}
"""
DIVIDED = "[plugin.divided_rollout]\nchunk_tokens = 16\n"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_family(tmp_path_factory.mktemp("mixture") / "model", "Qwen3-MoE", 1, TOKENIZER)


@pytest.fixture(scope="module")
def records(prompts):
    return [
        {
            "prompt_token_ids": [token % VOCABULARY for token in prompt],
            "group_id": f"g{number}",
            "temperature": number % 2,
        }
        for number, prompt in enumerate(prompts(4))
    ]


class Alternate:
    """Placer: each chunk of a response goes to another instance than the one before."""

    def instance_changed(self, instance):
        pass

    def instance_lost(self, instance):
        pass

    def place(self, request, chunk_tokens, instances):
        others = [each for each in instances if each.id != request.instance]
        return others[0] if others else None


class Death:
    """An observer that takes a rollout's journal away with a chunk, as the death of the process does."""

    def __init__(self, chunks):
        self.chunks, self.rollout = chunks, None

    def observe(self, now, event, commands):
        self.chunks -= isinstance(event, ChunkFinished)
        if not self.chunks:
            self.rollout.journal = None


@pytest.fixture
def roll(model, records, tmp_path):
    """Return a function that rolls out in one way; it returns texts and experts by request, and the summary.

    With ``kills`` the process of the first instance is killed once a response is over; with ``moves`` each
    chunk moves.  A ``journal`` that ``dies`` with a chunk is taken away with it.
    """

    def roll(plugins, kv_pool="none", more="", *, kills=False, moves=False, journal=None, dies=0):
        path = tmp_path / "rollout.toml"
        names = ", ".join(f'"{name}"' for name in plugins)
        path.write_text(SETTINGS.format(plugins=names, kv_pool=kv_pool, model=model, more=more))
        config = load_config(path)
        assembly = assemble(config)
        if moves:
            policies = assembly.strategies.policies
            policies = attrs.evolve(policies, placer=Slot("placer", "alternate", Alternate()))
            strategies = attrs.evolve(assembly.strategies, policies=policies)
            assembly = attrs.evolve(assembly, strategies=strategies)
        texts, experts, death = {}, {}, Death(dies)
        if dies:
            observers = (*assembly.strategies.observers, Slot("observer", "death", death))
            strategies = attrs.evolve(assembly.strategies, observers=observers)
            assembly = attrs.evolve(assembly, strategies=strategies)

        async def play():
            async with Runtime(assembly, config.seer, config.rollout) as runtime:
                rollout = death.rollout = runtime.rollout(runtime.groups(records), journal=journal)
                async for completion in rollout:
                    if kills and not texts:
                        os.kill(runtime._fleet.engines["sglang-0"].worker.pid, signal.SIGKILL)
                    prompt = records[int(completion.group_id[1:])]["prompt_token_ids"]
                    texts[completion.request_id] = [*prompt, *completion.token_ids]
                    experts[completion.request_id] = routed_experts(completion, len(prompt))
                return (await rollout.wait()).summary

        summary = asyncio.run(play())
        return texts, experts, summary

    return roll


@pytest.fixture(scope="module")
def chosen(model):
    """Return a function: the experts that transformers' model chooses for a text but its last token."""
    import torch
    import transformers

    mixture = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    experts = mixture.config.num_experts_per_tok

    def chosen(text):
        with torch.no_grad():
            logits = mixture(torch.tensor([text[:-1]]), output_router_logits=True).router_logits
        return np.stack([layer.topk(experts).indices.sort().values.numpy() for layer in logits], axis=1)

    return chosen


def test_each_position_has_the_experts_that_the_model_chooses_however_a_rollout_is_divided(
    roll, chosen, tmp_path
):
    texts, whole, _ = roll(["group_round_robin"])
    assert len(texts) == 12
    for name, text in texts.items():
        assert (np.sort(whole[name], axis=2) == chosen(text)).all()
    drafts = "[plugin.grouped_spec]\ndraft_tokens = 4\n"
    for plugins, kv_pool, more, how in (
        (["divided_rollout"], "none", DIVIDED, "kills"),
        (["divided_rollout", "grouped_spec"], "local", DIVIDED + drafts, "moves"),
    ):
        found, experts, summary = roll(plugins, kv_pool, more, **{how: True})
        assert found == texts
        for name, positions in experts.items():
            assert (positions == whole[name]).all()
        assert summary.chunks > 36
        assert (summary.pool_tokens > 0) == (kv_pool == "local")
        assert (summary.accepted_tokens > 0) == ("grouped_spec" in plugins)
        assert (summary.instances_lost > 0) == (how == "kills")
    with DiskJournal(tmp_path / "journal") as journal:
        roll(["divided_rollout"], "none", DIVIDED, journal=journal, dies=30)
    with DiskJournal(tmp_path / "journal") as journal:
        found, experts, summary = roll(["divided_rollout"], "none", DIVIDED, journal=journal)
    assert summary.resumed_tokens > 0
    assert found == texts
    assert all((positions == whole[name]).all() for name, positions in experts.items())


TRAINED = """
[train]
prompts = "prompts.jsonl"
reward = "reward.py:reward"
iterations = 2
groups = 4
replay_routing = true
[train.optimizer]
learning_rate = 1e-3
"""


@pytest.mark.long
def test_training_with_them_gives_the_same_weights_under_any_scheduler(model, records, tmp_path):
    from seer_rl.config import load_training
    from seer_rl.training_run import train

    drawn = [{**each, "temperature": 1.0} for each in records]
    (tmp_path / "prompts.jsonl").write_bytes(b"\n".join(map(msgspec.json.encode, drawn)))
    (tmp_path / "reward.py").write_text(
        "def reward(response):\n    return float(sum(response.token_ids) % 5)\n"
    )
    weights = []
    for plugins, kv_pool, more in (("group_round_robin", "none", ""), ("divided_rollout", "local", DIVIDED)):
        path = tmp_path / f"{plugins}.toml"
        settings = SETTINGS.format(plugins=f'"{plugins}"', kv_pool=kv_pool, model=model, more=more)
        path.write_text(settings + TRAINED)
        train(*load_training(path), tmp_path / plugins, SilentListener())
        lines = (tmp_path / plugins / "metrics.jsonl").read_bytes().splitlines()
        records_of = [msgspec.json.decode(line) for line in lines]
        assert max(each["dlogp_max"] for each in records_of) < 1e-3
        weights.append([each["weights_sha256"] for each in records_of])
    assert weights[0] == weights[1]
    assert weights[0][0] != weights[0][1]


class SilentListener:
    """Shows nothing of a training's progress."""

    def phase(self, iteration, name):
        pass

    def responses(self, finished, wanted):
        pass

    def iterated(self, metrics):
        pass
