"""Prompts with images, over slime's own servers, which are stand-ins here."""

import base64
import io

import pytest
import seer_slime.prompts
import torch
from PIL import Image
from seer_slime import generate_rollout

from seer_core.errors import ConfigError

PLACE = 4
"""The token of an image's places."""


class Processor:
    """A processor of slime's models: an image has as many places as it is wide."""

    def __call__(self, text, images, **_):
        ids = [5, *[PLACE] * images[0].width, len(text)]
        pixels = torch.full((images[0].width, 2), float(images[0].getpixel((0, 0))[0]))
        return {"input_ids": [ids], "attention_mask": [[1] * len(ids)], "pixel_values": pixels}


@pytest.fixture
def seeing(source, monkeypatch):
    """A data source whose prompts of odd numbers have an image, each sample a copy of it."""
    monkeypatch.setattr(seer_slime.prompts, "processor_of", lambda *_, **__: Processor())
    plain = source.get_samples

    def get_samples(count):
        groups = plain(count)
        for group in groups:
            for sample in group if group[0].group_index % 2 else ():
                image = Image.new("RGB", (3, 3), (10 * sample.group_index, 0, 0))
                sample.multimodal_inputs = {"images": [image], "videos": None}
        return groups

    source.get_samples = get_samples
    return source


def shown(request):
    """Return the colours of a request's images."""
    found = [base64.b64decode(each.rpartition(",")[2]) for each in request["image_data"]]  # a URL's end
    images = [Image.open(io.BytesIO(each)) for each in found]
    return [image.getpixel((0, 0))[0] for image in images]


def test_images_go_to_the_servers_with_whole_responses_and_their_tensors_to_the_trainer(
    kept, seeing, servers
):
    output = generate_rollout(kept(4), 0, seeing)
    mine = [each for server in servers.requests for each in server if len(each["input_ids"]) > 3]
    seen = [each for each in mine if "image_data" in each]
    assert sorted(colour for each in seen for colour in shown(each)) == [10] * 3 + [30] * 3
    assert {each["sampling_params"]["max_new_tokens"] for each in seen} == {16}
    assert 4 in {each["sampling_params"]["max_new_tokens"] for each in mine if each not in seen}
    for group in output.samples:
        number = group[0].group_index
        for sample in group:
            assert sample.response_length == 16
            if number % 2:
                assert sample.tokens[:4] == [5, PLACE, PLACE, PLACE]
                assert set(sample.multimodal_train_inputs) == {"pixel_values"}
                assert (sample.multimodal_train_inputs["pixel_values"] == 10 * number).all()
            else:
                assert sample.multimodal_train_inputs is None


def test_slimes_own_client_gets_the_images_of_what_goes_on_without_seer(
    kept, seeing, servers, own_client, breaking
):
    breaking(3)
    output = generate_rollout(kept(4), 0, seeing)
    assert output.metrics["rollout/seer/fallbacks"] == len(own_client) > 0
    colours = sorted(shown(each)[0] for each in servers.routed if "image_data" in each)
    assert colours == sorted(10 * each.group_index for each in own_client if each.multimodal_inputs)
    assert colours
    for sample in (sample for group in output.samples for sample in group):
        assert sample.response_length == len(sample.rollout_log_probs) == 16


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"images": [1], "videos": [2]}, "a prompt has images and videos, and slime's servers get images"),
        ({"images": [1]}, "has no processor of images"),
    ],
)
def test_what_slimes_servers_do_not_get_is_refused(kept, seeing, monkeypatch, given, words):
    monkeypatch.setattr(seer_slime.prompts, "processor_of", lambda *_, **__: None)
    get_samples = seeing.get_samples

    def others(count):
        groups = get_samples(count)
        for group in groups:
            for sample in group:
                sample.multimodal_inputs = given
        return groups

    seeing.get_samples = others
    with pytest.raises(ConfigError, match=words):
        generate_rollout(kept(4), 0, seeing)


def test_engines_of_seers_own_get_no_images(args, seeing):
    with pytest.raises(ConfigError, match="go to slime's own servers alone"):
        generate_rollout(args, 0, seeing)


def test_a_conversation_is_refused(kept, source):
    get_samples = source.get_samples

    def conversations(count):
        groups = get_samples(count)
        for group in groups:
            group[0].prompt = [{"role": "user", "content": "a"}]
        return groups

    source.get_samples = conversations
    with pytest.raises(ConfigError, match="give --apply-chat-template"):
        generate_rollout(kept(4), 0, source)
