"""Images before the model in training: what it makes of each sequence, however that is laid out."""

import io
import random
from pathlib import Path

import pytest
import torch
from seer_host.images import PlacedImages, PromptImage, decode_image
from seer_rl.batches import micro_batches
from seer_rl.config import TorchTable, TrainTable
from seer_rl.models import HuggingFaceModel
from seer_rl.torch_trainer import TorchTrainer
from seer_rl.trainer import Sample

from seer_core.errors import ConfigError, PromptError

pillow = pytest.importorskip("PIL.Image", reason="Pillow is not installed")
pytest.importorskip("torchvision", reason="torchvision is not installed")

from seer_testing.families import VOCABULARY, write_family  # noqa: E402
from seer_worker.tokenizer.images import ImagePlaces  # noqa: E402

TOKENIZER = Path(__file__).parents[3] / "examples" / "tiny_reasoner" / "weights"
TABLE = TrainTable("", "", torch=TorchTable(micro_tokens=10_000))
PAD, VIDEO, START, END = range(VOCABULARY, VOCABULARY + 4)
SIZES = [[(60, 80)], [(200, 100), (90, 90)], []]


def picture(seed, width, height):
    file = io.BytesIO()
    noise = random.Random(seed).randbytes(3 * width * height)
    pillow.frombytes("RGB", (width, height), noise).save(file, "PNG")
    return file.getvalue()


def samples_of(directory, written):
    """Return samples with no, one and two images, in whose responses the model has ``written`` tokens."""
    draw, places = random.Random(1), ImagePlaces.read(directory)
    found = []
    for number, sizes in enumerate(SIZES):
        images = [PromptImage.of(picture(index, *size)) for index, size in enumerate(sizes)]
        ids = [token for _ in images for token in (*draw.choices(range(3, 96), k=3), START, PAD, END)]
        ids, placed = places.place([*ids, *draw.choices(range(3, 96), k=4)], sizes)
        response = [*draw.choices(range(3, 96), k=6 + number), *written, 5, 6]
        shown = PlacedImages(images, placed) if images else None
        found.append(Sample(ids, response, [0.0] * len(response), 1.0, images=shown))
    return found


@pytest.fixture(scope="module", params=["Qwen2-VL", "Qwen2.5-VL", "Qwen3-VL"])
def directory(request, tmp_path_factory):
    return write_family(tmp_path_factory.mktemp("family"), request.param, 1, TOKENIZER)


@torch.no_grad()
def logprobs_of(model, samples, *, packed=False):
    return torch.cat([model.logprobs(batch) for batch in micro_batches(samples, 10_000, packed=packed)])


@torch.no_grad()
def by_transformers(model, sample):
    """Return what the model makes of a sequence in which every token of images is one of an image."""
    ids = torch.tensor([[*sample.prompt, *sample.response]])
    images = [decode_image(image.read()) for image, _, _ in sample.images.placed()]
    pixels = model.images._processor(images=images, return_tensors="pt")
    kinds = (ids == PAD).int()
    logits = model._model(input_ids=ids, mm_token_type_ids=kinds, **pixels, use_cache=False).logits[0]
    return logits.log_softmax(-1)[len(sample.prompt) - 1 : -1].gather(1, ids[0, len(sample.prompt) :, None])


def test_log_probs_are_those_of_the_model_alone_in_rows_and_packed(directory):
    model = HuggingFaceModel(TABLE, directory)
    assert model.vocab_size == VOCABULARY + 8
    samples = samples_of(directory, [])
    for sample in samples[:2]:
        assert torch.equal(logprobs_of(model, [sample]), by_transformers(model, sample)[:, 0])
    samples = samples_of(directory, [PAD, VIDEO, START, PAD])  # which stand for no image in a response
    longest_first = sorted(samples, key=lambda each: -len(each.prompt) - len(each.response))
    alone = torch.cat([logprobs_of(model, [sample]) for sample in longest_first])
    for packed in (False, True):
        assert (logprobs_of(model, samples, packed=packed) - alone).abs().max() < 1e-5
    blind = [Sample(each.prompt, each.response, each.logprobs, 1.0) for each in longest_first[-1:]]
    assert torch.equal(logprobs_of(model, blind), logprobs_of(model, longest_first[-1:]))


def test_what_the_model_has_written_changes_what_follows_as_any_token_does(directory):
    model = HuggingFaceModel(TABLE, directory)
    found = [logprobs_of(model, samples_of(directory, [token])[:1])[-2:] for token in (PAD, VIDEO, 3)]
    assert all(not torch.equal(found[one], found[two]) for one, two in ((0, 1), (0, 2), (1, 2)))


def test_the_tower_is_trained_too_and_a_file_that_has_changed_is_refused(directory, tmp_path):
    trainer = TorchTrainer(TABLE, directory, 0)
    assert trainer.takes_images
    path = tmp_path / "a.png"
    path.write_bytes(picture(9, 60, 80))
    sample = samples_of(directory, [])[0]
    seen = PlacedImages(
        [PromptImage.of(path.read_bytes(), path)], [(at, n) for _, at, n in sample.images.placed()]
    )
    sample = Sample(sample.prompt, sample.response, sample.logprobs, 1.0, images=seen)
    before = {name: each.clone() for name, each in trainer.tensors() if "visual" in name}
    trainer.train([sample])
    after = dict(trainer.tensors())
    assert before
    assert all(not torch.equal(each, after[name]) for name, each in before.items() if each.ndim > 1)
    path.write_bytes(picture(10, 60, 80))
    assert trainer.train([sample])["trained_tokens"]  # made ready already
    with pytest.raises(PromptError, match="has changed since the prompt was read"):
        TorchTrainer(TABLE, directory, 0).train([sample])


def test_a_model_that_does_not_say_how_its_images_are_prepared_is_refused(directory, tmp_path):
    for file in directory.iterdir():
        if "preprocessor" not in file.name:
            (tmp_path / file.name).symlink_to(file)
    with pytest.raises(ConfigError, match=r"cannot read how .* prepares images"):
        HuggingFaceModel(TABLE, tmp_path)


def test_samples_are_not_packed_where_a_layer_would_carry_its_state_across_them(tmp_path):
    directory = write_family(tmp_path, "Qwen3.5", 1, TOKENIZER)
    with pytest.raises(ConfigError, match=r"\[train.torch\].packed: .* linear attention"):
        HuggingFaceModel(TrainTable("", "", torch=TorchTable(packed=True)), directory)
    assert HuggingFaceModel(TABLE, directory).images is not None
