"""The images of a worker: made ready once, and anew when others took their room."""

import pytest
from seer_worker.process.adapter import Rejected
from seer_worker.process.images import PreparedImages

from bench.models import picture
from seer_core.errors import PromptError
from seer_core.model import Sampling
from seer_core.ports.engine import ChunkJob

PLACE = 9


def showing(*digests, length=2):
    """Return a chunk that shows images, each in two places before a token of text."""
    ids = [token for _ in digests for token in (PLACE, PLACE, 1)]
    places = [{"digest": each, "offset": 3 * i, "length": length} for i, each in enumerate(digests)]
    return ChunkJob("c", "r", "g", ids, len(ids), 4, Sampling(), 0, 0, attachments={"images": places})


def holding(most_bytes, tokens=2):
    """Return images of one worker, and the list of the widths of those that it has made ready."""
    made = []

    def prepare(image, token_id):
        assert token_id == PLACE
        if image.width == 66:
            raise PromptError("it is too blue")
        made.append(image.width)
        return image.width, tokens, 100

    images = PreparedImages("The engine", prepare, "do otherwise", most_bytes)
    for width in (60, 62, 64, 66):
        images.hold(str(width), picture(width, width, 8))
    return images, made


def test_an_image_is_made_ready_once_while_there_is_room_for_it():
    images, made = holding(200)
    found = images.of(showing("60", "62", "60"))
    assert [(each.digest, each.prepared, each.offset, each.length) for each in found] == [
        ("60", 60, 0, 2),
        ("62", 62, 3, 2),
        ("60", 60, 6, 2),
    ]
    images.of(showing("64"))  # which takes the room of that needed longest ago
    assert made == [60, 62, 64]
    images.of(showing("60"))
    assert made == [60, 62, 64]
    images.of(showing("62"))
    assert made == [60, 62, 64, 62]


def test_more_than_there_is_room_for_are_ready_one_after_the_other():
    images, made = holding(0)
    assert [each.prepared for each in images.of(showing("60", "62", "60"))] == [60, 62, 60]
    assert made == [60, 62, 60]


def test_what_is_no_image_of_the_chunk_is_refused_with_one_sentence():
    images, _ = holding(200)
    assert images.of(showing()) == []
    images.drop(["60", "another"])
    for digest, flaw in (
        ("60", "the image 60 was not sent to this instance"),
        ("66", "The engine refuses an image: it is too blue"),
    ):
        with pytest.raises(Rejected, match=flaw):
            images.of(showing(digest))
    with pytest.raises(
        Rejected, match=r"The engine makes 2 tokens of an image .* prompt has 1; do otherwise"
    ):
        images.of(showing("62", length=1))
