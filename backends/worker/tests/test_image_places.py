"""The tokens of images: as many as transformers makes, at the places of a prompt, and sent once."""

import json
import random

import pytest
from seer_host.images import PlacedImages, PromptImage
from seer_worker.client.images import HeldImages, read_all
from seer_worker.tokenizer.images import ImagePlaces
from seer_worker.wire import DropImages, HoldImage

from seer_core.errors import ConfigError, PromptError

CONFIG = {"model_type": "qwen2_vl", "image_token_id": 9, "vision_config": {"patch_size": 14}}
SIZE = {"shortest_edge": 3136, "longest_edge": 12_544}


def written(folder, config=CONFIG, **files):
    for name, content in {"config": config, **files}.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return ImagePlaces.read(folder)


def test_the_limits_of_a_model_are_read_from_the_file_that_has_them(tmp_path):
    assert written(tmp_path) == ImagePlaces(9, 28, 3136, 1_003_520)
    places = ImagePlaces(9, 28, 3136, 12_544)
    assert written(tmp_path, preprocessor_config={"size": SIZE}) == places
    pixels = {"size": SIZE, "min_pixels": 784, "max_pixels": 1568}
    assert written(tmp_path, preprocessor_config=pixels) == ImagePlaces(9, 28, 784, 1568)
    assert written(tmp_path, processor_config={"image_processor": {"size": SIZE}}) == places


def test_other_models_take_no_images_that_can_be_placed(tmp_path):
    assert written(tmp_path, {"model_type": "qwen2"}) is None
    assert written(tmp_path, CONFIG | {"model_type": "gemma3"}) is None
    with pytest.raises(ConfigError, match="no model's configuration"):
        written(tmp_path, CONFIG | {"vision_config": {"patch_size": "a"}})


def test_an_image_takes_as_many_tokens_as_transformers_makes():
    library = pytest.importorskip("transformers.models.qwen2_vl.image_processing_qwen2_vl")
    places, draw = ImagePlaces(9, 28, 3136, 12_544 * 4), random.Random(5)
    for _ in range(2000):
        width, height = (max(1, int(2 ** draw.uniform(2, 11))) for _ in range(2))
        if max(width, height) > 200 * min(width, height):
            with pytest.raises(PromptError, match="is too narrow"):
                places.tokens(width, height)
            continue
        rows, columns = library.smart_resize(height, width, 28, places.min_pixels, places.max_pixels)
        assert places.tokens(width, height) == rows * columns // 28**2


def test_each_place_becomes_as_many_tokens_as_its_image_takes():
    places = ImagePlaces(9, 28, 784, 1 << 20)
    ids, found = places.place([1, 9, 2, 9], [(56, 28), (84, 28)])
    assert (ids, found) == ([1, 9, 9, 2, 9, 9, 9], [(1, 2), (4, 3)])
    # Frameworks bring prompts in which their own processor has filled the places in.
    assert places.place([1, 9, 9, 2, 9, 9, 9], [(56, 28), (84, 28)]) == (ids, found)
    assert places.place((9, 9, 9, 9, 9), [(56, 28), (84, 28)]) == ([9] * 5, [(0, 2), (2, 3)])
    for wrong in ([9, 9, 9, 1, 9, 9], [9, 9, 9, 9], [9, 9, 1, 9, 9, 9, 9]):
        with pytest.raises(PromptError, match="and 2 images that take 5 tokens; give one place for each"):
            places.place(wrong, [(56, 28), (84, 28)])
    for sizes in ([], [(28, 28)], [(28, 28)] * 3):
        with pytest.raises(PromptError, match=f"has 2 places for images, and {len(sizes)} images"):
            places.place([1, 9, 2, 9], sizes)


def prompt(*names):
    images = [PromptImage(name, 1, 1, data=name.encode() * 10) for name in names]
    return PlacedImages(images, [(number, 1) for number in range(len(images))])


def test_an_image_is_sent_once_and_the_oldest_that_no_chunk_needs_is_dropped():
    held = HeldImages(most_bytes=25)
    assert list(held.open("1", {"further": 1}, {})) == []
    assert list(held.open("1", prompt("a", "b", "a"), {})) == [
        HoldImage("a", b"a" * 10),
        HoldImage("b", b"b" * 10),
    ]
    assert list(held.open("2", prompt("a"), {})) == []
    assert list(held.open("3", prompt("c"), {})) == [HoldImage("c", b"c" * 10)]
    held.close("1")
    held.close("2")
    assert list(held.open("4", prompt("a", "d"), {})) == [HoldImage("d", b"d" * 10), DropImages(("b",))]
    held.close("3")
    held.close("4")
    held.close("4")
    assert list(held.open("5", prompt("b"), {})) == [HoldImage("b", b"b" * 10), DropImages(("c", "a"))]
    held.clear()
    assert list(held.open("6", prompt("b"), {})) == [HoldImage("b", b"b" * 10)]


def test_an_image_that_has_gone_is_an_error_of_its_chunk(tmp_path):
    gone = PromptImage("a", 1, 1, tmp_path / "a.png")
    with pytest.raises(PromptError, match="is no file"):
        read_all(HeldImages().unread(PlacedImages([gone], [(0, 1)])))
