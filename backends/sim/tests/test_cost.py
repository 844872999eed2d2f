"""The cost model: what a step of each preset is bound by."""

import msgspec
import pytest
from seer_sim.drafts import Class, Drafts
from seer_sim.presets import PRESETS

QWEN, MOONLIGHT, KIMI = (PRESETS[f"h800-{name}"] for name in ("qwen2-vl-72b-tp8", "moonlight", "kimi-k2"))


def test_sizes_are_those_of_the_model_cards():
    assert QWEN.kv_bytes_per_token == 320 * 1024
    assert MOONLIGHT.kv_bytes_per_token == 31_104
    assert KIMI.kv_bytes_per_token == 70_272
    assert MOONLIGHT.weight_bytes + MOONLIGHT.expert_bytes == 32e9
    # 1 TB of fp8, of which 32 GPUs hold what is no routed expert each for itself.
    assert KIMI.expert_bytes + KIMI.weight_bytes / 32 == pytest.approx(1.025e12, rel=0.01)


@pytest.mark.parametrize("cost", [MOONLIGHT, KIMI])
def test_the_more_positions_the_more_experts_are_read(cost):
    cost = msgspec.structs.replace(cost, position_s=0)
    plain_s = cost.overhead_s + cost.weight_bytes / cost.bytes_per_s / cost.bandwidth_efficiency
    all_s = cost.expert_bytes / cost.bytes_per_s / cost.bandwidth_efficiency
    assert cost.pass_s(1) - plain_s == pytest.approx(all_s * cost.expert_share)
    # Two positions choose the same expert with the chance of one.
    assert cost.pass_s(2) - plain_s == pytest.approx(all_s * (2 - cost.expert_share) * cost.expert_share)
    assert cost.pass_s(200) - plain_s == pytest.approx(all_s, rel=0.02)


def test_a_dense_model_reads_all_weights_for_one_position():
    cost = msgspec.structs.replace(QWEN, position_s=0)
    reading_s = 146e9 / (cost.bytes_per_s * cost.bandwidth_efficiency)
    assert cost.pass_s(1) == cost.pass_s(50) == cost.overhead_s + reading_s
    computing_s = 1000 * 2 * 72.7e9 / (cost.flops_per_s * cost.compute_efficiency)
    assert cost.pass_s(1000) == cost.overhead_s + computing_s


def test_positions_requests_and_samples_take_time_each():
    bare = msgspec.structs.replace(QWEN, position_s=0, request_s=0, sampled_s=0)
    more_s = 300 * QWEN.position_s + 100 * QWEN.request_s + 200 * QWEN.sampled_s
    assert QWEN.pass_s(300, 100, 200) == pytest.approx(bare.pass_s(300) + more_s)


def test_a_step_that_drafts_takes_longer_however_few_draft():
    drafts = Drafts(step_s=0.01, request_s=1e-3)
    assert drafts.seconds([Class(2, 3, 100.0), Class(5, 0, 100.0)]) == (0.012, 0.0)
    assert drafts.seconds([Class(5, 0, 100.0)]) == (0.0, 0.0)
    half = [Class(1, 3, 100.0, idle=0.5)]
    assert drafts.seconds([*half, *half]) == (pytest.approx(0.0095), 0.0)


def test_verifying_reads_grouped_kv_once_but_computes_latent_attention_again():
    # 8 heads share their KV in Qwen2-VL, all 64 in Kimi-K2: with as many FLOPs per byte, a few positions
    # are bound by computing.
    assert QWEN.attention_s(9) == QWEN.attention_s(1)
    assert KIMI.attention_s(9) > 2 * KIMI.attention_s(1)
    assert KIMI.attention_s(18) == pytest.approx(2 * KIMI.attention_s(9))


def test_prefill_is_quadratic_in_a_long_context_and_reads_it_at_least_once():
    assert QWEN.prefill_attention_s(0, 40_000) == pytest.approx(100 * QWEN.prefill_attention_s(0, 4000))
    assert QWEN.prefill_attention_s(40_000, 1) == 40_001 * QWEN.attention_s(1)
    halves = QWEN.prefill_attention_s(0, 4000) + QWEN.prefill_attention_s(4000, 4000)
    assert halves == pytest.approx(QWEN.prefill_attention_s(0, 8000))
