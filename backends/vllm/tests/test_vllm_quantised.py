"""Quantised models: tokens however they are made, and updates by plain weights and by adapters."""

import asyncio
import json
import os

import pytest
from seer_journal import DiskJournal
from seer_testing.families import FAMILIES, VOCABULARY, write_family

from backends.tests.families import TOKENIZER
from backends.tests.family_rollouts import killing, moving, tokens_of, undivided
from backends.tests.peft_files import RANK, adapter_of, merged, save
from backends.vllm.tests.test_vllm_adapters import scores, update
from bench.models import TECHNIQUES, FamilyRun
from seer_core.errors import EngineError
from seer_core.model import Sampling
from seer_core.ports.drafting import SourceSpec, StepTimes
from seer_core.ports.weights import directory
from tests.support.eventually import aeventually

pytestmark = pytest.mark.engine

DRAWN_TO_END = Sampling(1.0)
GREEDY, DRAWN = Sampling(0.0, ignore_eos=True), Sampling(1.0, ignore_eos=True)
BLOCK = 32
TOKENS = 130


def test_tokens_are_the_same_whole_alone_in_chunks_moved_through_a_pool_and_drafted(
    start, models, make_pool, notes, prompts, moved
):
    pool, form = make_pool(32 << 20), "fp8_per_channel"
    settings = {"dtype": "bfloat16", "engine_args": {"quantization": form}}
    source = SourceSpec(
        "draft_sources:Scripted", {"notes": str(notes)}, 5, StepTimes((1,), (0,), ((0.001,),))
    )
    a = start(models[0], kv_pool=pool, **settings)
    b = start(models[0], source, pool, 1, **settings)
    assert a.info.quantization == b.info.quantization == form
    asked = [[token % VOCABULARY for token in prompt] for prompt in prompts(5, 70)]
    for sampling in (GREEDY, DRAWN):
        b.group = "nothing"
        expected = a.whole(asked, sampling, TOKENS)
        assert a.alone(asked, sampling, TOKENS) == b.whole(asked, sampling, TOKENS) == expected
        assert a.divided(asked, sampling, TOKENS, 17) == expected
        a.run(pool.clear())
        (notes / "answers.json").write_text(json.dumps(expected, default=list))
        b.group = "mixed"
        responses, rounds = moved((a, b), asked, sampling, TOKENS, 40)
        assert responses == expected
        assert min(output.pool_tokens for outputs in rounds[1:] for output in outputs) >= 2 * BLOCK
        assert any(sum(output.accepted_at) for outputs in rounds for output in outputs)
    for each in (a, b):
        each.run(each.engine.stop())
        each.used_up = True


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "form", "settings"),
    [
        ("Qwen3", "fp8_per_channel", {"dtype": "bfloat16"}),
        ("Qwen2-VL", "fp8_per_channel", {"dtype": "bfloat16"}),
        ("Qwen3, eight bits", "compressed-tensors", {}),
    ],
)
def test_responses_of_a_quantised_model_are_the_same_moved_killed_and_resumed(tmp_path, name, form, settings):
    run = FamilyRun("vllm", name, tmp_path)
    run.block_tokens = 32
    if form != "compressed-tensors":
        settings = settings | {"engine_args": {"quantization": form}}
    records = run.records() if FAMILIES[name].vision is None else run.pictured()
    plugins = (*TECHNIQUES, "grouped_spec")

    async def respond():
        async with run.started("local", plugins, **settings) as runtime:
            groups = runtime.groups(records, iteration=0)
            await runtime.use(undivided(run, runtime))
            whole = await runtime.rollout(groups).wait()
            await runtime.reset_caches()
            # At most 8 chunks are out then, and 8 were firsts: 8 moves are done.
            await runtime.use(moving(run, runtime, plugins, [(24, killing(runtime, "vllm-1"))]))
            with DiskJournal(tmp_path / "journal") as journal:
                moved = await runtime.rollout(groups, journal=journal).wait()
            await aeventually(lambda: len(runtime.alive) == 2)
            [file] = (tmp_path / "journal").iterdir()
            os.truncate(file, file.stat().st_size * 2 // 3)
            with DiskJournal(tmp_path / "journal") as journal:
                resumed = await runtime.rollout(groups, journal=journal).wait()
            return whole, moved, resumed

    whole, moved, resumed = asyncio.run(asyncio.wait_for(respond(), 900))
    assert moved.summary.instances_lost == 1
    assert moved.summary.migrations >= 8
    assert moved.summary.pool_tokens > 0
    assert {len(each.chunks) for each in whole.completions} == {1}
    assert tokens_of(moved) == tokens_of(whole)
    assert 0 < resumed.summary.resumed_tokens < sum(map(len, tokens_of(whole).values()))
    assert tokens_of(resumed) == tokens_of(whole)
    for each in (whole, moved, resumed):
        assert each.summary.quantization == [form]


def test_a_model_that_vllm_quantises_takes_plain_weights_and_adapters_and_is_called_quantised(
    start, models, prompts, tmp_path
):
    settings = {"dtype": "bfloat16", "engine_args": {"quantization": "fp8_per_channel"}}
    asked, tensors = prompts(3), adapter_of(models[1], 4)
    updated, fresh = start(models[0], **settings), start(models[1], **settings)
    assert updated.info.quantization == fresh.info.quantization == "fp8_per_channel"
    named = {"dtype": "bfloat16", "engine_args": {"quantization": "int8_per_channel_weight_only"}}
    assert start(models[0], **named).info.quantization == ""  # vLLM leaves dense layers as they are
    update(updated, directory(models[1]))
    tokens, logprobs = scores(updated, asked, 20)
    expected = scores(fresh, asked, 20)
    assert tokens == expected[0]
    assert (logprobs == expected[1]).all()
    update(updated, merged(tmp_path / "merged", models[1], tensors))
    update(fresh, save(tmp_path / "adapter", tensors))
    found = scores(fresh, asked, 20)
    assert found[0] == scores(updated, asked, 20)[0] != tokens
    for each in (updated, fresh):
        each.run(each.engine.stop())
        each.used_up = True


@pytest.mark.parametrize(
    ("form", "fact"),
    [
        ("fp8", "static_scaled_fp8_quant"),
        pytest.param("fp8_per_tensor", "static_scaled_fp8_quant", marks=pytest.mark.long),
        pytest.param("fp8_per_block", "Failed to find a kernel", marks=pytest.mark.long),
        pytest.param("mxfp8", "Failed to find a kernel", marks=pytest.mark.long),
        ("no_such_format", "Unknown quantization method"),
    ],
)
def test_a_format_that_does_not_run_on_a_cpu_is_refused_by_name_in_one_sentence(start, models, form, fact):
    with pytest.raises(EngineError) as refused:
        start(models[0], dtype="bfloat16", engine_args={"quantization": form})
    [sentence, *_] = str(refused.value).splitlines()
    assert f"did not start: vLLM does not start with quantization = '{form}' here: " in sentence
    assert fact in sentence
    assert "on a CPU it quantises dense models by fp8_per_channel" in sentence


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "form", "room"), [("Qwen3, eight bits", "", RANK), ("Qwen3-MoE", "fp8_per_channel", 0)]
)
def test_a_quantised_model_of_another_kind_is_refused_by_name(start, tmp_path, name, form, room):
    model = write_family(tmp_path / "model", name, 1, TOKENIZER)
    settings = {"dtype": "bfloat16", "engine_args": {"quantization": form}} if form else {}
    named = form or "compressed-tensors' and adapters beside the model here: .*; lora_rank out"
    with pytest.raises(EngineError, match=f"vLLM does not start with quantization = '{named}"):
        start(model, lora_rank=room, **settings)


@pytest.mark.long
def test_an_adapter_beside_a_model_that_vllm_quantises_writes_the_same_in_chunks_and_moved(
    start, models, make_pool, prompts, moved, tmp_path
):
    settings = {"dtype": "bfloat16", "engine_args": {"quantization": "fp8_per_channel"}, "lora_rank": 8}
    pool, asked = make_pool(32 << 20), prompts(4)
    pair = [start(models[0], None, pool, at, **settings) for at in range(2)]
    before = scores(pair[0], asked)[0]
    spec = save(tmp_path / "adapter", adapter_of(models[0], 1))
    [fingerprint] = {update(each, spec) for each in pair}
    assert fingerprint != pair[0].info.fingerprint
    whole = scores(pair[0], asked)[0]
    assert whole != before
    assert pair[0].divided(asked, DRAWN_TO_END, 60, 17) == whole
    responses, rounds = moved(pair, asked, DRAWN_TO_END, 60, 32)
    assert responses == whole
    assert sum(output.pool_tokens for output in rounds[1]) > 0
    for each in pair:
        each.run(each.engine.stop())
        each.used_up = True
