"""SkyRL's generator, trainer and experiment, called as SkyRL calls them, on simulated engines."""

import asyncio
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from seer_host.config_files import RolloutTable
from seer_journal import DiskJournal
from seer_session import Sampling, Session
from seer_session.prompts import make_groups
from seer_skyrl import SeerEngines, SeerExp, SeerTrainer
from seer_skyrl.engines import sampling
from seer_skyrl.training import check
from skyrl.backends.skyrl_train.inference_servers.base import InferenceEngineInterface
from skyrl.backends.skyrl_train.inference_servers.engine_utils import get_sampling_params_for_backend
from skyrl.train.config import SamplingParams
from skyrl.train.generators.utils import prepare_generator_input

from seer_core.errors import ConfigError, EngineError
from seer_core.model.sampling import CONTROLS
from seer_core.ports.engine import ModelInfo

HOW = {"max_tokens": 4, "temperature": 1.0, "top_p": 1.0, "top_k": -1, "logprobs": 1}


@pytest.fixture
def engines(cfg, tokenizer):
    with Session(cfg.seer_config) as session:
        yield SeerEngines(session, tokenizer)


def generator(cfg, tokenizer, engines):
    return SeerExp.get_generator(None, cfg, tokenizer, engines)


def batch_of(cfg, step=1, phase="train", first=0, **extras):
    rows = [
        {
            "prompt": [{"role": "user", "content": f"ring {number} ?"}],
            "env_class": None,
            "env_extras": dict(extras),
            "uid": str(number),
        }
        for number in range(first, first + 4)
    ]
    params = cfg.generator.sampling_params if phase == "train" else cfg.generator.eval_sampling_params
    how = get_sampling_params_for_backend("vllm", params)
    return prepare_generator_input(rows, cfg.generator.n_samples_per_prompt, how, "even", phase, step)[0]


def roll_out(cfg, tokenizer, engines, **about):
    return asyncio.run(generator(cfg, tokenizer, engines).generate(batch_of(cfg, **about)))


def test_a_batch_comes_back_filled_and_scored_in_its_order(cfg, tokenizer, engines):
    assert isinstance(engines, InferenceEngineInterface)
    output = roll_out(cfg, tokenizer, engines)
    assert len(output["response_ids"]) == 12
    for place, tokens in enumerate(output["response_ids"]):
        prompt = [{"role": "user", "content": f"ring {place // 3} ?"}]
        assert output["prompt_token_ids"][place] == tokenizer.apply_chat_template(
            prompt, add_generation_prompt=True, tokenize=True, return_dict=False
        )
        assert 0 < len(tokens) == len(output["rollout_logprobs"][place]) == sum(output["loss_masks"][place])
        assert (output["stop_reasons"][place] == "length") == (len(tokens) == 16)
        text = tokenizer.decode(tokens, skip_special_tokens=True)
        assert output["rewards"][place] == float(len(text) % 2 == 0)
    groups = {each.group_id for each in engines.session.result.completions}
    assert groups == {f"train-{number}" for number in range(4)}
    assert len({str(tokens) for tokens in output["response_ids"]}) > 6


def test_without_log_probs_none_come_back(cfg, tokenizer, engines):
    cfg.generator.sampling_params.logprobs = None
    assert roll_out(cfg, tokenizer, engines)["rollout_logprobs"] is None


def test_routed_experts_are_those_of_the_whole_text_if_skyrl_replays_them(loops, tokenizer, monkeypatch):
    loops.generator.inference_engine.enable_return_routed_experts = True
    check(loops)
    with Session(loops.seer_config) as session:
        engines = SeerEngines(session, tokenizer, replays_routing=True)
        with pytest.raises(ConfigError, match="enable_return_routed_experts = true"):
            roll_out(loops, tokenizer, engines)
        monkeypatch.setattr(
            "seer_skyrl.engines.routed_experts",
            lambda completion, prompt: np.zeros((prompt + len(completion.token_ids) - 1, 2, 4), np.uint16),
        )
        for batched in (True, False):
            loops.generator.batched = batched
            output = roll_out(loops, tokenizer, engines, step=1 + batched)
            texts = zip(output["prompt_token_ids"], output["response_ids"], strict=True)
            for experts, (prompt, response) in zip(output["rollout_expert_indices"], texts, strict=True):
                assert experts.shape == (len(prompt) + len(response) - 1, 2, 4)


def test_tokens_follow_from_the_step_and_the_data_under_any_scheduler(cfg, tokenizer, engines, other_config):
    one, two = (roll_out(cfg, tokenizer, engines, step=step)["response_ids"] for step in (1, 2))
    assert one != two
    with Session(other_config) as session:
        again = SeerEngines(session, tokenizer)
        shifted = roll_out(cfg, tokenizer, again, step=2, first=1)["response_ids"]
        assert shifted[:9] == two[3:], "the batch's other prompts have changed a response"
        assert roll_out(cfg, tokenizer, again, step=1)["response_ids"] == one


def test_evaluation_has_the_same_seeds_each_time(cfg, tokenizer, engines):
    cfg.generator.eval_sampling_params.temperature = 0.7
    early = roll_out(cfg, tokenizer, engines, phase="eval", step=0)
    roll_out(cfg, tokenizer, engines, step=1)
    assert roll_out(cfg, tokenizer, engines, phase="eval", step=5)["response_ids"] == early["response_ids"]


@pytest.fixture
def loops(cfg):
    """Return SkyRL's options for agent loops, which ask for each turn."""
    cfg.generator.batched = False
    check(cfg)
    return cfg


def rounds(cfg, tokenizer, engines, broken=(), **about):
    batch = batch_of(cfg, **about)
    for row, extras in enumerate(batch["env_extras"]):
        extras |= {"rounds": 1 + row % 4, "broken": row in broken}
    batch["env_classes"] = ["rounds"] * len(batch["env_classes"])
    return asyncio.run(generator(cfg, tokenizer, engines).generate(batch, disable_tqdm=True))


def turns_of(output):
    """Return what the model wrote, by request: tokens and log-probs."""
    found = {}
    for row, mask in enumerate(output["loss_masks"]):
        edges = [place for place, (a, b) in enumerate(pairwise([0, *mask, 0])) if a != b]
        for number, (begin, end) in enumerate(zip(edges[::2], edges[1::2], strict=True)):
            first, later = f"train-{row // 3}/{row % 3}", f"train-{row // 3}-{row % 3}-{number}/0"
            found[later if number else first] = (
                output["response_ids"][row][begin:end],
                output["rollout_logprobs"][row][begin:end],
            )
    return found


def test_agent_loops_ask_for_each_turn_and_first_turns_are_groups(loops, tokenizer, engines):
    output = rounds(loops, tokenizer, engines)
    assert len(output["response_ids"]) == 12
    completions = engines.session.result.completions
    assert turns_of(output) == {
        each.request_id: (each.token_ids.tolist(), each.logprobs.tolist()) for each in completions
    }
    assert len(completions) == 3 * (1 + 2 + 3 + 4)
    assert {each.weight_version for each in completions} == {0}
    for row, mask in enumerate(output["loss_masks"]):
        assert len(mask) == len(output["response_ids"][row]) == len(output["rollout_logprobs"][row])
        rewards = [reward for reward in output["rewards"][row] if reward]
        assert rewards == [float(number) for number in range(1, 1 + len(rewards))]
        assert len(rewards) == 1 + row % 4


def test_a_turn_goes_on_where_the_turn_before_has_left_its_kv(loops, tokenizer, engines):
    rounds(loops, tokenizer, engines)
    found = {each.request_id: each for each in engines.session.result.completions}
    turns = {
        name: found[
            f"train-{row // 3}-{row % 3}-{number - 1}/0" if number > 1 else f"train-{row // 3}/{row % 3}"
        ]
        for row in range(12)
        for number in range(1, 1 + row % 4)
        if (name := f"train-{row // 3}-{row % 3}-{number}/0")
    }
    assert len(turns) == 18
    assert all(found[name].chunks[0].instance == before.instances[-1] for name, before in turns.items())
    assert engines.session.runtime._controller._homes == {}


def test_turns_follow_from_step_and_data_under_any_scheduler(loops, tokenizer, engines, other_config):
    one, two = (rounds(loops, tokenizer, engines, step=step) for step in (1, 2))
    assert one["response_ids"] != two["response_ids"]
    with Session(other_config) as session:
        again = rounds(loops, tokenizer, SeerEngines(session, tokenizer))
    for name in ("response_ids", "loss_masks", "rewards"):
        assert again[name] == one[name]


def test_an_environment_that_fails_ends_the_batch_and_the_engines_go_on(loops, tokenizer, engines):
    with pytest.raises(ValueError, match="no such game"):
        rounds(loops, tokenizer, engines, broken=[4])
    assert len(rounds(loops, tokenizer, engines)["response_ids"]) == 12


def test_a_turn_of_another_batch_is_refused(loops, tokenizer, engines):
    async def ask():
        async with engines.turn_by_turn(batch_of(loops)):
            await engines.generate(
                {"prompt_token_ids": [[1]], "session_ids": ["7_0"], "sampling_params": HOW}
            )

    with pytest.raises(ConfigError, match="a turn of '7_0', which is not in its batch"):
        asyncio.run(ask())


def trainer_of(cfg, engines, saved):
    """Return a trainer whose workers save a tensor instead of a model."""

    def save(model, directory, tokenizer):
        saved.append((model, directory))
        Path(directory).mkdir(parents=True, exist_ok=True)
        save_file({"a": torch.zeros(1)}, Path(directory) / "model.safetensors")

    trainer = SeerTrainer.__new__(SeerTrainer)  # SkyRL's own starts workers on GPUs
    trainer.cfg, trainer.tokenizer, trainer.inference_engine_client = cfg, engines.tokenizer, engines
    trainer.global_step = 0
    trainer.dispatch = SimpleNamespace(save_hf_model=save, _finish_weight_sync=lambda: saved.append("freed"))
    trainer.init_weight_sync_state()
    return trainer


def test_the_trainers_weights_go_to_the_engines_and_wake_them(cfg, tokenizer, engines):
    saved = []
    trainer = trainer_of(cfg, engines, saved)
    asyncio.run(engines.sleep())
    asyncio.run(trainer.dispatch.save_weights_for_sampler())
    assert saved == [("policy", f"{cfg.trainer.export_path}/seer_weights"), "freed"]
    roll_out(cfg, tokenizer, engines)
    assert {each.weight_version for each in engines.session.result.completions} == {1}
    asyncio.run(trainer.dispatch.save_weights_for_sampler())
    assert engines.session.weight_version == 2


def test_a_run_that_died_in_a_rollout_goes_on_with_what_its_journal_has(
    cfg, tokenizer, writing_config, tmp_path
):
    def live(*steps):
        """Train from the first of these steps on, and roll out after the last."""
        with (
            DiskJournal.of_session(tmp_path / "journal") as journal,
            Session(writing_config, journal=journal) as session,
        ):
            engines = SeerEngines(session, tokenizer)
            trainer = trainer_of(cfg, engines, [])
            for trainer.global_step in steps:
                asyncio.run(trainer.dispatch.save_weights_for_sampler())
            output = roll_out(cfg, tokenizer, engines, step=steps[-1] + 1)
            return output["response_ids"], session.result.summary

    first, _ = live(0, 1)
    again, summary = live(1)
    assert again == first
    assert summary.resumed_tokens == summary.tokens > 0


@pytest.mark.parametrize("colocated", [False, True])
def test_an_experiment_has_engines_while_it_runs(cfg, tokenizer, colocated):
    cfg.trainer.placement.colocate_all = colocated
    seen = []

    class Trainer:
        def __init__(self, engines, made):
            self.engines, self.made = engines, made

        async def train(self):
            seen.append((self.engines.session, self.engines.session.runtime.asleep))
            await self.engines.wake_up()
            seen.append(await self.made.generate(batch_of(cfg)))

    class Exp(SeerExp):
        def __init__(self):  # SkyRL's own reads data sets
            self.cfg, self.tokenizer = cfg, tokenizer

        def _setup_trainer(self):
            engines = self.get_inference_client()
            return Trainer(engines, self.get_generator(cfg, tokenizer, engines))

    Exp().run()
    (session, asleep), output = seen
    assert asleep == colocated
    assert len(output["response_ids"]) == 12
    with pytest.raises(Exception, match="not running"):
        session.rollout([])


def test_skyrl_s_sampling_is_the_prompts():
    how = {
        "max_tokens": 9,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": -1,
        "min_p": 0.0,
        "min_tokens": 1,
        "stop": ["</a>"],
        "include_stop_str_in_output": True,
        "skip_special_tokens": True,
        "logprobs": 1,
    }
    model = ModelInfo(100, 64, controls=CONTROLS)
    [group] = make_groups([{"prompt_token_ids": [5], "n": 1, **sampling(how)}], RolloutTable(), model, None)
    assert group.max_tokens == 9
    assert group.sampling == Sampling(stop=("</a>",), include_stop_str_in_output=True)
    assert sampling({**how, "min_tokens": 4, "repetition_penalty": 1.2})["min_tokens"] == 4
    with pytest.raises(ConfigError, match="does not sample by truncate_prompt_tokens"):
        sampling({**how, "truncate_prompt_tokens": 4})


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("seer_config", "", "give seer_config="),
        ("generator.vision_language_generator", True, "rolls out text alone"),
        ("trainer.fully_async.enabled", True, "leave out trainer.fully_async"),
        ("trainer.policy.model.lora.rank", 8, "load whole models"),
        ("trainer.export_path", "s3://somewhere", "trainer.export_path is s3://somewhere"),
        ("generator.sampling_params.min_p", 0.1, "min_p 0.1, the engines' log-probs"),
        ("generator.eval_sampling_params.additional_kwargs", {"seed": 3}, "does not sample by seed"),
        ("generator.sampling_params.temperature", 0.8, "sampled by temperature 0.8, top_p 1.0, top_k 0,"),
    ],
)
def test_options_that_a_rollout_does_not_support_are_refused_before_engines_start(
    cfg, option, value, message
):
    place = cfg
    *parts, last = option.split(".")
    for part in parts:
        place = getattr(place, part)
    setattr(place, last, value)
    with pytest.raises(ConfigError, match=message):
        check(cfg)


def test_options_that_a_rollout_can_give_are_taken(cfg):
    check(cfg)
    cfg.generator.sampling_params = SamplingParams(temperature=0.8, logprobs=None, max_generate_length=4)
    check(cfg)


def test_prompts_that_differ_within_a_group_are_refused(cfg, tokenizer, engines):
    batch = batch_of(cfg)
    for place, extras in enumerate(batch["env_extras"]):
        extras["hint"] = str(place)
    with pytest.raises(ConfigError, match="different prompts, and a group has one"):
        asyncio.run(generator(cfg, tokenizer, engines).generate(batch))


def test_requests_without_a_batch_are_refused(engines):
    with pytest.raises(ConfigError, match="let a SeerGenerator ask for them"):
        asyncio.run(engines.generate({"prompt_token_ids": [[1, 2]], "sampling_params": {}}))


def test_a_failed_response_ends_training(cfg, tokenizer, engines, monkeypatch):
    whole = Session.rollout

    def failing(self, *args):
        result = whole(self, *args)
        result.completions[4] = msgspec.structs.replace(result.completions[4], finish_reason="error")
        return result

    monkeypatch.setattr(Session, "rollout", failing)
    with pytest.raises(EngineError, match="ended with 'error', and SkyRL cannot train without it"):
        roll_out(cfg, tokenizer, engines)


@pytest.mark.parametrize(
    "call",
    [
        "chat_completion",
        "completion",
        "get_world_size",
        "init_weight_update_communicator",
        "render_chat_completion",
        "update_named_weights",
    ],
)
def test_calls_of_skyrls_own_engines_are_refused_with_the_remedy(engines, call):
    with pytest.raises(ConfigError, match="train by `python -m seer_skyrl`"):
        asyncio.run(getattr(engines, call)())


def test_calls_with_nothing_to_do_pass(engines):
    asyncio.run(engines.pause_generation())
    asyncio.run(engines.resume_generation())
    asyncio.run(engines.reset_prefix_cache())
    asyncio.run(engines.finish_session("x"))
    with pytest.raises(ConfigError, match="give single requests to `seer serve`"):
        engines.get_endpoint_url()
    asyncio.run(engines.teardown())
