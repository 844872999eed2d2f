"""Models whose KV is in several groups: what fits, short of it, over a pool, and on two ranks."""

import pytest
from msgspec import structs
from seer_testing.families import FAMILIES, VOCABULARY, write_family

from seer_core.errors import EngineError
from seer_core.model import Sampling

pytest.register_assert_rewrite("backends.tests.families")
pytest.importorskip("seer_kv_local", reason="backends/kv_local is not installed")

from backends.tests.families import TOKENIZER  # noqa: E402
from backends.tests.turns_in_pools import released, stored  # noqa: E402

pytestmark = pytest.mark.engine

GOING_ON = Sampling(1.0, ignore_eos=True)
BLOCK = 32
BLOCK_BYTES = BLOCK * 2 * 2 * 32 * 4
"""Of Gemma-3, each of whose four layers is a group."""


def texts(prompts, count, tokens=40):
    return [[token % VOCABULARY for token in prompt] for prompt in prompts(count, tokens)]


def test_what_an_instance_reports_fits_and_beyond_it_a_pool_keeps_windows_of_what_is_preempted(
    start, make_pool, tmp_path, prompts, moved
):
    model = write_family(tmp_path, "Gemma-3", 1, TOKENIZER)
    few = {"max_model_tokens": 512, "max_batched_tokens": 64, "max_running": 8}
    pool = make_pool(4 << 20)
    tight = [start(model, None, pool, index, kv_cache_bytes=90 * BLOCK_BYTES, **few) for index in range(2)]
    roomy = start(model, kv_cache_bytes=900 * BLOCK_BYTES, **few)
    info = tight[0].info
    assert info.kv_capacity_tokens < 89 * BLOCK  # which is what full attention alone could have
    long = info.kv_capacity_tokens // 4 - BLOCK
    fitting = texts(prompts, 4)
    assert tight[0].whole(fitting, GOING_ON, long - 50) == roomy.whole(fitting, GOING_ON, long - 50)
    assert not any(output.preemptions for output in tight[0].outputs.values())

    many = texts(prompts, 8)
    expected = roomy.whole(many, GOING_ON, 250)
    assert tight[1].whole(many, GOING_ON, 250) == expected
    assert any(output.preemptions for output in tight[1].outputs.values())
    responses, rounds = moved(tight, many, GOING_ON, 250, 70)
    assert responses == expected
    assert sum(output.pool_tokens for outputs in rounds[1:] for output in outputs) > 0


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.long)])
def test_states_and_attention_move_with_a_pool(start, make_pool, tmp_path, prompts, moved, ranks):
    name = "Qwen3.5"
    model = write_family(tmp_path, name, 1, TOKENIZER)
    pool = make_pool(64 << 20)
    settings = {"dtype": FAMILIES[name].dtype, "tensor_parallel": ranks, "kv_cache_bytes": 16 << 20}
    pair = [start(model, None, pool, index, **settings) for index in range(2)]
    assert {each.info.exactness for each in pair} == {"exact"}
    block = pair[0].info.block_tokens
    some = [text[: block + 1] for text in texts(prompts, 2 * ranks, block + 1)]
    expected = pair[0].whole(some, GOING_ON, (1 + ranks) * block)
    responses, rounds = moved(pair, some, GOING_ON, (1 + ranks) * block, block)
    assert responses == expected
    for number, outputs in enumerate(rounds[1:], 2):
        assert {output.pool_tokens for output in outputs} == {number * block}
        assert {output.prefilled_tokens for output in outputs} == {1}


def test_states_of_what_is_preempted_move_with_a_pool(start, make_pool, tmp_path, prompts, moved):
    name, pool = "Qwen3.5", make_pool(32 << 20)
    model = write_family(tmp_path, name, 1, TOKENIZER)
    settings = {"dtype": FAMILIES[name].dtype, "max_model_tokens": 640, "max_running": 8}
    roomy = start(model, kv_cache_bytes=64 << 20, **settings)
    block = roomy.info.block_tokens
    few = 46 * block * roomy.info.kv_bytes_per_token
    tight = [start(model, None, pool, index, kv_cache_bytes=few, **settings) for index in range(2)]
    many = texts(prompts, 6, block + 5)
    tokens = min(600, 4 * block) - block - 5
    expected = roomy.whole(many, GOING_ON, tokens)
    assert tight[0].whole(many, GOING_ON, tokens) == expected
    outputs = tight[0].outputs.values()
    assert any(output.preemptions for output in outputs)
    responses, rounds = moved(tight, many, GOING_ON, tokens, 2 * block)
    assert responses == expected
    assert any(output.preemptions for outputs in rounds for output in outputs)
    assert any(output.pool_tokens for output in rounds[1])


@pytest.mark.parametrize(
    "name",
    ["Qwen3.5", *(pytest.param(each, marks=pytest.mark.long) for each in ("Qwen3-Next", "Qwen3.5-MoE"))],
)
def test_neither_a_steps_budget_nor_a_move_changes_what_states_lead_to(start, tmp_path, prompts, moved, name):
    model = write_family(tmp_path, name, 1, TOKENIZER)
    settings = {"dtype": FAMILIES[name].dtype, "kv_cache_bytes": 64 << 20, "max_model_tokens": 640}
    pair = [
        start(model, None, None, index, max_batched_tokens=budget, **settings)
        for index, budget in enumerate((2048, 200))
    ]
    assert {each.info.exactness for each in pair} == {"exact"}
    # The second prefills most of these in pieces, which end where the others leave room.
    many = [text for tokens in (1, 70, 131, 300, 490) for text in texts(prompts, 2, tokens)]
    expected = pair[0].whole(many, GOING_ON, 60)
    assert pair[1].whole(many, GOING_ON, 60) == expected
    assert pair[1].whole(many[:3], GOING_ON, 60) == expected[:3]
    responses, rounds = moved(pair, many, GOING_ON, 60, 25)
    assert responses == expected
    assert sum(output.prefilled_tokens for output in rounds[1]) > 25 * len(many)


def test_states_of_older_places_are_dropped_and_all_blocks_with_the_end(start, make_pool, tmp_path, prompts):
    name, pool = "Qwen3.5", make_pool(16 << 20)
    model = write_family(tmp_path, name, 1, TOKENIZER)
    settings = {"dtype": FAMILIES[name].dtype, "max_model_tokens": 640, "max_running": 8}
    a, b = (start(model, None, pool, index, kv_cache_bytes=1 << 20, **settings) for index in (0, 1))
    # A block of attention is as large as a state, whose values have two or four bytes by the CPU.
    block_bytes = a.info.block_tokens * a.info.kv_bytes_per_token
    a.group = b.group = "one response"
    [prompt] = texts(prompts, 1)
    text, block = list(prompt), a.info.block_tokens

    def count(of):
        return of(pool, "vllm-0", block_bytes)

    there, gone = count(stored), count(released)
    kept = []
    for here, tokens, last in ((a, 2 * block, False), (b, block, False), (a, 20, True)):
        here.run(here.engine.reset_cache())
        job = here.job(text, tokens, 5, GOING_ON)
        [output] = here.run(here.chunks([structs.replace(job, prompt_tokens=len(prompt), last=last)]))
        text += output.token_ids
        kept.append(count(stored) - there - (count(released) - gone))
    # Blocks of attention, and three states of the last place.
    assert kept == [2 + 3, 3 + 3, 0]


@pytest.mark.parametrize("name", ["Falcon-H1", pytest.param("Nemotron-H", marks=pytest.mark.long)])
def test_mamba_2_is_refused_by_name(start, tmp_path, name):
    model = write_family(tmp_path, name, 1, TOKENIZER)
    with pytest.raises(EngineError, match="did not start: vLLM's build for CPUs cannot compute Mamba-2"):
        start(model)
