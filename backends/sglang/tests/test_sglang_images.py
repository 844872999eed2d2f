"""Prompts with images: the tokens of SGLang's own, wherever and however a response is written."""

import json
import os
import re
import subprocess
from pathlib import Path

import pytest
from msgspec import structs

from tests.support.installed import skip_without

pytest.register_assert_rewrite("backends.tests.families", "backends.tests.image_rollouts")
LocalPool = pytest.importorskip("seer_kv_local", reason="backends/kv_local is not installed").LocalPool
skip_without("PIL")

from seer_host.images import PlacedImages, PromptImage  # noqa: E402
from seer_sglang.plugin import interpreter  # noqa: E402
from seer_testing.families import write_family  # noqa: E402
from seer_worker.tokenizer.images import ImagePlaces  # noqa: E402

from backends.tests.families import TOKENIZER  # noqa: E402
from backends.tests.image_rollouts import BOUND_S, expect_images_to_change_no_token  # noqa: E402
from backends.tests.turns_in_pools import released  # noqa: E402
from bench.models import picture  # noqa: E402
from seer_core.model import Sampling  # noqa: E402
from seer_core.ports.weights import directory  # noqa: E402

pytestmark = pytest.mark.engine

GREEDY, DRAWN = Sampling(0.0, ignore_eos=True), Sampling(1.0, ignore_eos=True)
SIZE = 80, 60
BLOCK, BLOCK_BYTES = 16, 16 * 1024
ON_CPU = Path(__file__).parents[2] / "remote" / "tests" / "sglang_on_cpu"
SGLANG_ALONE = """
import io, json, sys
from PIL import Image
import sglang
from transformers import AutoImageProcessor

given = json.load(sys.stdin)
prepare = AutoImageProcessor.from_pretrained(given["model"], local_files_only=True)
engine = sglang.Engine(
    model_path=given["model"], device="cpu", dtype="float32", attention_backend="torch_native",
    context_length=1024, max_total_tokens=4096, max_running_requests=8, disable_cuda_graph=True,
    disable_overlap_schedule=True, log_level="error", random_seed=0,
)
params = {"temperature": 0, "max_new_tokens": given["max_tokens"], "ignore_eos": True}
texts = []
for prompt, images in given["prompts"]:
    shown = [Image.open(io.BytesIO(bytes.fromhex(image))) for image in images]
    data = [{"format": "processor_output", **prepare(images=shown, return_tensors="pt")}]
    texts.append(engine.generate(input_ids=prompt, sampling_params=params, image_data=data)["output_ids"])
engine.shutdown()
print("\\n" + json.dumps(texts))
"""


def alone(model, prompts, max_tokens):
    """Return greedy responses of SGLang without Seer, which finds images by their tokens."""
    images = [(prompt, [image.hex() for image in shown]) for prompt, _, shown in prompts]
    variables = {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ON_CPU),
        "SGLANG_USE_CPU_ENGINE": "1",
        "TORCHDYNAMO_DISABLE": "1",
    }
    answer = subprocess.run(
        [str(interpreter()), "-c", SGLANG_ALONE],
        input=json.dumps({"model": str(model), "prompts": images, "max_tokens": max_tokens}),
        capture_output=True,
        text=True,
        timeout=BOUND_S,
        env=os.environ | variables,
    )
    assert answer.returncode == 0, answer.stderr[-4000:]
    return json.loads(answer.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("Qwen2-VL", marks=pytest.mark.long),
        "Qwen2.5-VL",
        pytest.param("Qwen3-VL", marks=pytest.mark.long),
    ],
)
def test_images_move_turn_are_drafted_and_survive_a_kill_with_the_tokens_of_sglang_alone(tmp_path, name):
    expect_images_to_change_no_token("sglang", "SGLang", name, tmp_path, alone)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A model that sees."""
    return write_family(tmp_path_factory.mktemp("seeing") / "model", "Qwen2.5-VL", 1, TOKENIZER)


@pytest.fixture(scope="module")
def pool(loop):
    """A pool for two instances."""
    pool = LocalPool(96 << 20)
    loop.run_until_complete(pool.start(["sglang-0", "sglang-1"]))
    yield pool
    loop.run_until_complete(pool.stop())


@pytest.fixture(scope="module")
def a(start, model, pool):
    """An instance that shares KV."""
    return start(model, kv_pool=pool)


@pytest.fixture(scope="module")
def b(start, model, pool):
    """Another, of larger blocks, whose prefills end within images."""
    return start(model, 1, kv_pool=pool, block_size=8, max_batched_tokens=16)


@pytest.fixture(autouse=True)
def cold(request):
    """Leave no KV to the next test."""
    yield
    for name in {"a", "b"} & {*request.fixturenames}:
        harness = request.getfixturevalue(name)
        harness.run(harness.engine.reset_cache())


def seeing(harness, model, pictures, seed=0, sampling=GREEDY, max_tokens=40):
    """Return a chunk whose prompt shows pictures of one size between the same texts."""
    images = [PromptImage.of(picture(number, *SIZE)) for number in pictures]
    places = ImagePlaces.read(model)
    text = [token for _ in images for token in (*range(3, 43), places.token_id, *range(43, 60))]
    ids, placed = places.place(text, [SIZE] * len(images))
    attachments = PlacedImages(images, placed)
    return structs.replace(harness.job(ids, max_tokens, seed, sampling), attachments=attachments)


def answers(harness, jobs):
    return [output.token_ids for output in harness.run(harness.chunks(jobs))]


def test_other_images_under_the_same_tokens_share_no_kv_in_the_cache_nor_in_the_pool(a, b, model):
    def respond(harness, number):
        job = seeing(harness, model, [number])
        [output] = harness.run(harness.chunks([job]))
        [place] = job.attachments["images"]
        return output, place["offset"], place["offset"] + place["length"]

    # No other test has seen these pictures.
    first, offset, end = respond(a, 101)
    again, *_ = respond(a, 101)
    assert again.token_ids == first.token_ids
    assert again.cached_tokens >= end
    other, *_ = respond(a, 102)
    assert other.cached_tokens == offset
    assert other.token_ids != first.token_ids
    unseen, *_ = respond(b, 103)
    assert 0 < unseen.pool_tokens <= offset
    moved, *_ = respond(b, 101)
    assert moved.token_ids == first.token_ids
    assert moved.pool_tokens + moved.cached_tokens > end
    assert moved.pool_tokens > 0


def test_an_aborted_chunk_drops_its_kv_behind_images_from_the_pool_and_leaves_the_prompt(a, model, pool):
    before = released(pool, "sglang-0", BLOCK_BYTES)
    job = seeing(a, model, [6], max_tokens=100)
    [begun] = a.run(a.chunks([job]))
    text = [*job.token_ids, *begun.token_ids]
    a.engine.submit(structs.replace(job, id="longer", token_ids=text, max_tokens=400))
    a.engine.abort("longer")
    a.run(a.engine.reset_cache())  # which comes after it
    there = released(pool, "sglang-0", BLOCK_BYTES) - before
    assert there == (len(text) - 1) // BLOCK - len(job.token_ids) // BLOCK


def test_images_look_alike_in_small_prefills_after_preemption_and_on_two_ranks(start, a, b, model):
    orders = [(1,), (2, 1), (1, 2), (3, 3), (4,), (5, 1)]

    def respond(harness):
        return answers(
            harness,
            [
                seeing(harness, model, order, seed, DRAWN if seed % 2 else GREEDY, 130)
                for seed, order in enumerate(orders)
            ],
        )

    expected = respond(a)
    assert respond(b) == expected
    limits = {"max_model_tokens": 512, "kv_cache_bytes": 1 << 20}
    tight = start(model, engine_args={"schedule_conservativeness": 0.05}, **limits)
    assert respond(tight) == expected
    tight.expect_preemptions()
    assert respond(start(model, tensor_parallel=2)) == expected


def test_an_image_is_encoded_anew_with_new_weights(start, model, tmp_path):
    other = write_family(tmp_path / "other", "Qwen2.5-VL", 2, TOKENIZER)
    updated, fresh = start(model), start(other)
    before = answers(updated, [seeing(updated, model, [1, 2])])
    updated.weight_version += 1
    updated.run(updated.engine.update_weights(directory(other), updated.weight_version))
    after = answers(updated, [seeing(updated, model, [1, 2])])
    assert after == answers(fresh, [seeing(fresh, other, [1, 2])])
    assert after != before


def test_log_probs_of_prompts_are_those_of_their_tokens_in_images_too(a, b, model):
    for harness in (a, b):
        job = seeing(harness, model, [1, 2], sampling=Sampling(0.0, ignore_eos=True, prompt_logprobs=20))
        [output] = harness.run(harness.chunks([job]))
        found = output.prompt_logprobs
        assert len(found.logprobs) == len(job.token_ids) - 1
        among = 0
        for token, logprob, top in zip(job.token_ids[1:], found.logprobs, found.top_logprobs, strict=True):
            known = dict(top)
            if token in known:
                among += token == job.token_ids[job.attachments["images"][0]["offset"]]
                assert logprob == pytest.approx(known[token], abs=1e-5)
            else:
                assert logprob <= min(known.values())
        assert among


def test_what_cannot_be_an_image_of_the_model_fails_its_chunk_alone(a, model):
    job = seeing(a, model, [1])
    wrong = structs.replace(seeing(a, model, [2]), id="wrong")
    wrong.attachments["images"][0]["length"] -= 1
    a.engine.submit(wrong)
    [output] = a.run(a.chunks([job]))
    a.run(a.until(lambda: "wrong" in a.answers))
    assert output.token_ids
    assert re.search(
        r"SGLang makes \d+ tokens of an image for which the prompt has \d+;", a.failures["wrong"]
    )
