"""Prompts with images: whole, moved, in turns, drafted, after a kill and resumed, on any engine."""

import asyncio
import os
import re

import msgspec
import torch
from seer_host.images import PlacedImages, PromptImage
from seer_journal import DiskJournal
from seer_session.environment import EnvironmentAnswer

from backends.tests.family_rollouts import killing, moving, tokens_of, undivided
from bench.models import FamilyRun, picture
from tests.support.eventually import aeventually

__all__ = ["BOUND_S", "expect_images_to_change_no_token"]

PLUGINS = ("divided_rollout", "context_sched", "grouped_spec")
BOUND_S = 600


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


def expect_images_to_change_no_token(engine, called, name, folder, alone, block_tokens=32):
    """Roll out prompts with images in all ways, and compare the greedy ones with the engine without Seer.

    ``called`` is the engine's name in refusals.  ``alone(model, prompts, max_tokens)`` returns the engine's
    own text for each prompt: its tokens, its places, and its images.
    """
    run = FamilyRun(engine, name, folder)
    run.block_tokens = block_tokens

    async def respond():
        async with run.started("local", PLUGINS) as runtime:
            groups = runtime.groups([*run.pictured(), *turned(run)], iteration=0)
            await runtime.use(undivided(run, runtime))
            with DiskJournal(folder / "journal") as journal:
                whole = await runtime.rollout(groups, journal=journal, environment=Showing()).wait()
            await runtime.reset_caches()

            kill = killing(runtime, f"{engine}-1")
            # At most 12 chunks are out then, and 12 were firsts: 12 moves are done.
            await runtime.use(moving(run, runtime, PLUGINS, [(36, kill)]))
            moved = await runtime.rollout(groups, environment=Showing()).wait()
            await aeventually(lambda: len(runtime.alive) == 2)  # the new one has none of the images
            [file] = (folder / "journal").iterdir()
            os.truncate(file, file.stat().st_size * 2 // 3)
            with DiskJournal(folder / "journal") as journal:
                resumed = await runtime.rollout(groups, journal=journal, environment=Showing()).wait()
            [wrong] = runtime.groups(run.pictured()[:1], iteration=1)
            return groups, whole, moved, resumed, await refusals(runtime, wrong, folder)

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
    made = re.search(rf"{called} makes (\d+) tokens of an image for which the prompt has (\d+)", other_length)
    assert made is not None
    assert int(made[1]) == int(made[2]) + 1
    assert "has changed since the prompt was read" in changed
    greedy = [group for group in groups if not group.sampling.temperature]
    assert len(greedy) == 2
    images = [
        [group.attachments.sources[each].data for each in group.attachments.digests] for group in greedy
    ]
    prompts = [list(group.prompt_token_ids) for group in greedy]
    places = [[(each["offset"], each["length"]) for each in group.attachments["images"]] for group in greedy]
    given = list(zip(prompts, places, images, strict=True))
    for group, text in zip(greedy, alone(run.models[0], given, greedy[0].max_tokens), strict=True):
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
