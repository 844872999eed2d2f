"""The hook, called as slime calls it, on simulated engines."""

import msgspec
import numpy as np
import pytest
import seer_slime.rollout
import slime_task
from safetensors.torch import save_file
from seer_session import Session
from seer_slime import generate_rollout
from slime.rollout.base_types import RolloutFnEvalOutput, RolloutFnTrainOutput, call_rollout_fn
from slime.utils.misc import load_function
from slime.utils.types import Sample

from seer_core.errors import ConfigError, EngineError, PromptError


def roll_out(args, source, rollout_id=0, evaluation=False):
    hook = load_function("seer_slime.generate_rollout")
    return call_rollout_fn(hook, args, rollout_id, source, evaluation=evaluation)


def tokens(output):
    return [[sample.tokens for sample in group] for group in output.samples]


def test_a_batch_comes_back_filled_and_scored_in_the_order_of_the_data(args, source, engines):
    output = roll_out(args, source)
    assert isinstance(output, RolloutFnTrainOutput)
    assert [[sample.index for sample in group] for group in output.samples] == [
        [3 * number + place for place in range(3)] for number in range(4)
    ]
    for number, group in enumerate(output.samples):
        for sample in group:
            assert sample.prompt == f"ring {number} ?"
            size = sample.response_length
            assert size == len(sample.loss_mask) == len(sample.rollout_log_probs) > 0
            assert len(sample.tokens) == 3 + size  # ring, a digit, a question mark
            assert sample.status in (Sample.Status.COMPLETED, Sample.Status.TRUNCATED)
            assert (sample.status is Sample.Status.TRUNCATED) == (size == 16)
            assert sample.reward == float(sum(sample.tokens) % 2)
            assert sample.weight_versions == ["0"]
            assert isinstance(sample.response, str)
            assert set(sample.loss_mask) == {1}
    groups = {each.group_id for each in engines[0].session.result.completions}
    seen = {name.removeprefix("rollout/seer/"): value for name, value in output.metrics.items()}
    assert (seen["failed_groups"], seen["fallbacks"]) == (0, 0)
    assert seen["requests"] == 12
    assert seen["tokens"] == sum(sample.response_length for group in output.samples for sample in group)
    assert seen["chunks"] >= 12
    assert 0 < seen["tail_time_s"] <= seen["total_time_s"]
    assert seen["throughput_tokens_per_s"] == pytest.approx(seen["tokens"] / seen["total_time_s"])
    assert seen["exactness"] == 2
    assert groups <= {f"0-{number}" for number in range(4)}
    assert len({str(sample.tokens[3:]) for group in output.samples for sample in group}) > 6


def test_tokens_follow_from_the_rollouts_id_under_any_scheduler(args, source, other_config):
    one, two = roll_out(args, source), roll_out(args, source, 1)
    again = type(source)()
    args.seer_config = str(other_config)
    assert tokens(roll_out(args, again)) == tokens(one)
    assert tokens(roll_out(args, again, 1)) == tokens(two)
    responses = [[ids[3:] for group in tokens(each) for ids in group] for each in (one, two)]
    assert responses[0] != responses[1]


def test_what_a_journal_has_of_a_rollout_is_not_computed_again(
    args, source, writing_config, engines, tmp_path
):
    args.seer_config, args.seer_journal = str(writing_config), str(tmp_path / "journal")
    first = tokens(roll_out(args, source))
    engines[0].close()
    load_function("seer_slime.rollout.engines_of").cache_clear()
    assert tokens(roll_out(args, type(source)())) == first
    summary = engines[1].session.result.summary
    assert summary.resumed_tokens == summary.tokens > 0


def test_groups_that_the_filter_drops_are_replaced(args, source):
    args.dynamic_sampling_filter_path = "slime_task.some_differ"
    output = roll_out(args, source)
    assert len(output.samples) == 4
    assert all(len({sample.reward for sample in group}) > 1 for group in output.samples)
    dropped = output.metrics["rollout/dynamic_filter/drop_all_equal"]
    assert 0 < dropped <= source.groups - 4
    assert output.metrics["rollout/seer/requests"] == 3 * source.groups  # of all its rollouts


def test_more_groups_than_a_batch_are_cut_by_their_order_and_not_by_their_speed(args, source):
    args.over_sampling_batch_size = 7
    output = roll_out(args, source)
    assert [group[0].group_index for group in output.samples] == [0, 1, 2, 3]


def test_rewards_of_whole_groups_hooks_and_filters_are_slimes(args, source):
    args.group_rm, args.custom_rm_path = True, "slime_task.rewards_of_group"
    args.rollout_sample_hook_path = ["slime_task.tag"]
    args.rollout_sample_filter_path = "slime_task.shorten"
    args.rollout_all_samples_process_path = "slime_task.look"
    slime_task.SEEN.clear()
    output = roll_out(args, source)
    assert [[sample.reward for sample in group] for group in output.samples] == [[0.0, 1.0, 2.0]] * 2
    assert all(sample.metadata["tagged"] for group in output.samples for sample in group)
    assert slime_task.SEEN == [4]


def test_a_reward_that_raises_ends_the_rollout(args, source):
    args.custom_rm_path = "slime_task.no_reward"
    with pytest.raises(ValueError, match="no idea"):
        roll_out(args, source)


def test_samples_have_the_experts_that_slime_replays(args, source, monkeypatch):
    args.use_rollout_routing_replay = True
    with pytest.raises(ConfigError, match="enable_return_routed_experts = true"):
        roll_out(args, source)
    monkeypatch.setattr(
        "seer_slime.rollout.routed_experts",
        lambda completion, prompt, _: np.zeros((prompt + len(completion.token_ids) - 1, 2, 4), np.uint16),
    )
    for group in roll_out(args, source, 1).samples:
        for sample in group:
            found = sample.rollout_routed_experts
            assert (found.shape, found.dtype) == ((len(sample.tokens) - 1, 2, 4), np.int32)


def test_engines_have_the_newest_weights_and_loaded_ones_are_deleted(args, source, tmp_path, engines):
    import torch

    def write(version):
        directory = tmp_path / "weights" / f"weight_v{version:06d}"
        directory.mkdir(parents=True)
        save_file({"a": torch.zeros(1)}, directory / "model.safetensors")

    args.debug_rollout_only = False
    with pytest.raises(ConfigError, match="has written no weights"):
        roll_out(args, source)
    write(1)
    assert roll_out(args, source).samples[0][0].weight_versions == ["1"]
    assert roll_out(args, source, 1).samples[0][0].weight_versions == ["1"]
    write(2)
    write(10)
    assert roll_out(args, source, 2).samples[0][0].weight_versions == ["10"]
    names = sorted(path.name for path in (tmp_path / "weights").iterdir())
    assert names == ["weight_v000002", "weight_v000010"]
    assert len(engines) == 1


def test_evaluation_has_the_same_seeds_each_time(args, source, evaluation_set):
    args.eval_datasets = [evaluation_set]
    output = roll_out(args, source, evaluation=True)
    assert isinstance(output, RolloutFnEvalOutput)
    found = output.data["held out"]
    assert [sample.index for sample in found["samples"]] == [0, 1, 2, 3]
    assert [sample.label for sample in found["samples"]] == ["a", "a", "b", "b"]
    assert found["rewards"] == [sample.reward for sample in found["samples"]]
    assert found["truncated"] == [sample.response_length == 12 for sample in found["samples"]]
    roll_out(args, source, 3)
    later = roll_out(args, source, 4, evaluation=True).data["held out"]
    assert [sample.tokens for sample in later["samples"]] == [sample.tokens for sample in found["samples"]]
    assert source.groups == 4


def test_an_evaluation_set_has_the_settings_of_all_where_it_has_none_of_its_own(
    args, source, evaluation_set, monkeypatch
):
    found = {}

    class Asked(Exception):
        pass

    def dataset(path, **settings):
        found.update(settings)
        raise Asked

    monkeypatch.setattr(seer_slime.rollout, "Dataset", dataset)
    args.eval_datasets, evaluation_set.apply_chat_template = [evaluation_set], None
    args.apply_chat_template, args.apply_chat_template_kwargs = True, {"enable_thinking": False}
    evaluation_set.multimodal_keys = {"image": "pictures"}
    monkeypatch.setattr(seer_slime.rollout, "processor_of", lambda *_, **__: "the model's")
    with pytest.raises(Asked):
        generate_rollout(args, 0, source, evaluation=True)
    assert (found["apply_chat_template"], found["apply_chat_template_kwargs"]) == (
        True,
        {"enable_thinking": False},
    )
    assert (found["multimodal_keys"], found["processor"]) == ({"image": "pictures"}, "the model's")


def test_engines_sleep_while_the_trainer_has_their_devices(args, source, engines):
    args.offload_rollout = True
    roll_out(args, source)
    assert engines[0].session.runtime.asleep
    assert len(roll_out(args, source, 1).samples) == 4


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("seer_config", None, "give --custom-config-path"),
        ("partial_rollout", True, "do not support --partial-rollout; leave it out"),
        ("custom_generate_function_path", "mine.generate", "do not support --custom-generate-function-path"),
        ("rollout_temperature", 0.8, "at temperature 0.8, top_p 1 and top_k 0"),
        ("rollout_top_k", 50, "at temperature 1, top_p 1 and top_k 50"),
    ],
)
def test_options_that_a_rollout_does_not_support_are_refused_before_engines_start(
    args, source, engines, option, value, message
):
    setattr(args, option, value)
    with pytest.raises(ConfigError, match=message):
        generate_rollout(args, 0, source)
    assert not engines


@pytest.mark.parametrize("evaluation", [False, True])
def test_stops_go_to_the_engines_which_may_not_have_them(args, source, evaluation_set, evaluation):
    args.eval_datasets = [evaluation_set]
    args.rollout_stop = ["\n"]  # also of an evaluation set that has none of its own
    with pytest.raises(PromptError, match="stop is not supported by this engine; leave it out"):
        roll_out(args, source, evaluation=evaluation)
    args.rollout_stop = evaluation_set.stop = None
    args.rollout_stop_token_ids, evaluation_set.min_new_tokens = [2], 10**6
    with pytest.raises(PromptError, match=r"stop_token_ids is not supported|min_tokens is 1000000"):
        roll_out(args, source, evaluation=evaluation)


@pytest.mark.parametrize(
    ("option", "value"), [("update_weight_transport", "nccl"), ("update_weight_disk_keep_files", False)]
)
def test_weights_that_would_not_stay_on_a_disk_are_refused(args, source, option, value):
    args.debug_rollout_only = False
    setattr(args, option, value)
    with pytest.raises(ConfigError, match="give --update-weight-mode full"):
        generate_rollout(args, 0, source)


def failing(of):
    """Return a stream in which responses of these groups fail."""
    whole = Session.stream

    def stream(self, *args, **options):
        for completion in whole(self, *args, **options):
            failed = completion.group_id in of and completion.index == 1
            yield msgspec.structs.replace(completion, finish_reason="error") if failed else completion

    return stream


def test_a_group_with_a_failed_response_is_replaced(args, source, monkeypatch):
    monkeypatch.setattr(Session, "stream", failing({"0-1", "0-5"}))
    output = roll_out(args, source)
    assert [group[0].group_index for group in output.samples] == [0, 2, 3, 4]
    assert output.metrics["rollout/seer/failed_groups"] == 2


def test_if_all_groups_fail_the_rollout_ends(args, source, monkeypatch):
    monkeypatch.setattr(Session, "stream", failing({f"0-{number}" for number in range(4)}))
    with pytest.raises(EngineError, match="in every group of slime's batch a response has failed"):
        roll_out(args, source)
