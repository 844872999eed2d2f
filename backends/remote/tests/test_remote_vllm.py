"""Stock ``vllm serve`` processes as Seer's engines."""

from __future__ import annotations

import json
import os
import signal
import urllib.request
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest
from seer_grouped_spec.plugin import Settings as DraftSettings
from seer_grouped_spec.plugin import seer_make_drafter
from seer_kv_local import LocalPool
from seer_session import Session
from seer_testing import EngineContract
from seer_testing.families import FAMILIES, VOCABULARY, write_family

from backends.tests.families import TOKENIZER
from seer_core.errors import EngineError
from seer_core.model import Sampling
from seer_core.plugins.hookspecs import Startup
from tests.support.eventually import eventually
from tests.support.patience import PATIENCE_S

pytestmark = pytest.mark.engine

CONTROLS = [
    {},
    {"presence_penalty": 1.5, "frequency_penalty": -0.5, "repetition_penalty": 1.2},
    {"min_p": 0.05, "logit_bias": {"5": 3.0, "6": 3.0}, "bad_words": [[5, 6], [7]], "top_logprobs": 2},
    {
        "temperature": 0.9,
        "top_p": 0.95,
        "top_k": 40,
        "allowed_token_ids": list(range(3, 90)),
        "min_tokens": 30,
    },
    {"stop": [" w17"], "prompt_logprobs": 2},
]
PROMPTS = [
    {"group_id": f"g{i}", "prompt": " ".join(f"w{3 + (i * 31 + j * 7) % 120}" for j in range(20)), "n": 4}
    | more
    for i, more in enumerate(CONTROLS)
]
INTERPRETER = Path(__file__).parents[2] / "vllm/tests/interpreter"
PLAIN = [{name: each[name] for name in ("group_id", "prompt", "n")} for each in PROMPTS]


@pytest.fixture(scope="module")
def session_of(tmp_path_factory):
    """Return a function that makes a session of an engine's table, in chunks of so many tokens or whole."""

    def make(engine, chunk_tokens=None, drafters=(), kv_pool="none", **table):
        plugins = [*drafters] if chunk_tokens is None else ["divided_rollout", *drafters]
        lines = [
            "[seer]",
            f"engine = {json.dumps(engine)}",
            f"plugins = {json.dumps(plugins)}",
            f"kv_pool = {json.dumps(kv_pool)}",
            "[rollout]",
            "max_tokens = 96",
            "ignore_eos = true",
            f"[engine.{engine}]",
            *(f"{name} = {json.dumps(value)}" for name, value in table.items()),
        ]
        if chunk_tokens is not None:
            lines += ["[plugin.divided_rollout]", f"chunk_tokens = {chunk_tokens}"]
        config = tmp_path_factory.mktemp("session") / "rollout.toml"
        config.write_text("\n".join(lines))
        return Session(config)

    return make


def responses(result):
    return {each.request_id: list(each.token_ids) for each in result.completions}


def logprobs(result):
    return [
        logprob
        for each in sorted(result.completions, key=lambda each: each.request_id)
        for logprob in each.logprobs
    ]


def tops(result):
    return {
        each.request_id: [[token for token, _ in place] for place in each.top_logprobs]
        for each in result.completions
        if each.top_logprobs is not None
    }


def prompts_of(result):
    return {
        each.request_id: [[token for token, _ in place] for place in each.prompt_logprobs.top_logprobs]
        for each in result.completions
        if each.prompt_logprobs is not None
    }


def texts(result):
    return {each.request_id: (each.text, each.finish_reason, each.stop_reason) for each in result.completions}


class TestVllmServers(EngineContract):
    """Two of them keep the contract of engines."""

    shared = True
    patience_s = 300.0

    @pytest.fixture(autouse=True)
    def _servers(self, pair, fleet_of, models):
        self.make = lambda: fleet_of(*pair, poll_s=0.5)
        self.weights = str(models[1])


@pytest.fixture(scope="module")
def second(serve_vllm, models):
    """A stock server with vLLM's second runner, whose kernels run in Triton's interpreter."""
    server = serve_vllm(
        models[0],
        *("--enable-scale-out", "--enable-prompt-tokens-details", "--max-num-seqs=16"),
        folder=INTERPRETER,
        VLLM_SERVER_DEV_MODE="1",
        VLLM_USE_V2_MODEL_RUNNER="1",
    )
    server.await_ready()
    return server


@pytest.mark.long
class TestSecondRunnerServer(EngineContract):
    """One keeps the contract of engines without anything of ours, as two instances under two names."""

    shared = True
    patience_s = 600.0

    @pytest.fixture(autouse=True)
    def _servers(self, second, fleet_of, models):
        ways = [second, SimpleNamespace(url=second.url.replace("127.0.0.1", "localhost"))]
        self.make = lambda: fleet_of(*ways, poll_s=0.5)
        self.weights = str(models[1])


@pytest.fixture(scope="module")
def wanted(session_of, models):
    """The responses of Seer's own engine."""
    own = session_of(
        "vllm",
        model=str(models[0]),
        dtype="float32",
        max_model_tokens=1024,
        kv_cache_bytes=32 << 20,
        block_size=32,
    )
    with own as session:
        return session.rollout(PROMPTS, 0)


def expect_the_same(found, wanted):
    """Compare all that responses consist of."""
    assert responses(found) == responses(wanted)
    assert logprobs(found) == pytest.approx(logprobs(wanted), abs=1e-4)
    assert found.summary.exactness == "exact"
    assert tops(found) == tops(wanted)
    assert prompts_of(found) == prompts_of(wanted)
    assert texts(found) == texts(wanted)


@pytest.mark.parametrize("chunk_tokens", [None, 20])
def test_without_pool_and_drafts_responses_are_those_of_seer_s_own_engine(
    pair, session_of, models, wanted, chunk_tokens
):
    urls = [server.url for server in pair]
    with session_of("remote", chunk_tokens, urls=urls) as session:
        session.update_weights(models[0])
        found = session.rollout(PROMPTS, 0)
    expect_the_same(found, wanted)
    if chunk_tokens:
        assert found.summary.chunks == 16 * 5 + 4  # those with a stop string are not divided


@pytest.mark.filterwarnings("ignore")  # TRL imports what it finds, which warns of much
def test_in_front_of_them_a_client_gets_the_tokens_of_a_server_alone(address, pair):
    """``seer serve`` takes the place of one server: TRL's own client asks either."""
    with patch.dict(os.environ):  # or engines would have vLLM's variables
        from trl.generation.vllm_client import VLLMClient

    prompts = [[3 + (7 * i + j) % 90 for j in range(12)] for i in range(3)]
    more = {"n": 2, "max_tokens": 40, "generation_kwargs": {"seed": 5}}
    found, wanted = (VLLMClient(base_url=url).generate(prompts, **more) for url in (address, pair[0].url))
    scores, known = (
        [each for response in answer.pop("logprobs") for [each] in response] for answer in (found, wanted)
    )
    assert scores == pytest.approx(known, abs=1e-4)
    assert found == wanted
    assert len({*map(tuple, found["completion_ids"])}) == 6


def counted(server, name):
    """Return one of the server's own figures."""
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=PATIENCE_S) as answer:
        lines = answer.read().decode().splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name + "{"))


@pytest.fixture(scope="module")
def share(fleet_of, run_engine, loop):
    """Return a function that has servers share a pool of KV, and draft; it returns them and the pool."""
    pools = []

    def share(*servers, pool=None):
        pools.append(pool or LocalPool(64 << 20))
        loop.run_until_complete(pools[-1].start([f"remote-{i}" for i in range(len(servers))]))
        source = seer_make_drafter(DraftSettings(), Startup(0, Path())).source()
        return [run_engine(engine, source, pools[-1]) for engine in fleet_of(*servers).engines], pools[-1]

    yield share
    for pool in pools:
        loop.run_until_complete(pool.stop())


@pytest.fixture
def sharing(pair, share):
    """Two servers that share a pool of KV and draft, and the pool; other tests leave servers another one."""
    instances, pool = share(*pair)
    yield instances, pool
    for each in instances:
        each.run(each.engine.stop())


def test_a_response_that_moves_finds_its_kv_and_is_drafted_with_the_same_tokens(
    pair, sharing, prompts, moved
):
    (a, b), pool = sharing
    sampling, tokens = Sampling(1.0, ignore_eos=True), 130
    whole = a.whole(prompts(4), sampling, tokens)
    a.group = b.group = "again"
    drafted = counted(pair[0], "vllm:spec_decode_num_draft_tokens_total")
    responses, rounds = moved([a, b], prompts(4), sampling, tokens, 40)
    assert responses == whole
    for outputs in rounds[1:]:
        assert max(output.prefilled_tokens for output in outputs) <= 32
        assert min(output.pool_tokens for output in outputs) >= 32
    assert sum(sum(output.accepted_at) for outputs in rounds for output in outputs)
    assert sum(output.steps for outputs in rounds for output in outputs) < 4 * tokens
    assert pool.stats().hit_blocks
    assert counted(pair[0], "vllm:spec_decode_num_draft_tokens_total") > drafted
    assert a.info.kv_domain == b.info.kv_domain
    assert a.info.move_cost_from(b.info) < 1.0


def test_no_kv_is_shared_once_a_server_s_weights_may_have_changed(pair, sharing, prompts, models):
    """Its owner loads others, and says nothing: not even the label changes."""
    (a, b), pool = sharing
    sampling = Sampling(1.0, ignore_eos=True)
    text = prompts(1, tokens=200)[0][::-1]  # of which no server has a block
    [first] = a.run(a.chunks([a.job(text, 40, 0, sampling)]))
    pair[1].call("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(models[1])}})
    [there] = b.run(b.chunks([b.job(text, 40, 0, sampling)]))
    assert there.prefilled_tokens == len(text)
    assert there.token_ids != first.token_ids
    used = pool.stats().used_bytes
    b.run(b.chunks([b.job([*text, *there.token_ids], 40, 0, sampling)]))
    assert pool.stats().used_bytes == used
    pair[1].call("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(models[0])}})


def test_divided_shared_and_drafted_responses_are_those_of_seer_s_own_engine(
    pair, session_of, models, wanted
):
    """Under each control, and under weights that come back."""
    with session_of("remote", 20, ["grouped_spec"], "local", urls=[each.url for each in pair]) as session:
        found = session.rollout(PROMPTS, 0)
        expect_the_same(found, wanted)
        assert not found.summary.degradations
        assert found.summary.chunks == 16 * 5 + 4  # those with a stop string are not divided
        assert found.summary.drafted_tokens
        session.update_weights(models[1])
        other = session.rollout(PROMPTS[:1], 0)
        session.update_weights(models[0])
        again = session.rollout(PROMPTS[:1], 0)
    assert responses(again).items() <= responses(wanted).items()
    assert all(tokens != responses(wanted)[name] for name, tokens in responses(other).items())


def test_a_killed_server_costs_no_response_and_is_taken_in_again(pair, session_of, models):
    urls = [server.url for server in pair]
    long = [prompt | {"max_tokens": 400} for prompt in PLAIN]
    short = PLAIN[0] | {"group_id": "short", "max_tokens": 4, "n": 1}
    with session_of("remote", 16, urls=urls) as session:
        session.update_weights(models[0])
        whole = session.rollout([*long, short], 0)
        completions = []
        for completion in session.stream([*long, short], 0):
            if not completions:
                pair[1].kill()
            completions.append(completion)
        assert {each.request_id: list(each.token_ids) for each in completions} == responses(whole)
        assert session.result.summary.instances_lost == 1
        pair[1].start()
        pair[1].await_ready()
        eventually(lambda: "remote-1" in session.runtime.alive, logs=[pair[1].log])
        session.submit(session.runtime.remove("remote-0")).result()
        again = session.rollout([short], 0)
        assert responses(again).items() <= responses(whole).items()
        assert {chunk.instance for each in again.completions for chunk in each.chunks} == {"remote-1"}


@pytest.mark.long
def test_whole_responses_that_are_cut_where_kv_runs_short_are_the_same(pair, serve_seer, session_of, models):
    """Over servers that share no KV; one of them is killed in the second round."""
    small = [serve_seer(models[0], "--num-gpu-blocks-override=41") for _ in range(2)]  # 1,312 tokens of KV
    for server in small:
        server.await_ready()
    long = [prompt | {"max_tokens": 300 + 60 * place} for place, prompt in enumerate(PLAIN)]
    with session_of("remote", urls=[pair[0].url]) as session:
        session.update_weights(models[0])
        whole = session.rollout(long, 0)
    assert whole.summary.chunks == len(whole.completions)
    with session_of("remote", json.dumps("auto"), urls=[each.url for each in small]) as session:
        cut = session.rollout(long, 0)
        expect_the_same(cut, whole)
        assert cut.summary.chunks > len(cut.completions)
        assert cut.summary.migrations
        completions = []
        for completion in session.stream(long, 0):
            if not completions:
                small[1].kill()
            completions.append(completion)
        assert {each.request_id: list(each.token_ids) for each in completions} == responses(whole)
        assert session.result.summary.instances_lost == 1


def test_a_prompt_with_a_seed_may_take_several_steps_of_prefill(pair):
    """A stock server on a CPU dies of it: its generators cannot be set back."""
    prompt = [3 + place * 7 % 90 for place in range(300)]
    body = {"token_ids": prompt, "sampling_params": {"seed": 5, "max_tokens": 8, "temperature": 1.0}}
    answers = [json.loads(server.call("/inference/v1/generate", body)) for server in pair]
    first, second = ([choice["token_ids"] for choice in each["choices"]] for each in answers)
    assert first == second


ALONE = [
    {"logit_bias": {"5": 4.0, "9": -4.0}},
    {"presence_penalty": 1.5, "frequency_penalty": 0.5, "repetition_penalty": 1.3},
    {"bad_words": ["w40", "w41 w42"], "allowed_token_ids": list(range(3, 90))},
    {"min_tokens": 12, "stop_token_ids": list(range(3, 60))},
    {"stop": ["w7", "w8"], "include_stop_str_in_output": True},
    {"structured_outputs": {"regex": "(w5|w6|w7)+"}},
    {"temperature": 1.0, "top_k": 1, "top_p": 0.3, "min_p": 0.5},
]
"""vLLM's controls, of requests without chance in them."""


def answers(server, model):
    body = {"model": str(model), "prompt": list(range(3, 40)), "max_tokens": 24, "return_token_ids": True}
    found = []
    for more in ALONE:
        answer = json.loads(server.call("/v1/completions", body | {"temperature": 0.0} | more))
        [choice] = answer["choices"]
        found.append((choice["token_ids"], choice["finish_reason"], choice["stop_reason"]))
    return found


def test_a_stock_server_is_refused_by_default_and_serves_a_run_that_requires_less(
    serve_vllm, session_of, models, pair
):
    """Without our package at work, without tokens in and out, and without developer's routes."""
    server = serve_vllm(models[0])
    server.await_ready()
    assert answers(pair[0], models[0]) == answers(server, models[0])  # with vLLM's controls, for all clients
    with pytest.raises(EngineError, match="samples no better than 'reproducible'"):
        session_of("remote", urls=[server.url]).start()
    with pytest.raises(EngineError, match="VLLM_PLUGINS=seer"):
        session_of("remote", kv_pool="local", urls=[server.url]).start()
    results = []
    for _ in range(2):
        with session_of("remote", 32, urls=[server.url], require="reproducible") as session:
            results.append(session.rollout(PLAIN, 0))
            with pytest.raises(EngineError, match="VLLM_SERVER_DEV_MODE=1"):
                session.update_weights(models[1])
    assert responses(results[0]) == responses(results[1])
    assert results[0].summary.exactness == "reproducible"
    server.kill()


@pytest.mark.long
def test_a_server_with_the_second_runner_shares_with_one_with_the_first(
    serve_seer, share, models, prompts, moved
):
    """Its kernels run in Triton's interpreter."""
    server = serve_seer(
        models[0],
        "--max-num-seqs=8",
        "--no-async-scheduling",
        drafted={"method": "ngram_gpu", "num_speculative_tokens": 8},
        folder=INTERPRETER,
        SEER_GROUPED_DRAFTS="1",
        VLLM_USE_V2_MODEL_RUNNER="1",
    )
    other = serve_seer(models[0])
    for each in (other, server):
        each.await_ready()
    (first, second), _ = share(other, server)
    sampling, tokens = Sampling(1.0, ignore_eos=True), 64
    wanted = first.whole(prompts(2), sampling, tokens)
    first.group = second.group = "again"
    responses, rounds = moved([first, second], prompts(2), sampling, tokens, 24)
    assert responses == wanted
    assert min(output.pool_tokens for outputs in rounds[1:] for output in outputs) >= 32
    for each in (other, server):
        each.kill()


@pytest.mark.long
def test_kv_is_shared_through_mooncake_and_no_token_depends_on_its_master(pair, share, prompts, moved):
    mooncake = pytest.importorskip("seer_mooncake", reason="backends/mooncake is not installed")
    pool = mooncake.MooncakePool(mooncake.Settings(capacity_bytes=64 << 20, on_failure="go_on"))
    (a, b), _ = share(*pair, pool=pool)
    sampling, tokens = Sampling(1.0, ignore_eos=True), 130
    whole = a.whole(prompts(4), sampling, tokens)
    a.group = b.group = "in mooncake"
    responses, rounds = moved([a, b], prompts(4), sampling, tokens, 40)
    assert responses == whole
    assert min(output.pool_tokens for outputs in rounds[1:] for output in outputs) >= 32

    os.kill(pool._master._process.pid, signal.SIGKILL)
    responses, _ = moved([a, b], prompts(4), sampling, tokens, 40)
    assert responses == whole
    for each in (a, b):
        each.run(each.engine.stop())


@pytest.mark.long
def test_kv_of_sliding_windows_is_shared_too(serve_seer, share, tmp_path, prompts, moved):
    model = write_family(tmp_path, "Gemma-3", 1, TOKENIZER)
    servers = [serve_seer(model, "--dtype", FAMILIES["Gemma-3"].dtype) for _ in range(2)]
    for server in servers:
        server.await_ready()
    (a, b), _ = share(*servers)
    block = a.info.block_tokens
    sampling, tokens, chunk = Sampling(1.0, ignore_eos=True), max(3 * block, 130), max(block, 40)
    texts = [[token % VOCABULARY for token in text][: block + 1] for text in prompts(3, block + 1)]
    whole = a.whole(texts, sampling, tokens)
    responses, rounds = moved([a, b], texts, sampling, tokens, chunk)
    assert responses == whole
    for outputs in rounds[1:]:
        assert min(output.pool_tokens for output in outputs) >= block
    for server in servers:
        server.kill()


@pytest.mark.long
def test_where_kv_runs_short_chunks_end_early_and_go_on_the_same(
    serve_seer, fleet_of, run_engine, prompts, models
):
    """Without a pool or a drafter, too: Seer's package alone does it."""
    server = serve_seer(models[0], "--kv-cache-memory-bytes=2228224")  # 1,056 tokens and a block
    server.await_ready()
    [engine] = fleet_of(server).engines
    a = run_engine(engine, None, None)
    assert a.info.ends_early
    sampling, tokens = Sampling(1.0, ignore_eos=True), 200
    responses, ended = a.ended_early(prompts(12), sampling, tokens)
    assert ended
    assert not counted(server, "vllm:num_preemptions_total")
    assert responses == a.whole(prompts(12), sampling, tokens)  # these may not, and are preempted
    assert counted(server, "vllm:num_preemptions_total")
    server.kill()
