"""TRL's own trainer on simulated engines."""

import json
import re
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
import torch
from seer_host.weight_copies import WeightCopies
from seer_session import Sampling, Session, load_config
from seer_trl import SeerRollout
from seer_trl.rollout import sampling_of
from seer_worker.weights.adapters import make_adapter
from seer_worker.weights.checkpoint import WEIGHTS

from seer_core.errors import ConfigError, EngineError, OutputError
from seer_core.model.arrays import Tokens
from seer_core.ports.weights import WeightSpec, directory

pytestmark = pytest.mark.filterwarnings("ignore")  # TRL imports what it finds, vLLM too, which warns of much


def train(config, make_trainer, *overrides, resume=None, prompts=None, options=(), **settings):
    """Return the trainer, what each rollout gave it, and the session."""
    outputs = []
    with Session(load_config(config, overrides)) as session:
        rollout = SeerRollout(session, **dict(options))

        def recorded(prompts, trainer):
            outputs.append(rollout(prompts, trainer))
            return outputs[-1]

        trainer = make_trainer(recorded, prompts, **settings)
        trainer.train(resume_from_checkpoint=resume)
    return SimpleNamespace(
        trainer=trainer,
        outputs=outputs,
        session=session,
        tokens=[output["completion_ids"] for output in outputs],
        logs=logs_of(trainer),
        weights=weights_of(trainer),
    )


def logs_of(trainer):
    return [log for log in trainer.state.log_history if "loss" in log]


def weights_of(trainer):
    weights = {name: tensor.tolist() for name, tensor in trainer.model.state_dict().items()}
    return json.dumps(weights, sort_keys=True)


def trained(run):
    return trained_by(run.trainer)


def trained_by(trainer):
    logs = logs_of(trainer)
    return [(log["loss"], log["reward"], log["grad_norm"]) for log in logs], weights_of(trainer)


def test_the_example_of_the_page_trains(config, tokenizer, make_model, monkeypatch):
    monkeypatch.chdir(config.parent)
    tokenizer.save_pretrained("model")
    make_model().save_pretrained("model")
    page = (Path(__file__).parents[3] / "docs/guides/trl.md").read_text("utf-8")
    on_a_cpu = "use_cpu=True, bf16=False"
    assert on_a_cpu in page
    sources = re.findall(r"^```python\n(.*?)^```$", page, re.M | re.S)
    source = next(each for each in sources if "Session(" in each)
    source = source.replace("path/to/model", "model").replace(
        "num_generations=8", f"num_generations=8, {on_a_cpu}"
    )
    names = {}
    exec(source, names)
    assert names["trainer"].state.global_step == 6
    assert names["session"].result.summary.requests == 8


def test_the_same_training_learns_the_same_under_any_scheduler(config, make_trainer):
    seer = train(config, make_trainer)
    again = train(config, make_trainer)
    other = train(
        config,
        make_trainer,
        "seer.plugins=['group_round_robin']",
        "engine.sim.instances=3",
        options={"colocated": True, "weights": "shared_memory"},
    )
    assert seer.tokens == again.tokens == other.tokens
    assert trained(seer) == trained(again) == trained(other)
    assert [len(completions) for completions in seer.tokens] == [12, 12]
    assert seer.tokens[0] != seer.tokens[1]
    assert all(log["grad_norm"] > 0 for log in seer.logs)


def test_with_the_tokens_of_trl_itself_training_is_that_without_seer_bit_for_bit(
    config, make_trainer, monkeypatch
):
    """TRL draws tokens from torch's one stream of noise, and later the order of a batch.

    So its own tokens are handed in as if engines had sampled them, and the stream goes on where it was.
    """
    own = make_trainer(None, vllm_importance_sampling_correction=False)
    generate, drawn = own._generate_single_turn, []

    def recorded(*args, **options):
        drawn.append((*generate(*args, **options), torch.get_rng_state()))
        return drawn[-1][:2]

    own._generate_single_turn = recorded
    own.train()
    remaining = iter(drawn)
    whole = Session.rollout

    def with_own_tokens(self, records, iteration=None, **_):
        result, (ids, _, noise) = whole(self, records, iteration), next(remaining)
        torch.set_rng_state(noise)
        places = [(record["group_id"], index) for record in records for index in range(record["n"])]
        tokens = dict(zip(places, ids, strict=True))
        completions = [
            msgspec.structs.replace(each, token_ids=Tokens(tokens[each.group_id, each.index]))
            for each in result.completions
        ]
        return msgspec.structs.replace(result, completions=completions)

    monkeypatch.setattr(Session, "rollout", with_own_tokens)
    seer = train(config, make_trainer, vllm_importance_sampling_correction=False)
    assert seer.tokens == [ids for ids, *_ in drawn]
    assert trained(seer) == trained_by(own)


def test_another_seed_in_the_config_gives_other_tokens(config, make_trainer):
    one = train(config, make_trainer, max_steps=1)
    other = train(config, make_trainer, "seer.seed=5", max_steps=1)
    assert one.outputs[0]["prompt_ids"] == other.outputs[0]["prompt_ids"]
    assert one.tokens != other.tokens


def test_the_scheduler_receives_the_groups_and_the_responses_come_back_in_their_places(config, make_trainer):
    run = train(config, make_trainer, max_steps=1)
    prompts = run.outputs[0]["prompt_ids"]
    assert [prompts[place] for place in (0, 4, 8)] == [prompts[place + 3] for place in (0, 4, 8)]
    found = {(each.group_id, each.index): each for each in run.session.result.completions}
    assert sorted(found) == [(f"train-0-0-{number}", index) for number in range(3) for index in range(4)]
    for place, ids in enumerate(run.tokens[0]):
        completion = found[f"train-0-0-{place // 4}", place % 4]
        assert ids == completion.token_ids.tolist()
        assert run.outputs[0]["logprobs"][place] == completion.logprobs.tolist()


def test_equal_prompts_are_groups_of_their_own(config, make_trainer):
    run = train(config, make_trainer, max_steps=1, prompts=["5 9"] * 3)
    assert len({json.dumps(ids) for ids in run.tokens[0]}) == 12


def test_engines_get_weights_once_a_step_however_often_they_roll_out(config, make_trainer):
    run = train(config, make_trainer, gradient_accumulation_steps=2, steps_per_generation=1)
    assert len(run.outputs) == 4
    assert run.session.weight_version == 2
    ids = {each.group_id for each in run.session.result.completions}
    assert ids == {f"train-1-1-{number}" for number in range(3)}


def test_training_that_is_resumed_has_the_tokens_that_it_would_have_had(config, make_trainer, tmp_path):
    whole = train(config, make_trainer, max_steps=4, save_strategy="steps", save_steps=2)
    rest = train(config, make_trainer, max_steps=4, resume=str(tmp_path / "out" / "checkpoint-2"))
    assert rest.tokens == whole.tokens[2:]
    assert rest.weights == whole.weights


def test_training_that_is_resumed_after_an_evaluation_has_the_tokens_that_it_would_have_had(
    config, make_trainer, tmp_path
):
    settings = {"max_steps": 4, "eval_strategy": "steps", "eval_steps": 1, "num_generations_eval": 2}
    whole = train(config, make_trainer, save_strategy="steps", save_steps=2, **settings)
    rest = train(config, make_trainer, resume=str(tmp_path / "out" / "checkpoint-2"), **settings)
    assert len(rest.tokens) == 4
    assert rest.tokens == whole.tokens[4:]
    assert rest.weights == whole.weights


def test_evaluation_has_groups_of_its_own_size(config, make_trainer):
    run = train(
        config, make_trainer, max_steps=1, eval_strategy="steps", eval_steps=1, num_generations_eval=2
    )
    assert [len(completions) for completions in run.tokens] == [12, 6]
    assert {each.group_id for each in run.session.result.completions} == {
        f"eval-1-0-{number}" for number in range(3)
    }


def test_conversations_go_through_the_chat_template(config, make_trainer):
    prompts = [[{"role": "user", "content": f"{number} 9"}] for number in range(3, 6)]
    run = train(config, make_trainer, max_steps=1, prompts=prompts)
    assert sorted(run.outputs[0]["prompt_ids"][::4]) == [[7, number, 9, 8] for number in range(3, 6)]


def test_tokens_are_weighed_by_the_engines_logprobs_unless_that_is_off(config, make_trainer):
    run = train(config, make_trainer, max_steps=1)
    # Simulated engines make their log-probs up, so they are far from the model's.
    assert run.logs[0]["sampling/sampling_logp_difference/mean"] > 0.1
    plain = train(config, make_trainer, max_steps=1, vllm_importance_sampling_correction=False)
    assert "sampling/sampling_logp_difference/mean" not in plain.logs[0]
    assert plain.tokens == run.tokens
    assert plain.weights != run.weights


UNSUPPORTED = pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"min_p": 0.1}, "sampled by temperature 1.0, top_p 1.0, top_k 0, min_p 0.1, the engines' log-probs"),
        ({"repetition_penalty": 1.1}, "repetition_penalty 1.1, the engines' log-probs"),
        ({"generation_kwargs": {"no_repeat_ngram_size": 2}}, "unknown field `no_repeat_ngram_size`"),
        ({"temperature": 0.7}, "sampled by temperature 0.7, .* set vllm_importance_sampling"),
    ],
)


@UNSUPPORTED
def test_sampling_that_seer_does_not_support_is_refused_before_a_rollout(
    config, make_trainer, settings, message
):
    with pytest.raises(ConfigError, match=message):
        train(config, make_trainer, **settings)


@UNSUPPORTED
def test_it_is_refused_before_engines_start_where_the_settings_are_given(
    config, make_args, settings, message
):
    with pytest.raises(ConfigError, match=message):
        SeerRollout(Session(config), make_args(**settings))


def test_a_trainer_s_sampling_is_the_prompts(make_args):
    settings = {"temperature": 0.7, "min_p": 0.1, "repetition_penalty": 1.1}
    kwargs = {"stop": "</answer>", "min_tokens": 4, "top_p": 0.9}
    assert sampling_of(make_args(**settings, generation_kwargs=kwargs)) == Sampling(
        0.7, 0.9, min_p=0.1, repetition_penalty=1.1, stop=("</answer>",), min_tokens=4
    )
    assert sampling_of(make_args(generation_kwargs={"stop": ["a", "b"]})).raw


def test_trl_s_own_vllm_is_refused_before_it_starts(config, make_args):
    with pytest.raises(ConfigError, match="use_vllm starts TRL's own vLLM"):
        SeerRollout(Session(config), make_args(use_vllm=True))


def test_trainers_that_no_rollout_suits_are_refused(config, make_trainer, monkeypatch):
    with Session(config) as session:
        rollout = SeerRollout(session)
        trainer = make_trainer(rollout)
        for owner, name, value, message in [
            (type(trainer.accelerator), "num_processes", 2, "TRL trains in 2 processes"),
        ]:
            with monkeypatch.context() as patch:
                patch.setattr(owner, name, value, raising=False)
                with pytest.raises(ConfigError, match=message):
                    rollout(["5 9"] * 12, trainer)
        assert session.weight_version == 0


def test_weights_in_shared_memory_are_those_that_a_directory_has(config, make_trainer, tmp_path, monkeypatch):
    found, versions = [], []

    def read(self, source, version):
        versions.append(version)
        spec = source if isinstance(source, WeightSpec) else directory(source)
        reader = WEIGHTS.make(spec.path, spec.settings)
        found.append({name: tensor.tolist() for name, tensor in reader.tensors()})

    monkeypatch.setattr(Session, "update_weights", read)
    for weights in ("directory", "shared_memory"):
        train(config, make_trainer, options={"weights": weights})
    assert found[:2] == found[2:]
    assert found[0] != found[1]
    assert versions == [1, 2] * 2  # those of the trainer's steps, also after a death
    assert "lm_head.weight" not in found[0]  # it is tied


@pytest.mark.parametrize("weights", ["directory", "shared_memory"])
def test_an_adapter_that_peft_trains_is_sent_as_one(config, make_trainer, tmp_path, monkeypatch, weights):
    peft = pytest.importorskip("peft")
    sent = []

    def read(self, source, version):
        store = WeightCopies()
        kept = store.keep(source if isinstance(source, WeightSpec) else directory(source), version)
        reader = WEIGHTS.make(kept.kept.path, kept.kept.settings)
        tensors = {name: tensor.clone() for name, tensor in reader.tensors()}
        sent.append(make_adapter(msgspec.to_builtins(kept.kept.adapter_config), tensors, {}))
        store.close(kept)

    monkeypatch.setattr(Session, "update_weights", read)
    lora = peft.LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj", "v_proj"])
    run = train(config, make_trainer, options={"weights": weights}, peft_config=lora)
    assert [each.rank for each in sent] == [2, 2]
    own = peft.get_peft_model_state_dict(run.trainer.accelerator.unwrap_model(run.trainer.model))
    assert own.keys() == sent[0].tensors.keys()
    before, after = (dict(each.tensors) for each in sent)
    assert any(not torch.equal(before[name], after[name]) for name in before)


def test_an_unknown_transport_of_weights_is_refused(config):
    with pytest.raises(ConfigError, match="weights is 'smoke'; it is 'directory' or 'shared_memory'"):
        SeerRollout(Session(config), weights="smoke")


def test_weights_that_cannot_be_written_end_training_with_the_place(config, make_trainer, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "seer_weights").symlink_to("/dev/full")
    with pytest.raises(OutputError, match=r"cannot write the weights to .*/out/seer_weights"):
        train(config, make_trainer)


def test_any_temperature_will_do_where_logprobs_do_not_count(config, make_trainer):
    run = train(config, make_trainer, max_steps=1, temperature=0.7, vllm_importance_sampling_correction=False)
    assert len(run.tokens[0]) == 12


def test_a_response_that_an_engine_failed_ends_training_by_name(config, make_trainer, monkeypatch):
    whole = Session.rollout

    def with_a_failure(self, records, iteration, **_):
        result = whole(self, records, iteration)
        failed = msgspec.structs.replace(result.completions[0], finish_reason="error")
        return msgspec.structs.replace(result, completions=[failed, *result.completions[1:]])

    monkeypatch.setattr(Session, "rollout", with_a_failure)
    with pytest.raises(EngineError, match=r"response train-0-0-\d/\d ended with 'error'"):
        train(config, make_trainer)
