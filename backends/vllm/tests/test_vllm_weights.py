"""New weights: checked before anything changes, proven after, and the same on every instance of a version."""

import asyncio
import json
import os
import signal

import numpy as np
import pytest
from msgspec import structs
from seer_host.shared_weights import SharedWeights
from seer_host.tables import SeerTable
from seer_session.runtime import Runtime

from seer_core.errors import EngineError
from seer_core.model import PromptGroup, Sampling
from seer_core.model.events import InstanceLost
from seer_core.plugins.slots import Assembly, Strategies
from seer_core.ports.drafting import SourceSpec, StepTimes
from seer_core.ports.weights import WeightSpec, directory
from seer_core.scheduling.scheduler import Policies, Slot

pytestmark = pytest.mark.engine

PLAIN = Sampling(1.0)
KV_BYTES_PER_TOKEN = 2048
EMBEDDINGS, HEAD = "model.embed_tokens.weight", "lm_head.weight"
UP = "model.layers.1.mlp.up_proj.weight"


def tensors(model):
    from safetensors.numpy import load_file

    return load_file(model / "model.safetensors")


def write(directory, weights):
    from safetensors.numpy import save_file

    directory.mkdir(exist_ok=True)
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


@pytest.fixture(scope="module")
def tied(start, tied_models):
    """An instance of a model whose output head is its embeddings."""
    return start(tied_models[0])


def update(harness, path):
    """Give new weights to an instance; chunks ask for them from now on."""
    harness.run(harness.engine.update_weights(directory(path), harness.weight_version + 1))
    harness.weight_version += 1


def scores(harness, prompts, tokens=30):
    """Return the tokens and log-probs of responses to all prompts."""
    jobs = [harness.job(prompt, tokens, seed, PLAIN) for seed, prompt in enumerate(prompts)]
    outputs = harness.run(harness.chunks(jobs))
    return [output.token_ids for output in outputs], np.concatenate([each.logprobs for each in outputs])


def test_after_an_update_a_tied_model_answers_like_one_freshly_started_on_the_weights(
    tied, start, tied_models, prompts
):
    fresh = start(tied_models[1])
    expected_tokens, expected = scores(fresh, prompts(6))
    fresh.run(fresh.engine.stop())
    assert fresh.info.fingerprint != tied.info.fingerprint
    first = scores(tied, prompts(6))
    update(tied, tied_models[1])
    tokens, found = scores(tied, prompts(6))
    assert tokens == expected_tokens
    assert np.abs(found - expected).max() < 1e-5
    update(tied, tied_models[0])
    tokens, found = scores(tied, prompts(6))
    assert tokens == first[0]
    assert np.abs(found - first[1]).max() < 1e-5


@pytest.fixture
def shared():
    """Return a function that puts arrays into shared memory, as a trainer would, and names them."""
    import torch

    with SharedWeights() as memory:

        def share(weights):
            tensors = [(name, torch.from_numpy(array)) for name, array in weights.items()]
            with memory.offer(tensors) as source:
                return source

        yield share


@pytest.fixture
def sent(shared):
    """Return a function that broadcasts arrays in many pieces, as a trainer would, and names them."""
    from seer_worker.weights.broadcast import BroadcastWeights

    with BroadcastWeights(piece_bytes=1 << 16) as sender:

        def send(weights):
            with sender.offer(shared(weights)) as source:
                return source

        yield send


@pytest.mark.parametrize("way", ["shared", "sent"])
def test_weights_from_memory_and_by_broadcast_are_those_of_a_directory_and_are_checked_alike(
    tied, tied_models, prompts, request, way
):
    shared = request.getfixturevalue(way)
    version = tied.weight_version + 1
    by_directory = tied.run(tied.engine.update_weights(directory(tied_models[1]), version))
    tied.weight_version = version
    expected = scores(tied, prompts(2), 20)
    update(tied, tied_models[0])
    weights = tensors(tied_models[1])
    assert tied.run(tied.engine.update_weights(shared(weights), version)) == by_directory
    tied.weight_version = version
    tokens, found = scores(tied, prompts(2), 20)
    assert tokens == expected[0]
    assert (found == expected[1]).all()
    weights[UP] = put(np.nan)(weights[UP].copy())
    with pytest.raises(EngineError, match=f"tensor '{UP}' has values that are no finite numbers"):
        tied.run(tied.engine.update_weights(shared(weights), version + 1))
    with pytest.raises(EngineError, match="weight source 'weight_sources:Lost' cannot be imported"):
        tied.run(tied.engine.update_weights(WeightSpec("weight_sources:Lost", {}), version + 1))
    assert scores(tied, prompts(2), 20)[0] == tokens
    assert tied.losses == []
    update(tied, tied_models[0])


def with_values(name, change):
    def damage(weights):
        weights[name] = change(weights[name].copy())

    return damage


def put(value):
    def change(tensor):
        tensor[3, 5] = value
        return tensor

    return change


def half(weights):
    for name in sorted(weights)[: len(weights) // 2]:
        del weights[name]


@pytest.mark.parametrize(
    ("damage", "fact"),
    [
        (lambda weights: weights.pop(UP), f"tensor '{UP}' is missing; save all"),
        (half, r"tensor '\S+' is missing, and so are \d+ more"),
        (with_values("model.foreign.weight", None), "tensor 'model.foreign.weight' is none of the model's"),
        (
            with_values(UP, lambda tensor: tensor[:, :-1]),
            rf"tensor '{UP}' has the shape \[512, 191\], the model's",
        ),
        (
            with_values(UP, lambda tensor: tensor.astype(np.int8)),
            f"tensor '{UP}' holds int8, the model's float32",
        ),
        (with_values(UP, put(np.nan)), f"tensor '{UP}' has values that are no finite numbers"),
        (
            with_values(EMBEDDINGS, put(-np.inf)),
            f"tensor '{EMBEDDINGS}' has values that are no finite numbers",
        ),
        (
            lambda weights: weights.update({HEAD: weights[EMBEDDINGS] + 1}),
            f"'{HEAD}' differs from '{EMBEDDINGS}'",
        ),
    ],
    ids=["one missing", "half missing", "foreign", "shape", "kind", "nan", "infinite", "untied"],
)
def test_weights_that_are_not_the_models_are_refused_whole(
    tied, tied_models, prompts, tmp_path, damage, fact
):
    before, worker = scores(tied, prompts(2), 20), tied.pid
    weights = tensors(tied_models[1])
    weights["model.foreign.weight"] = weights[UP]
    if "foreign" not in fact:
        del weights["model.foreign.weight"]
        damage(weights)
    write(tmp_path, weights)
    with pytest.raises(EngineError, match=f"UpdateWeights on instance 'vllm-0': .*{fact}"):
        update(tied, tmp_path)
    assert (tied.pid, tied.losses) == (worker, [])
    tokens, found = scores(tied, prompts(2), 20)
    assert tokens == before[0]
    assert (found == before[1]).all()


@pytest.mark.parametrize(
    "content", [b"no weights", b"\x10\x00\x00\x00\x00\x00\x00\x00{"], ids=["text", "cut"]
)
def test_a_file_that_is_no_safetensors_is_refused(tied, tmp_path, content):
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(EngineError, match="its safetensors cannot be read"):
        update(tied, tmp_path)
    assert tied.losses == []


def test_shards_and_an_equal_copy_of_the_head_are_taken(tied, tied_models, prompts, tmp_path):
    update(tied, tied_models[0])
    before = scores(tied, prompts(2), 20)
    weights = tensors(tied_models[0])
    weights[HEAD] = weights[EMBEDDINGS].copy()
    names = sorted(weights)
    files = {"model-1.safetensors": names[::2], "model-2.safetensors": names[1::2]}
    for file, part in files.items():
        write(tmp_path, {name: weights[name] for name in part})
        (tmp_path / "model.safetensors").rename(tmp_path / file)
    write(tmp_path, {UP: weights[UP]})  # left over from another save, and not in the index
    with pytest.raises(EngineError, match=f"tensor '{UP}' is in both"):
        update(tied, tmp_path)
    index = {"weight_map": {name: file for file, part in files.items() for name in part}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    update(tied, tmp_path)
    tokens, found = scores(tied, prompts(2), 20)
    assert tokens == before[0]
    assert np.abs(found - before[1]).max() < 1e-5


def test_log_probs_that_are_not_finite_fail_their_chunk_and_leave_nothing_to_better_weights(
    tied, tied_models, prompts, tmp_path
):
    before = scores(tied, prompts(4), 40)
    weights = tensors(tied_models[0])
    weights["model.layers.0.mlp.down_proj.weight"] *= 1e38  # finite, but no longer once multiplied
    update(tied, write(tmp_path, weights))
    jobs = [tied.job(prompt, 20 + seed, seed, PLAIN) for seed, prompt in enumerate(prompts(4))]
    for job in jobs:
        tied.engine.submit(job)
    tied.run(tied.until(lambda: all(job.id in tied.answers for job in jobs)))
    assert all("no finite numbers" in tied.failures[job.id] for job in jobs)
    assert {tied.answers[job.id] for job in jobs} == {1}
    update(tied, tied_models[0])
    tokens, found = scores(tied, prompts(4), 40)
    assert tokens == before[0]
    assert np.abs(found - before[1]).max() < 1e-5


@pytest.fixture(scope="module")
def pool(loop):
    """A KV pool for the sabotaged instance."""
    kv_local = pytest.importorskip("seer_kv_local", reason="backends/kv_local is not installed")
    pool = kv_local.LocalPool(64 << 20)
    loop.run_until_complete(pool.start(["vllm-0"]))
    yield pool
    loop.run_until_complete(pool.stop())


@pytest.fixture(scope="module")
def sabotaged(start, tied_models, notes, pool):
    """An instance that breaks itself from within, with KV memory for little."""
    spec = SourceSpec("draft_sources:Saboteur", {"notes": str(notes)}, 2, StepTimes((1,), (0,), ((0.001,),)))
    return start(tied_models[0], spec, pool, kv_cache_bytes=2 * 1024 * KV_BYTES_PER_TOKEN)


def test_a_layer_that_answers_by_old_weights_is_noticed_whichever_it_is(
    sabotaged, tied_models, notes, prompts
):
    before = scores(sabotaged, prompts(2), 20)
    update(sabotaged, tied_models[1])
    faults = json.loads((notes / "faults.json").read_text())
    for kind in ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj"):
        layer = f"model.layers.2.{kind}"
        fact = f"layer '{layer}' does not answer by the weights just loaded, but by others"
        assert faults.pop(kind.split(".")[1]) == fact
    assert faults.pop("lm_head").startswith("vLLM loaded no new weights into layer 'lm_head'")
    assert len(faults.pop("nothing")) == 32
    assert not faults
    update(sabotaged, tied_models[0])
    assert scores(sabotaged, prompts(2), 20)[0] == before[0]


def test_kv_that_is_not_finite_is_cleared_and_never_pooled_and_other_chunks_end_as_ever(
    sabotaged, tied, notes, prompts
):
    expected = tied.whole(prompts(8), PLAIN, 80)
    first, *others = [sabotaged.job(prompt, 80, seed, PLAIN) for seed, prompt in enumerate(prompts(4))]
    poisoned = structs.replace(first, group_id="poisoned", max_tokens=40)
    for job in (poisoned, *others):
        sabotaged.engine.submit(job)
    sabotaged.run(sabotaged.until(lambda: all(job.id in sabotaged.answers for job in (poisoned, *others))))
    assert (notes / "poisoned").exists()
    assert "no finite numbers" in sabotaged.failures[poisoned.id]
    assert [sabotaged.outputs[job.id].token_ids for job in others] == expected[1:4]
    assert not any(sabotaged.answers[job.id] - 1 for job in (poisoned, *others))
    for _ in range(3):  # more than the whole KV memory, so that every block is used again
        assert sabotaged.whole(prompts(8), PLAIN, 80) == expected


class Watch:
    """An observer that sets an event when an instance is lost."""

    def __init__(self):
        self.lost = asyncio.Event()

    def observe(self, now, event, commands):
        if isinstance(event, InstanceLost):
            self.lost.set()


@pytest.mark.parametrize("ways", [("shared", "sent"), pytest.param(("directory",), marks=pytest.mark.long)])
def test_an_instance_updated_in_place_and_one_restarted_say_the_same_though_the_trainer_goes_on(
    make_fleet, loop, tied_models, prompts, tmp_path, request, ways
):
    pool = make_fleet(tied_models[0], instances=2, start_timeout_s=400.0)
    watch = Watch()
    strategies = Strategies(Policies(), (Slot("observer", "test", watch),))
    groups = [
        PromptGroup(f"g{seed}", tuple(prompt), 2, 60, seed=seed) for seed, prompt in enumerate(prompts(8))
    ]
    checkpoint = tmp_path / "checkpoint"
    sources = {way: request.getfixturevalue(way) for way in ways if way != "directory"}

    async def rollout(runtime):
        result = await runtime.rollout(groups).wait()
        assert {name for each in result.completions for name in each.instances} == {"vllm-0", "vllm-1"}
        return {each.request_id: (each.token_ids, each.logprobs) for each in result.completions}

    async def run(runtime, weights, way):
        write(checkpoint, weights)
        await runtime.update_weights(sources[way](weights) if way in sources else str(checkpoint))
        before = await rollout(runtime)
        write(checkpoint, tensors(tied_models[0]))  # in place, as trainers do
        for array in weights.values():
            array += 1
        watch.lost.clear()
        os.kill(pool.engines[1].worker.pid, signal.SIGKILL)
        await watch.lost.wait()
        await runtime.reset_caches()  # waits until it is back
        return before, await rollout(runtime)

    async def run_all():
        found = []
        async with Runtime(Assembly(pool, strategies, None), SeerTable()) as runtime:
            for number, way in enumerate(ways):
                weights = tensors(tied_models[1])
                weights["model.norm.weight"] *= 1 + number  # other ones than before
                found.append(await run(runtime, weights, way))
        return found

    pairs = loop.run_until_complete(asyncio.wait_for(run_all(), 900))
    for before, after in pairs:
        assert {id: tokens for id, (tokens, _) in after.items()} == {
            id: tokens for id, (tokens, _) in before.items()
        }
        for id, (_, logprobs) in after.items():
            assert np.abs(np.array(logprobs) - before[id][1]).max() < 1e-5
    first, *others = [[list(tokens) for tokens, _ in before.values()] for before, _ in pairs]
    assert first not in others


def test_a_trainer_killed_during_the_check_leaves_the_old_weights_and_during_the_load_no_instance(
    tied, tied_models, prompts, killed_trainer
):
    tied.used_up = True  # it is lost
    before, version = scores(tied, prompts(2), 20), tied.weight_version + 1
    with pytest.raises(EngineError, match="the weights did not arrive"):
        tied.run(tied.engine.update_weights(killed_trainer(tied_models[1], 0), version))
    tokens, found = scores(tied, prompts(2), 20)
    assert tokens == before[0]
    assert (found == before[1]).all()
    assert tied.losses == []
    with pytest.raises(EngineError):  # half of them are loaded
        tied.run(tied.engine.update_weights(killed_trainer(tied_models[1], 1), version))
    tied.run(tied.until(lambda: tied.losses))
    assert "the weights did not arrive" in tied.losses[0]
