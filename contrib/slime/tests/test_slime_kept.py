"""slime keeps its servers: the hook over those that its router lists, which are stand-ins here."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import seer_slime.rollout
import torch
from seer_host.off_switch import is_off
from seer_slime import generate_rollout
from seer_slime.engines import Engines, kept_config
from sglang_standin import experts_of, nucleus_of
from slime.rollout.base_types import call_rollout_fn

from seer_core.errors import ConfigError, EngineError, SeerError


def tokens(output):
    return [[sample.tokens for sample in group] for group in output.samples]


def samples_of(output):
    return [sample for group in output.samples for sample in group]


def test_batches_run_on_slimes_own_servers_divided_and_by_the_weights_that_slime_loads(kept, source, servers):
    args = kept(4)
    first = generate_rollout(args, 0, source)
    mine = [
        [each for each in server if each["sampling_params"]["max_new_tokens"] == 4]
        for server in servers.requests
    ]
    assert all(mine)
    assert len(first.samples) == 4
    servers.weights, servers.label = 1, "1"  # slime updates its servers while they are Seer's no more
    second = generate_rollout(args, 0, type(source)())
    assert tokens(second) != tokens(first)
    whole = generate_rollout(kept(256), 0, type(source)())
    assert tokens(whole) == tokens(second)


@pytest.mark.parametrize("groups", [1, 2])
def test_a_server_has_the_kv_of_all_its_groups_of_ranks_which_share_no_prompts(
    kept, source, servers, engines, groups
):
    servers.groups = groups
    generate_rollout(kept(4), 0, source)
    for info in engines[0].session.runtime.alive.values():
        assert (info.kv_capacity_tokens, info.shares_prompts) == (4096 * groups, groups == 1)


def test_off_is_slimes_own_function(kept, source, servers, own_client, monkeypatch, engines):
    monkeypatch.setenv("SEER", "off")
    output = call_rollout_fn(generate_rollout, kept(4), 3, source, evaluation=False)
    samples = [sample for group in output.samples for sample in group]
    assert len(own_client) == len(servers.routed) == len(samples) == 12
    assert all(sample.response_length == 16 for sample in samples)
    assert servers.requests[0] == servers.routed
    assert not engines
    monkeypatch.setenv("SEER", "of")
    with pytest.raises(ConfigError, match="set it to on or off"):
        is_off()


def test_where_seer_fails_slimes_own_client_goes_on_behind_the_tokens_so_far(
    kept, source, servers, own_client, breaking, engines
):
    breaking(20)  # of 12 responses in 4 chunks each
    args = kept(4)
    output = generate_rollout(args, 0, source)
    samples = [sample for group in output.samples for sample in group]
    assert output.metrics["rollout/seer/fallbacks"] == len(own_client) > 0
    went_on = [each for each in samples if each.metadata.get("seer_fallback")]
    assert len(went_on) == len(own_client)
    starts = [len(each.tokens) - len(each.rollout_log_probs) for each in own_client]
    prompt = len(samples[0].tokens) - 16
    assert max(starts) > prompt  # behind a chunk at least
    for sample in samples:
        assert sample.response_length == len(sample.rollout_log_probs) == len(sample.loss_mask) == 16
        assert sample.reward is not None
        assert sample.response[0] == " "  # behind the prompt
        assert sample.status == type(sample).Status.TRUNCATED
    after = generate_rollout(args, 1, source)  # the next rollout tries again
    assert after.metrics["rollout/seer/fallbacks"] == 0
    assert len(engines) == 2


def test_what_goes_on_without_seer_has_the_tokens_that_it_would_have_had_where_they_follow_from_seeds(
    kept, source, servers, own_client, breaking
):
    args = kept(4)
    whole = generate_rollout(args, 0, source)
    breaking(20)
    output = generate_rollout(args, 0, type(source)())
    assert output.metrics["rollout/seer/fallbacks"] > 0
    assert tokens(output) == tokens(whole)
    assert all(each["sampling_params"]["top_k"] > 1 << 20 for each in servers.routed)  # as Seer's own have
    path = Path(args.seer_config)
    path.write_text(path.read_text("utf-8").replace("exact", "distributed"), "utf-8")
    seer_slime.rollout.engines_of.cache_clear()
    servers.routed.clear()
    breaking(20)
    generate_rollout(args, 0, type(source)())
    assert {each["sampling_params"]["top_k"] for each in servers.routed} == {-1}  # as slime's own


def test_with_new_weights_in_mid_rollout_what_goes_on_without_seer_begins_anew(
    kept, source, servers, own_client, breaking
):
    args = kept(4)

    def load(number):
        servers.weights, servers.label = number, str(number)

    whole = []
    for number in (0, 1):
        load(number)
        whole.append(samples_of(generate_rollout(args, 0, type(source)())))
    load(0)
    breaking(20, lambda: load(1))
    for sample, *of_weights in zip(samples_of(generate_rollout(args, 0, source)), *whole, strict=True):
        number = int(sample.metadata.get("seer_fallback", False))
        assert sample.weight_versions == [str(number)]
        assert sample.tokens == of_weights[number].tokens
        assert sample.rollout_log_probs == pytest.approx(of_weights[number].rollout_log_probs)
    assert max(len(each["input_ids"]) for each in servers.routed) > len(sample.tokens) - 16


def test_samples_name_the_weights_as_slimes_servers_do(kept, source, servers, evaluation_set):
    args = kept(4)
    args.eval_datasets = [evaluation_set]
    for label in ("1", "2"):
        servers.label = label
        generate_rollout(args, 0, source, evaluation=True)
        for sample in samples_of(generate_rollout(args, 0, source)):
            assert sample.weight_versions == [label]


@pytest.mark.parametrize("fails", [False, True])
def test_samples_have_the_experts_that_slimes_servers_took_however_they_are_divided(
    kept, source, own_client, breaking, fails
):
    if fails:
        breaking(20)
    args = kept(4)
    args.use_rollout_routing_replay = True
    output = generate_rollout(args, 0, source)
    assert (output.metrics["rollout/seer/fallbacks"] > 0) == fails
    for group in output.samples:
        for sample in group:
            found = sample.rollout_routed_experts
            assert found.dtype in (np.int32, torch.int32)  # of slime's own client
            assert (np.asarray(found) == experts_of(sample.tokens)).all()


@pytest.mark.parametrize("fails", [False, True])
def test_samples_have_the_tokens_from_which_slimes_servers_drew_however_they_are_divided(
    kept, source, servers, own_client, breaking, fails
):
    if fails:
        breaking(20)
    args = kept(4)
    args.rollout_top_p = 0.9
    output = generate_rollout(args, 0, source)
    samples = [sample for group in output.samples for sample in group]
    written = [sample for sample in samples if sample.metadata.get("seer_fallback")]
    assert bool(written) == bool(own_client) == fails
    for sample in samples:
        ids, offsets = sample.rollout_top_p_token_ids, sample.rollout_top_p_token_offsets
        assert ids.dtype == offsets.dtype == torch.int32
        assert (ids.tolist(), offsets.tolist()) == nucleus_of(sample.tokens[-16:])
    assert all(each["sampling_params"]["max_new_tokens"] == 16 for each in servers.routed)


def test_servers_that_do_not_answer_the_tokens_from_which_they_draw_are_refused(kept, source, servers):
    servers.patched = False
    args = kept(4)
    generate_rollout(args, 0, source)
    args.rollout_top_p = 0.9
    with pytest.raises(ConfigError, match="slime's patch of SGLang"):
        generate_rollout(args, 1, source)


def test_some_responses_are_written_again_by_slimes_own_client_until_too_many_differ(
    kept, source, servers, own_client
):
    args = kept(4)
    args.seer_canary, args.seer_canary_stop = 3, 2
    counts = []
    for astray in (0, 1):
        servers.astray = astray
        output = generate_rollout(args, astray, source)
        counts.append([output.metrics[f"rollout/seer/canary_{name}"] for name in ("compared", "different")])
    assert counts == [[3, 0], [6, 3]]
    assert len(servers.routed) == len(own_client) == 6
    for each in servers.routed:
        assert each["sampling_params"]["max_new_tokens"] == 16
        assert len(each["input_ids"]) == 3
    output = generate_rollout(args, 2, source)  # slime's own
    assert len(own_client) == 6 + 12
    assert not any(name.startswith("rollout/seer/") for name in output.metrics or {})


def test_a_canary_is_refused_where_tokens_depend_on_chance(kept, source, args, engines, tmp_path):
    kept(4).seer_canary = 3
    args.seer_config = None
    with pytest.raises(ConfigError, match="seer_canary compares tokens, which depend on chance"):
        generate_rollout(args, 0, source)
    args.rollout_num_gpus = 0
    args.seer_config, args.debug_rollout_only = str(tmp_path / "seer-4.toml"), True
    args.rollout_temperature = 1.0
    with pytest.raises(ConfigError, match="seer_canary asks slime's own servers"):
        generate_rollout(args, 0, source)
    args.seer_canary = -1
    with pytest.raises(ConfigError, match="seer_canary is -1; it must be a number, 0 or more"):
        generate_rollout(args, 0, source)
    assert not engines


def test_no_more_responses_of_a_run_than_the_limit_are_written_without_seer(
    kept, source, own_client, breaking
):
    breaking(20)
    args = kept(4)
    args.seer_most_fallbacks = 1
    with pytest.raises(EngineError, match="1 responses of a run may be written without it"):
        generate_rollout(args, 0, source)
    assert not own_client


def test_a_scheduler_that_stalls_has_failed_after_a_while(kept, source, servers, own_client):
    args = kept(4)
    args.seer_stall_s = 0.5
    generate_rollout(args, 0, source)  # it works, and then its chunks are never answered
    servers.hold()
    output = generate_rollout(args, 1, source)
    assert output.metrics["rollout/seer/fallbacks"] == 12
    assert all(sample.metadata["seer_fallback"] for group in output.samples for sample in group)


@pytest.mark.parametrize("top_p", [1.0, 0.9])
def test_with_a_journal_a_failure_ends_the_rollout_which_goes_on_where_it_was(
    kept, source, own_client, breaking, engines, tmp_path, top_p
):
    args = kept(4)
    args.rollout_top_p = top_p
    undisturbed = generate_rollout(args, 0, source)
    breaking(20)
    args.seer_journal = str(tmp_path / "journal")
    with pytest.raises(SeerError, match="broken"):
        generate_rollout(args, 0, type(source)())
    engines[1].close()  # as its process ends
    seer_slime.rollout.engines_of.cache_clear()
    resumed = generate_rollout(args, 0, type(source)())
    assert tokens(resumed) == tokens(undisturbed)
    assert 0 < engines[2].session.result.summary.resumed_tokens < 12 * 16
    assert not own_client
    if top_p != 1:
        for sample in (sample for group in resumed.samples for sample in group):
            ids, offsets = sample.rollout_top_p_token_ids, sample.rollout_top_p_token_offsets
            assert (ids.tolist(), offsets.tolist()) == nucleus_of(sample.tokens[-16:])


def test_a_config_with_engines_is_refused(tmp_path):
    path = tmp_path / "seer.toml"
    path.write_text('[seer]\nengine = "sglang"\n', "utf-8")
    with pytest.raises(ConfigError, match="the engines are slime's"):
        kept_config(str(path), "http://127.0.0.1:1")
    assert kept_config(None, "http://127.0.0.1:1").seer.engines == ("remote",)


def test_engines_that_do_not_start_leave_the_journal_to_the_next_try(tmp_path):
    kept_errors = []  # and what their frames hold
    for _ in range(2):
        with pytest.raises(ConfigError, match="nowhere") as found:
            Engines(str(tmp_path / "nowhere.toml"), str(tmp_path / "journal"))
        kept_errors.append(found.value)
