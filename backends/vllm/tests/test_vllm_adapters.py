"""An update by an adapter: beside the model, or merged with it, and exact like one by whole weights."""

import asyncio
import json

import attrs
import numpy as np
import pytest
from seer_host.shared_weights import SharedWeights
from seer_host.weight_copies import WeightCopies
from seer_testing.families import write_family

from backends.tests.families import TOKENIZER
from backends.tests.family_rollouts import killing, moving, tokens_of
from backends.tests.peft_files import CONFIG, RANK, adapter_of, merged, save
from bench.models import TECHNIQUES, FamilyRun
from seer_core.errors import EngineError
from seer_core.model import Sampling
from seer_core.ports.drafting import SourceSpec, StepTimes
from seer_core.ports.weights import directory
from tests.support.eventually import aeventually

pytestmark = pytest.mark.engine

PLAIN = Sampling(1.0)
TOKENS = 60


def update(harness, spec):
    """Give new weights to an instance; chunks ask for them from now on."""
    fingerprint = harness.run(harness.engine.update_weights(spec, harness.weight_version + 1))
    harness.weight_version += 1
    return fingerprint


def scores(harness, prompts, tokens=TOKENS):
    """Return the tokens and log-probs of responses to all prompts."""
    jobs = [harness.job(prompt, tokens, seed, PLAIN) for seed, prompt in enumerate(prompts)]
    outputs = harness.run(harness.chunks(jobs))
    return [output.token_ids for output in outputs], np.concatenate([each.logprobs for each in outputs])


def leave_as_found(instances, model):
    """Lend instances to a test; after updates all have their first weights again, in one version."""
    versions = [each.weight_version for each in instances]
    yield instances
    if versions != [each.weight_version for each in instances]:
        latest = max(each.weight_version for each in instances)
        for each in instances:
            each.weight_version = latest
            update(each, directory(model))


@pytest.fixture(scope="module")
def pair(start, models, notes, make_pool):
    """Two instances that keep adapters beside the model, draft, and share a pool."""
    pool = make_pool(32 << 20)
    source = SourceSpec(
        "draft_sources:Scripted", {"notes": str(notes)}, 5, StepTimes((1,), (0,), ((0.001,),))
    )
    return [start(models[0], source, pool, index, lora_rank=8) for index in range(2)]


@pytest.fixture
def beside(pair, models):
    """The two, as each test finds them."""
    yield from leave_as_found(pair, models[0])


@pytest.fixture(scope="module")
def single(start, models):
    """An instance that has no room for adapters beside the model."""
    return start(models[0])


@pytest.fixture
def merging(single, models):
    """That instance, as each test finds it."""
    for [instance] in leave_as_found([single], models[0]):
        yield instance


def test_an_adapter_answers_like_merged_weights_and_tokens_are_the_same_however_they_are_made(
    beside, merging, models, prompts, moved, notes, tmp_path
):
    asked = prompts(6)
    first = beside[0]
    before = scores(first, asked)
    assert scores(merging, asked)[0] == before[0]
    tensors = adapter_of(models[0], 1)
    spec, whole = save(tmp_path / "adapter", tensors), merged(tmp_path / "merged", models[0], tensors)
    old = first.info.fingerprint
    fingerprints = {update(each, spec) for each in beside}
    assert len(fingerprints) == 1
    assert old not in fingerprints
    tokens, logprobs = scores(first, asked)
    assert tokens != before[0]
    by_merging = update(merging, spec), *scores(merging, asked)
    by_whole = update(merging, whole), *scores(merging, asked)
    assert by_whole[1] == by_merging[1] == tokens
    assert np.abs(by_whole[2] - logprobs).max() < 1e-4
    assert np.abs(by_whole[2] - by_merging[2]).max() < 1e-5
    update(merging, directory(models[1]))
    update(merging, spec)
    later = scores(merging, asked)[0]
    update(merging, merged(tmp_path / "later", models[1], tensors))
    assert later == scores(merging, asked)[0] != tokens
    assert first.divided(asked, PLAIN, TOKENS, 17) == tokens
    responses, rounds = moved(beside, asked, PLAIN, TOKENS, 32)
    assert responses == tokens
    assert sum(output.pool_tokens for output in rounds[1]) > 0
    (notes / "answers.json").write_text(json.dumps([list(each) for each in tokens]))
    first.group = "mixed"
    drafted = scores(first, asked)
    first.group = "group"
    assert drafted[0] == tokens
    update(first, directory(models[0]))
    assert scores(first, asked)[0] == before[0]
    shared = SharedWeights()
    import torch

    with shared, shared.offer(((n, torch.from_numpy(t)) for n, t in tensors.items()), CONFIG) as source:
        update(first, source)
        assert scores(first, asked)[0] == tokens


@pytest.mark.parametrize(
    ("change", "config", "fact"),
    [
        ({}, {"r": 16}, "its rank is 16 by the adapter's config"),
        ("rank", {"r": 9}, "the adapter has the rank 9: set lora_rank of"),
        ("nan", {}, "has values that are no finite numbers"),
        ("half", {}, "no lora_B; save the whole adapter"),
        ("embeddings", {}, "vLLM keeps no adapter beside 'model.embed_tokens'"),
        ("model", {}, "it was trained on another model"),
        ("cut", {}, "its safetensors cannot be read"),
        ({}, {"use_dora": True}, "sets use_dora"),
    ],
    ids=["config", "rank", "nan", "half", "embeddings", "model", "cut", "dora"],
)
def test_a_bad_adapter_is_refused_by_a_sentence_and_the_version_before_serves_on(
    beside, models, prompts, tmp_path, change, config, fact
):
    instance = beside[0]
    before, pid = scores(instance, prompts(2), 20), instance.pid
    tensors = adapter_of(models[0], 2, config.get("r", RANK) if change == "rank" else RANK)
    name = sorted(tensors)[1]
    match change:
        case "nan":
            tensors[name][1, 2] = np.nan
        case "half":
            del tensors[name]
        case "model":
            tensors = {
                each: value.repeat(2, axis=1 if "_A" in each else 0) for each, value in tensors.items()
            }
        case "embeddings":
            random = np.random.default_rng(1)
            key = "base_model.model.model.embed_tokens.lora_"
            tensors[f"{key}A.weight"] = random.normal(size=(RANK, 192)).astype(np.float32)
            tensors[f"{key}B.weight"] = random.normal(size=(128, RANK)).astype(np.float32)
    spec = save(tmp_path / "adapter", tensors, CONFIG | config)
    if change == "cut":
        with (tmp_path / "adapter" / "adapter_model.safetensors").open("r+b") as file:
            file.truncate(5000)
    with pytest.raises(EngineError, match=f"UpdateWeights on instance 'vllm-0': .*{fact}"):
        update(instance, spec)
    assert (instance.pid, instance.losses) == (pid, [])
    tokens, logprobs = scores(instance, prompts(2), 20)
    assert tokens == before[0]
    assert (logprobs == before[1]).all()


def test_an_adapter_that_is_written_anew_after_the_update_began_is_refused_and_the_version_before_serves_on(
    beside, merging, models, prompts, tmp_path
):
    spec = WeightCopies("none").keep(save(tmp_path / "adapter", adapter_of(models[0], 5)), 1).kept
    save(tmp_path / "adapter", adapter_of(models[0], 6))
    for instance in (beside[0], merging):
        before = scores(instance, prompts(2), 20)
        with pytest.raises(EngineError, match="has changed since the update began: its digest is"):
            update(instance, spec)
        assert scores(instance, prompts(2), 20)[0] == before[0]


@pytest.mark.long
@pytest.mark.parametrize("room", [0, RANK], ids=["merged", "beside"])
def test_an_adapter_rewritten_in_place_is_a_new_version_and_until_then_changes_no_token(tmp_path, room):
    run = FamilyRun("vllm", "Qwen3", tmp_path)
    run.block_tokens = 32
    folder, other = tmp_path / "adapter", tmp_path / "other"
    one, two = (adapter_of(run.models[0], seed) for seed in (1, 2))

    def half():
        save(folder, two)
        with (folder / "adapter_model.safetensors").open("r+b") as file:
            file.truncate(5000)

    async def respond():
        async with run.started("local", TECHNIQUES, lora_rank=room) as runtime:
            groups = runtime.groups(run.records(), iteration=0)

            async def written(*acts):
                await runtime.use(moving(run, runtime, TECHNIQUES, acts))
                return await runtime.rollout(groups).wait()

            results = {"plain": await written()}
            save(folder, one)
            await runtime.update_weights(folder)
            results["one"] = await written()
            results["killed"] = await written((12, killing(runtime, "vllm-1", half)))
            await aeventually(lambda: len(runtime.alive) == 2)
            results["restarted"] = await written()
            with pytest.raises(EngineError, match="its safetensors cannot be read"):
                await runtime.update_weights(folder)
            assert runtime.weight_version == 1
            results["refused"] = await written()
            save(folder, two)
            await runtime.update_weights(folder)
            results["two"] = await written()
            save(other, two)
            await runtime.update_weights(other)
            await runtime.reset_caches()
            results["expected"] = await written()
            return results

    found = asyncio.run(asyncio.wait_for(respond(), 900))
    tokens = {name: tokens_of(result) for name, result in found.items()}
    assert found["killed"].summary.instances_lost == 1
    for name in ("one", "two"):
        assert found[name].summary.pool_tokens > 0
    assert found["restarted"].summary.migrations > 10
    assert tokens["killed"] == tokens["restarted"] == tokens["refused"] == tokens["one"] != tokens["plain"]
    assert tokens["two"] == tokens["expected"]
    assert all(text != tokens["one"][name] for name, text in tokens["two"].items())


@pytest.mark.long
@pytest.mark.parametrize("room", [0, 2 * RANK], ids=["merged", "beside"])
def test_two_ranks_with_an_adapter_write_the_tokens_of_one_and_move_them(
    start, models, make_pool, prompts, moved, tmp_path, room
):
    pool, asked = make_pool(32 << 20), prompts(5)
    one = start(models[0], lora_rank=room)
    pair = [start(models[0], None, pool, at, lora_rank=room, tensor_parallel=2) for at in range(2)]
    tokens, fingerprints = [scores(one, asked)[0]], {each.info.fingerprint for each in pair}
    for seed in (1, 2):
        spec = save(tmp_path / "adapter", adapter_of(models[0], seed))
        update(one, spec)
        fingerprints |= {update(each, spec) for each in pair}
        whole, logprobs = scores(one, asked)
        found = scores(pair[0], asked)
        assert found[0] == whole
        assert np.abs(found[1] - logprobs).max() < 1e-4
        responses, rounds = moved(pair, asked, PLAIN, TOKENS, 32)
        assert responses == whole
        assert sum(output.pool_tokens for output in rounds[1]) > 0
        tokens.append(whole)
    assert len(fingerprints) == 3
    assert tokens[0] != tokens[1] != tokens[2]
    with pytest.raises(EngineError, match="its rank is 9 by the adapter's config"):
        update(pair[0], save(tmp_path / "other", adapter_of(models[0], 3), CONFIG | {"r": 9}))
    assert scores(pair[0], asked)[0] == tokens[2]
    for each in pair:
        update(each, directory(models[0]))
    assert scores(pair[1], asked)[0] == tokens[0]
    for each in (one, *pair):
        each.run(each.engine.stop())


@pytest.mark.long
def test_a_rank_that_holds_another_part_of_an_adapter_is_noticed(start, models, tmp_path):
    def change(launch):
        return attrs.evolve(launch, instance="broken_rank:ChangingRank")

    ranks = start(models[0], change=change, lora_rank=RANK, tensor_parallel=2)
    ranks.used_up = True
    with pytest.raises(EngineError, match=r"does not hold the adapter's .* as it was loaded"):
        update(ranks, save(tmp_path / "adapter", adapter_of(models[0], 1)))


def test_a_mixture_has_no_adapters_beside_it_where_triton_is_missing(start, tmp_path):
    mixture = write_family(tmp_path / "mixture", "Qwen3-MoE", 1, TOKENIZER)
    with pytest.raises(EngineError, match=r"did not start: .*need Triton.*: take lora_rank out of"):
        start(mixture, lora_rank=8)


def test_a_restarted_instance_gets_base_and_adapter_again_and_answers_as_before(
    beside, models, prompts, tmp_path
):
    instance = beside[0]
    base = directory(models[1])
    spec = save(tmp_path / "adapter", adapter_of(models[0], 3))
    update(instance, base)
    fingerprint, before = update(instance, spec), scores(instance, prompts(4))
    version = instance.weight_version
    instance.used_up = True
    instance.prepare()  # stops it, and starts it anew
    instance.run(instance.engine.update_weights(base, version - 1))
    assert instance.run(instance.engine.update_weights(spec, version)) == fingerprint
    instance.weight_version = version
    assert scores(instance, prompts(4))[0] == before[0]
