"""Prompts with images: the tokens of vLLM's own, wherever and however a response is written."""

import asyncio
import json
import os
import re
import subprocess
import sys

import msgspec
import pytest
import torch

from tests.support.installed import skip_without

pytest.register_assert_rewrite("backends.tests.families")
pytest.importorskip("seer_kv_local", reason="backends/kv_local is not installed")
skip_without("vllm")
skip_without("PIL")

from seer_host.images import PlacedImages, PromptImage  # noqa: E402
from seer_journal import DiskJournal  # noqa: E402
from seer_session.environment import EnvironmentAnswer  # noqa: E402

from backends.tests.family_rollouts import killing, moving, tokens_of, undivided  # noqa: E402
from bench.models import FamilyRun, picture  # noqa: E402
from tests.support.eventually import aeventually  # noqa: E402

pytestmark = pytest.mark.engine

PLUGINS = ("divided_rollout", "context_sched", "grouped_spec")
BOUND_S = 600
VLLM_ALONE = """
import io, json, sys
from PIL import Image
from vllm import LLM, SamplingParams

given = json.load(sys.stdin)
llm = LLM(given["model"], dtype="float32", enforce_eager=True, max_model_len=1024, max_num_seqs=16,
          kv_cache_memory_bytes=32 << 20)
texts = []
for prompt, images in given["prompts"]:
    data = {"image": [Image.open(io.BytesIO(bytes.fromhex(image))) for image in images]}
    params = SamplingParams(temperature=0, max_tokens=given["max_tokens"], ignore_eos=True)
    [answer] = llm.generate({"prompt_token_ids": prompt, "multi_modal_data": data}, params)
    texts.append([list(answer.prompt_token_ids), list(answer.outputs[0].token_ids)])
print("\\n" + json.dumps(texts))
"""


def alone(run, groups, image_token):
    """Return prompts and greedy responses of vLLM without Seer, which fills the places of images itself."""
    prompts = []
    for group in groups:
        ids, end = [], 0
        for place in group.attachments["images"]:
            ids += [*group.prompt_token_ids[end : place["offset"]], image_token]
            end = place["offset"] + place["length"]
        images = [group.attachments.sources[digest].data.hex() for digest in group.attachments.digests]
        prompts.append(([*ids, *group.prompt_token_ids[end:]], images))
    given = {"model": str(run.models[0]), "prompts": prompts, "max_tokens": groups[0].max_tokens}
    answer = subprocess.run(
        [sys.executable, "-c", VLLM_ALONE],
        input=json.dumps(given),
        capture_output=True,
        text=True,
        timeout=BOUND_S,
        env={**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind"},
    )
    assert answer.returncode == 0, answer.stderr[-4000:]
    return json.loads(answer.stdout.splitlines()[-1])


class Showing:
    """Answers the first turns with an image each, and text, and ends the response with the third."""

    async def step(self, trajectory, turn):
        if turn.number == 2:
            return EnvironmentAnswer(done=True)
        image = {"type": "image", "image": picture(10 * trajectory.index + turn.number, 80, 60)}
        content = [{"type": "text", "text": "1 + 1"}, image, {"type": "text", "text": "2"}]
        return EnvironmentAnswer(messages=[{"role": "user", "content": content}])


def turned(run):
    """Return prompts with images and without any, whose responses have turns."""
    records = [run.pictured()[1], run.records()[3]]
    changes = {"stop_token_ids": list(range(3, 96, 6)), "max_tokens": 240}
    return [each | changes | {"group_id": f"turned-{number}"} for number, each in enumerate(records)]


def in_turns(result):
    return sorted(
        (each for each in result.completions if each.group_id.startswith("turned")),
        key=lambda each: each.request_id,
    )


def furthest(groups, result, model):
    """Return how far the engine's log-probs are from those of the model in training, in nats at most."""
    from seer_rl import batches, models, trainer
    from seer_rl.config import TrainTable

    prompts = {group.id: group for group in groups}
    samples = []
    for each in result.completions:
        group = prompts[each.group_id]
        images = each.attachments or group.attachments
        mask = bytes(each.loss_mask) if each.turns else None
        shown = images if isinstance(images, PlacedImages) else None
        prompt = group.prompt_token_ids
        samples.append(trainer.Sample(prompt, each.token_ids, each.logprobs, 1.0, mask, images=shown))
    seeing = models.HuggingFaceModel(TrainTable("", ""), model)
    with torch.no_grad():
        return max(
            (seeing.logprobs(batch) - batch.engine_logprobs).abs().max().item()
            for batch in batches.micro_batches(samples, 4096, packed=False)
        )


@pytest.mark.parametrize(
    "name",
    [
        "Qwen2-VL",
        pytest.param("Qwen2.5-VL", marks=pytest.mark.long),
        pytest.param("Qwen3-VL", marks=pytest.mark.long),
    ],
)
def test_images_move_turn_are_drafted_and_survive_a_kill_with_the_tokens_of_vllm_alone(tmp_path, name):
    run = FamilyRun("vllm", name, tmp_path)
    run.block_tokens = 32

    async def respond():
        async with run.started("local", PLUGINS) as runtime:
            groups = runtime.groups([*run.pictured(), *turned(run)], iteration=0)
            await runtime.use(undivided(run, runtime))
            with DiskJournal(tmp_path / "journal") as journal:
                whole = await runtime.rollout(groups, journal=journal, environment=Showing()).wait()
            await runtime.reset_caches()

            kill = killing(runtime, "vllm-1")
            # At most 12 chunks are out then, and 12 were firsts: 12 moves are done.
            await runtime.use(moving(run, runtime, PLUGINS, [(36, kill)]))
            moved = await runtime.rollout(groups, environment=Showing()).wait()
            await aeventually(lambda: len(runtime.alive) == 2)  # the new one has none of the images
            [file] = (tmp_path / "journal").iterdir()
            os.truncate(file, file.stat().st_size * 2 // 3)
            with DiskJournal(tmp_path / "journal") as journal:
                resumed = await runtime.rollout(groups, journal=journal, environment=Showing()).wait()
            [wrong] = runtime.groups(run.pictured()[:1], iteration=1)
            return groups, whole, moved, resumed, await refusals(runtime, wrong, tmp_path)

    groups, whole, moved, resumed, (other_length, changed) = asyncio.run(asyncio.wait_for(respond(), BOUND_S))
    assert all(len(each.chunks) <= len(each.turns) for each in whole.completions)
    assert moved.summary.instances_lost == 1
    assert moved.summary.migrations > 10
    assert moved.summary.pool_tokens > 0
    assert moved.summary.accepted_tokens > 0
    assert tokens_of(moved) == tokens_of(whole)
    assert resumed.summary.migrations > 10
    assert 0 < resumed.summary.resumed_tokens < sum(map(len, tokens_of(whole).values()))
    assert tokens_of(resumed) == tokens_of(whole)
    for one, other in zip(*map(in_turns, (whole, moved)), strict=True):
        assert len(one.turns) == len(other.turns) == 3
        assert one.attachments == other.attachments
        assert len(one.attachments["images"]) == 2 + (2 if one.group_id == "turned-0" else 0)
    assert furthest(groups, whole, run.models[0]) < 1e-4
    made = re.search(r"vLLM makes (\d+) tokens of an image for which the prompt has (\d+)", other_length)
    assert made is not None
    assert int(made[1]) == int(made[2]) + 1
    assert "has changed since the prompt was read" in changed
    greedy = [group for group in groups if not group.sampling.temperature]
    assert len(greedy) == 2
    image_token = greedy[0].prompt_token_ids[greedy[0].attachments["images"][0]["offset"]]
    for group, (prompt, text) in zip(greedy, alone(run, greedy, image_token), strict=True):
        assert prompt == list(group.prompt_token_ids)
        for index in range(group.n):
            assert text == tokens_of(whole)[f"{group.id}/{index}"]


async def refusals(runtime, group, folder):
    """Return why chunks with a wrong length of an image, and with a file that has changed, fail."""
    [image], [place] = group.attachments.sources.values(), group.attachments["images"]
    path = folder / "other.png"
    path.write_bytes(picture(9, 60, 80))
    changed = PromptImage("0" * 32, image.width, image.height, path)
    wrong = [
        PlacedImages([image], [(place["offset"], place["length"] - 1)]),
        PlacedImages([changed], [(place["offset"], place["length"])]),
    ]
    groups = [
        msgspec.structs.replace(group, id=f"wrong-{number}", n=1, attachments=attachments)
        for number, attachments in enumerate(wrong)
    ]
    result = await runtime.rollout([*groups, group]).wait()
    found = {each.group_id: each for each in result.completions}
    assert found[group.id].whole
    assert {found[each.id].finish_reason for each in groups} == {"error"}
    return [found[each.id].error for each in groups]
