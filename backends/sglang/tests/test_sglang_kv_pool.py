"""Real SGLangs, one plain and one that drafts and prefills in pieces, over a pool: KV moves, tokens stay."""

import json

import pytest

from seer_core.drafting import SourceSpec, StepTimes
from seer_core.model import Sampling

pytestmark = pytest.mark.engine
kv_local = pytest.importorskip("seer_kv_local", reason="plugins/kv_local is not installed")

GREEDY, PLAIN = Sampling(0.0), Sampling(1.0)
BLOCK = 16
BLOCK_BYTES = BLOCK * 4 * 2 * 2 * 32 * 4
TOKENS = 150


@pytest.fixture(scope="module")
def make_pool(loop):
    """Return a function that starts a pool for ``sglang-0`` and ``sglang-1``; all are stopped at the end."""
    pools = []

    def make(capacity_bytes):
        pools.append(kv_local.LocalPool(capacity_bytes))
        loop.run_until_complete(pools[-1].start(["sglang-0", "sglang-1"]))
        return pools[-1]

    yield make
    for pool in pools:
        loop.run_until_complete(pool.stop())


@pytest.fixture(scope="module")
def pool(make_pool):
    return make_pool(64 << 20)


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """The file from which the drafting instance drafts."""
    return tmp_path_factory.mktemp("texts") / "texts.json"


@pytest.fixture(scope="module")
def pair(start, models, pool, texts):
    """Two instances of the first model that share the pool."""
    spec = SourceSpec("sglang_sources:Knowing", {"texts": str(texts)}, 5, StepTimes((1,), (0,), ((0.001,),)))
    plain = start(models[0], kv_pool=pool)
    drafting = start(models[0], 1, spec, pool, max_batched_tokens=96)
    yield plain, drafting
    for each in (plain, drafting):
        each.run(each.engine.stop())


@pytest.fixture
def cold(pair, pool):
    """Let both instances and the pool forget everything."""
    for each in pair:
        each.run(each.engine.reset_cache())
    pair[0].run(pool.clear())


@pytest.fixture
def whole(roomy, texts, cold):
    """Return a function: responses of an instance without a pool, which are drafted from then on."""

    def whole(prompts, sampling, tokens):
        responses = roomy.whole(prompts, sampling, tokens)
        known = {seed: [*prompt, *responses[seed]] for seed, prompt in enumerate(prompts)}
        texts.write_text(json.dumps(known))
        return responses

    return whole


def moved(instances, prompts, sampling, tokens, chunk_tokens):
    """Return responses of which every chunk runs on the next instance, and all outputs by round."""
    responses, rounds = [[] for _ in prompts], []
    stopped = set()
    while len(stopped) < len(prompts):
        here = instances[len(rounds) % len(instances)]
        here.run(here.engine.reset_cache())  # so that nothing but the pool can help
        jobs = {
            i: here.job([*prompt, *responses[i]], min(chunk_tokens, tokens - len(responses[i])), i, sampling)
            for i, prompt in enumerate(prompts)
            if i not in stopped
        }
        outputs = here.run(here.chunks(list(jobs.values())))
        rounds.append(outputs)
        for (i, job), output in zip(jobs.items(), outputs, strict=True):
            assert output.cached_tokens + output.pool_tokens + output.prefilled_tokens == len(job.token_ids)
            responses[i] += output.token_ids
            if output.stopped or len(responses[i]) == tokens:
                stopped.add(i)
    return responses, rounds


@pytest.mark.parametrize(
    ("sampling", "chunk_tokens"), [(GREEDY, 40), (PLAIN, 64), (PLAIN, 17)], ids=["greedy", "plain", "short"]
)
def test_moved_at_every_chunk_equals_whole_and_computes_one_block_of_old_tokens_at_most(
    pair, whole, prompts, sampling, chunk_tokens
):
    expected = whole(prompts(6), sampling, TOKENS)
    responses, rounds = moved(pair, prompts(6), sampling, TOKENS, chunk_tokens)
    assert responses == expected
    assert len(rounds) == -(-TOKENS // chunk_tokens)
    for outputs in rounds[1:]:
        assert max(output.prefilled_tokens for output in outputs) <= BLOCK
        assert min(output.pool_tokens for output in outputs) >= BLOCK
