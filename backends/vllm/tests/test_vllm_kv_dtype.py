"""The dtype of KV: instances share none of another dtype, though weights and sizes are alike."""

import json

import pytest
from safetensors.torch import load_file, save_file

from backends.conftest import write_model
from seer_core.errors import EngineError
from seer_core.model import Sampling

pytest.importorskip("seer_kv_local", reason="backends/kv_local is not installed")
pytestmark = pytest.mark.engine

GOING_ON = Sampling(1.0, ignore_eos=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Return a model whose weights float16 and bfloat16 hold alike, so that fingerprints cannot differ."""
    path = write_model(tmp_path_factory.mktemp("models") / "model", 1)
    weights = {name: each.bfloat16().float() for name, each in load_file(path / "model.safetensors").items()}
    least = 2**-14  # of float16
    weights = {name: each.where(each.abs() >= least, 0) for name, each in weights.items()}
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    return path


def test_instances_whose_kv_has_another_dtype_share_none_of_it(start, make_pool, model, prompts):
    pool = make_pool(16 << 20)
    first = start(model, kv_pool=pool, dtype="bfloat16")
    other = start(model, None, pool, 1, dtype="float16")
    assert first.info.fingerprint == other.info.fingerprint
    assert first.info.kv_bytes_per_token == other.info.kv_bytes_per_token
    [prompt] = prompts(1, 150)
    [begun] = first.run(first.chunks([first.job(prompt, 64, 0, GOING_ON)]))
    text = [*prompt, *begun.token_ids]
    assert pool.stats().used_bytes > 0
    [then] = other.run(other.chunks([other.job(text, 60, 0, GOING_ON)]))
    other.run(other.engine.reset_cache())
    first.run(pool.clear())
    [alone] = other.run(other.chunks([other.job(text, 60, 0, GOING_ON)]))
    assert (then.pool_tokens, then.token_ids) == (0, alone.token_ids)
    assert first.info.kv_kind != other.info.kv_kind
    for each in (first, other):
        each.run(each.engine.stop())
        each.used_up = True


@pytest.mark.parametrize(
    ("dtype", "fact"),
    [
        ("fp8_e4m3", "has no proof of equal tokens on a CPU"),
        ("turboquant_k8v4", "tokens depend on where chunks"),
    ],
)
def test_kv_of_fewer_bits_that_may_change_tokens_is_refused_by_name(start, model, dtype, fact):
    match = rf"did not start: .*'{dtype}'.* {fact}.*: take kv_cache_dtype out of \[engine.vllm\].engine_args"
    with pytest.raises(EngineError, match=match):
        start(model, engine_args={"kv_cache_dtype": dtype})


KINDS = """
import json
from types import SimpleNamespace

import torch
from seer_vllm.parts import parts_of
from seer_vllm.routing import WITH_EXPERTS
from vllm.config import KVTransferConfig
from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec

def kind(cache_dtype, dtype, ranks=1, skipped=(), state=None, experts=False):
    model = SimpleNamespace(use_mla=False, get_total_num_kv_heads=lambda: 2)
    cache = SimpleNamespace(cache_dtype=cache_dtype, kv_cache_dtype_skip_layers=[*skipped])
    config = SimpleNamespace(
        model_config=model,
        cache_config=cache,
        parallel_config=SimpleNamespace(tensor_parallel_size=ranks),
        kv_transfer_config=KVTransferConfig(kv_connector_extra_config={WITH_EXPERTS: experts}),
    )
    specs = [FullAttentionSpec(block_size=32, num_kv_heads=2 // ranks, head_size=32, dtype=dtype)]
    if state is not None:
        specs.append(MambaSpec(block_size=32, shapes=((2, 2),), dtypes=(state,)))
    return parts_of(config, specs).kind

eight = torch.uint8
print(json.dumps([
    kind("auto", torch.bfloat16),
    kind("auto", torch.float16, 2),
    kind("auto", torch.bfloat16, state=torch.float32),
    kind("fp8_e4m3", eight),
    kind("fp8_e5m2", eight),
    kind("fp8_e5m2", eight, skipped=["0"]),
    kind("auto", torch.bfloat16, experts=True),
]))
"""


def test_formats_of_eight_bits_and_blocks_with_experts_are_kinds_of_their_own(make_fleet, model, run_in_fork):
    [*_, last] = run_in_fork(make_fleet(model).engines[0], KINDS)
    assert json.loads(last) == [
        "vllm-bfloat16",
        "vllm-tp2-float16",
        "vllm-bfloat16-float32",
        "vllm-fp8_e4m3-uint8",
        "vllm-fp8_e5m2-uint8",
        "vllm-fp8_e5m2-uint8-0",
        "vllm-bfloat16-experts",
    ]
