"""Routed experts of vLLM: those that the model chooses for the same text, however a rollout is divided.

The second model runner runs here in Triton's interpreter (``interpreter/sitecustomize.py``).
"""

import json

import numpy as np
import pytest

pytest.register_assert_rewrite("backends.tests.routed")

from seer_host.routed_experts import ROUTED_EXPERTS  # noqa: E402
from seer_testing.families import VOCABULARY, write_family  # noqa: E402

from backends.tests.families import TOKENIZER  # noqa: E402
from backends.tests.routed import choice_of, joined  # noqa: E402
from seer_core.errors import EngineError  # noqa: E402
from seer_core.model import Sampling  # noqa: E402
from seer_core.ports.drafting import SourceSpec, StepTimes  # noqa: E402
from seer_core.ports.weights import directory  # noqa: E402

pytestmark = pytest.mark.engine

DRAWN = Sampling(1.0, ignore_eos=True)
BLOCK = 32
TOKENS = 24
ASKED = {"max_model_tokens": 160, "engine_args": {"enable_return_routed_experts": True}}
FEW = {"kv_cache_bytes": 1 << 20, "max_batched_tokens": 64}


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    return write_family(tmp_path_factory.mktemp("mixture") / "model", "Qwen3-MoE", 1, TOKENIZER)


@pytest.fixture(scope="module")
def chosen(mixture):
    """A function: the experts that transformers' model chooses for a text but its last token."""
    return choice_of(mixture)


@pytest.fixture(scope="module")
def texts(prompts):
    return [[token % VOCABULARY for token in prompt] for prompt in prompts(8, tokens=116)]


@pytest.fixture(scope="module")
def asked(start_second, mixture, pool):
    """An instance that answers experts, and shares its KV."""
    return start_second(mixture, None, pool, **ASKED)


@pytest.fixture(scope="module")
def whole(asked, texts, chosen, moved):
    """The responses, and their experts, which are those that the model chooses."""
    responses, rounds = moved([asked], texts, DRAWN, TOKENS, TOKENS)
    experts = joined(rounds)
    expect_chosen(chosen, texts, responses, experts)
    return responses, experts


def expect_chosen(chosen, texts, responses, experts):
    """Check that the experts of every position are those that a model chooses."""
    assert responses
    for prompt, response, found in zip(texts[: len(responses)], responses, experts, strict=True):
        assert (np.sort(found, axis=2) == chosen([*prompt, *response])).all()


def expect_the_same(whole, responses, rounds):
    """Check the tokens of responses, and the experts of every position."""
    assert responses == whole[0]
    for found, expected in zip(joined(rounds), whole[1], strict=True):
        assert found.shape == expected.shape
        assert (found == expected).all()


def test_one_byte_for_each_layer_and_expert_from_the_first_position_on(asked, whole, texts):
    part = asked.run(asked.chunks([asked.job(texts[0], 3, 0, DRAWN)]))[0].attachments[ROUTED_EXPERTS]
    assert part["start"] == 0
    assert part["shape"] == [len(texts[0]) + 2, 2, 2]
    assert part["bytes"] == 1


def test_chunks_that_go_on_in_the_cache_and_prompts_found_there_have_the_same(asked, whole, texts, moved):
    asked.run(asked.engine.reset_cache())
    responses, rounds = moved([asked], texts, DRAWN, TOKENS, 10, cold=False)
    expect_the_same(whole, responses, rounds)
    assert len(rounds) == 3
    assert min(output.cached_tokens for outputs in rounds[1:] for output in outputs) >= 3 * BLOCK
    responses, rounds = moved([asked], texts, DRAWN, TOKENS, TOKENS, cold=False)
    expect_the_same(whole, responses, rounds)
    assert min(output.cached_tokens for output in rounds[0]) == 3 * BLOCK


@pytest.fixture(scope="module")
def other(start_second, mixture, pool, notes):
    """Another instance, with KV for few, that drafts and prefills in pieces."""
    source = SourceSpec(
        "draft_sources:Scripted", {"notes": str(notes)}, 4, StepTimes((1,), (0,), ((0.001,),))
    )
    other = start_second(mixture, source, pool, 1, **ASKED, **FEW)
    other.group = "mixed"
    return other


@pytest.fixture
def drafts(whole, notes):
    """Drafts of which some tokens are wrong."""
    (notes / "answers.json").write_text(json.dumps(whole[0], default=list))


def test_they_come_from_the_pool_with_kv_and_are_of_accepted_drafts(
    asked, other, whole, drafts, texts, moved, pool
):
    asked.run(pool.clear())
    responses, rounds = moved([asked, other], texts, DRAWN, TOKENS, 8)
    expect_the_same(whole, responses, rounds)
    assert min(output.pool_tokens for outputs in rounds[1:] for output in outputs) >= 3 * BLOCK
    accepted = [sum(output.accepted_at) for output in rounds[1]]
    drafted = [sum(output.drafted_at) for output in rounds[1]]
    assert 0 < sum(accepted) < sum(drafted)
    # The first chunks of these find their prompts in the pool.
    responses, rounds = moved([other], texts, DRAWN, TOKENS, TOKENS)
    expect_the_same(whole, responses, rounds)
    assert min(output.pool_tokens for output in rounds[0]) >= 3 * BLOCK


def test_those_of_a_preempted_chunk_are_of_the_first_time(other, whole, texts, moved, pool):
    other.run(pool.clear())
    other.outputs.clear()
    other.group = "nothing"  # with drafts the first chunks end before the last ones need their fifth block
    responses, rounds = moved([other], texts, DRAWN, TOKENS, TOKENS)
    expect_the_same(whole, responses, rounds)
    assert any(output.preemptions for output in other.outputs.values())


def test_steps_that_are_planned_ahead_and_moves_without_a_pool_change_none_and_weights_do(
    start_second, mixture, whole, texts, moved, tmp_path
):
    ahead = start_second(mixture, instance="planning_ahead:Ahead", **ASKED)
    responses, rounds = moved([ahead], texts, DRAWN, TOKENS, 12)
    expect_the_same(whole, responses, rounds)
    assert not any(output.pool_tokens for outputs in rounds for output in outputs)
    new = write_family(tmp_path / "model", "Qwen3-MoE", 2, TOKENIZER)
    ahead.weight_version += 1
    ahead.run(ahead.engine.update_weights(directory(new), ahead.weight_version))
    responses, rounds = moved([ahead], texts[:2], DRAWN, TOKENS, TOKENS)
    expect_chosen(choice_of(new), texts, responses, joined(rounds))
    ahead.run(ahead.engine.stop())


def test_it_is_refused_where_the_second_runner_does_not_work(start, mixture):
    with pytest.raises(EngineError, match=r"only vLLM's second model runner returns the experts .* or a GPU"):
        start(mixture, **ASKED)
