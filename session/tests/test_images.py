"""Prompts with images: what names them, where they may be, and what becomes of their places."""

import asyncio
import base64
import io
import json
import os

import pytest
from msgspec.structs import replace
from PIL import Image
from seer_host.config_files import RolloutTable
from seer_host.images import IMAGE_PART, PlacedImages, PromptImage
from seer_host.tables import TurnsTable
from seer_session.environment import EnvironmentAnswer, ModelTurn, Trajectory
from seer_session.environment_calls import EnvironmentCalls, Question
from seer_session.group_checks import problem_of, undivided_attachments
from seer_session.images import ImageReader
from seer_session.prompts import make_groups, read_prompts

from seer_core.errors import PromptError
from seer_core.ports.clock import RealClock
from seer_core.ports.engine import ModelInfo
from tests.support.eventually import PATIENCE_S

DEFAULTS = RolloutTable(n=2, max_tokens=8)
SEEING = ModelInfo(1000, 200, takes_images=True)
PLACE = 7


def picture(colour="red", size=(4, 3)):
    file = io.BytesIO()
    Image.new("RGB", size, colour).save(file, "PNG")
    return file.getvalue()


def url(data):
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


class Seeing:
    """A tokenizer of letters, with one place for each image, which takes as many tokens as it is wide."""

    def encode(self, text):
        return [PLACE if letter == "#" else ord(letter) for letter in text]

    encode_part = encode

    def decode(self, token_ids):
        return "".join(map(chr, token_ids))

    def encode_chat(self, messages, template_kwargs=None):
        ids = []
        for message in messages:
            content = message["content"]
            for part in [{"text": content}] if isinstance(content, str) else content:
                ids += [PLACE] if part is IMAGE_PART else self.encode(part["text"])
        return ids

    def place_images(self, token_ids, sizes):
        found, places, widths = [], [], [width for width, _ in sizes]
        if list(token_ids).count(PLACE) != len(widths):
            raise PromptError("not as many places")
        for token in token_ids:
            count = widths[len(places)] if token == PLACE else 1
            if token == PLACE:
                places.append((len(found), count))
            found += [token] * count
        return found, places


def groups(*records, model=SEEING, defaults=DEFAULTS):
    return make_groups(records, defaults, model, Seeing())


def chat(*parts):
    return [{"role": "user", "content": list(parts)}]


def text(words):
    return {"type": "text", "text": words}


def of_url(name):
    return {"type": "image_url", "image_url": {"url": name}}


def refusal(record, **more):
    with pytest.raises(PromptError) as caught:
        groups(record, **more)
    return str(caught.value).removeprefix("prompt 1: ")


def test_every_form_that_names_an_image_makes_the_same_prompt():
    data = picture()
    forms = [
        {"messages": chat(text("a"), of_url(url(data)), text("b"))},
        {"messages": chat(text("a"), {"type": "image_url", "image_url": url(data)}, text("b"))},
        {
            "messages": chat(
                text("a"), {"type": "input_image", "image_url": url(data), "detail": "auto"}, text("b")
            )
        },
        {"messages": chat(text("a"), {"type": "image", "image": data}, text("b"))},
        {"messages": chat(text("a"), {"type": "image"}, text("b")), "images": [url(data)]},
        {"prompt": "a#b", "images": [data]},
        {"prompt_token_ids": [97, PLACE, 98], "images": [memoryview(data)]},
    ]
    found = [groups(form)[0] for form in forms]
    assert {group.prompt_token_ids for group in found} == {(97, PLACE, PLACE, PLACE, PLACE, 98)}
    assert len({(group.id, group.seed) for group in found}) == 1
    [place] = found[0].attachments["images"]
    assert (place["offset"], place["length"]) == (1, 4)


def test_another_image_of_the_same_size_is_another_prompt_and_their_order_counts():
    red, blue = url(picture("red")), url(picture("blue"))
    orders = [(red, red), (red, blue), (blue, red)]
    found = groups(*({"messages": chat(of_url(a), of_url(b))} for a, b in orders))
    assert len({group.prompt_token_ids for group in found}) == 1
    assert len({group.id for group in found}) == len({group.seed for group in found}) == 3
    [again] = groups({"messages": chat(of_url(red), of_url(blue))})
    assert again.id == found[1].id


def test_paths_are_read_beneath_the_folder_of_the_prompts_file_or_the_roots_alone(tmp_path):
    inside, outside = tmp_path / "prompts", tmp_path / "elsewhere"
    for folder in (inside, outside):
        folder.mkdir()
        (folder / "a.png").write_bytes(picture())
    (inside / "link.png").symlink_to(outside / "a.png")
    (inside / "circle.png").symlink_to("circle.png")
    path = inside / "prompts.jsonl"

    def read(name, defaults=DEFAULTS):
        path.write_text(json.dumps({"messages": chat(of_url(name))}))
        return read_prompts(path, defaults, SEEING, Seeing()).groups[0]

    expected = read("a.png")
    assert {read(name).id for name in ("./a.png", str(inside / "a.png"), f"file://{inside}/a.png")} == {
        expected.id
    }
    for name in ("../elsewhere/a.png", str(outside / "a.png"), "link.png"):
        with pytest.raises(PromptError, match=f"message 0: the image .* is not beneath {inside}; name its"):
            read(name)
    with pytest.raises(PromptError, match="cannot be read: No such file"):
        read("b.png")
    with pytest.raises(PromptError, match=r"the image .circle\.png. cannot be read"):
        read("circle.png")
    with pytest.raises(PromptError, match="is no file"):
        read(".")
    elsewhere = replace(DEFAULTS, image_roots=(str(outside),))
    assert (
        read("../elsewhere/a.png", elsewhere).id == read(str(outside / "a.png"), elsewhere).id == expected.id
    )
    with pytest.raises(PromptError, match=f"is not beneath {outside}"):
        read("a.png", elsewhere)
    [from_python] = groups({"prompt": "#", "images": [outside / "a.png"]}, defaults=elsewhere)
    assert from_python.prompt_token_ids == (PLACE,) * 4


def test_a_pipe_is_no_image_and_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "a.png")
    with pytest.raises(PromptError, match="is no file"):
        ImageReader([tmp_path]).one("a.png")


def test_an_image_that_recurs_is_read_once(tmp_path):
    (tmp_path / "a.png").write_bytes(picture())
    reader = ImageReader([tmp_path])
    assert reader.one("a.png") is reader.one("./a.png")
    assert reader.one(url(picture())) is reader.one(picture())


@pytest.mark.parametrize(
    ("name", "fact"),
    [
        ("https://example.org/a.png", "'https://example.org/a.png' is a URL, and Seer fetches none"),
        ("s3://bucket/a.png", "is a URL, and Seer fetches none"),
        ("a.png", "the image 'a.png' is a path, and [rollout].image_roots names no directory for paths"),
        ("file:///etc/passwd", "the image '/etc/passwd' is a path, and [rollout].image_roots names no"),
        ("", "'' is no path of an image"),
        ("a\0.png", "is no path of an image"),
        (5, "an image is 5; give a path, a data URL or bytes"),
        ("data:image/png;base64,AAA%", "the data URL of an image is no base64"),
        ("data:image/png;base64,AAAA", "it is no image that can be read"),
        ("data:image/png,AAAA", "is no data URL of an image; write data:image/png;base64,..."),
        ("data:text/html;base64,AAAA", "is no data URL of an image"),
        (b"", "it is no image that can be read"),
    ],
)
def test_what_names_no_image_is_refused_with_its_place(name, fact):
    assert fact in refusal({"prompt": "#", "images": [name]})
    assert refusal({"prompt": "#", "images": [name]}).startswith("image 0: ")
    if name:
        assert refusal({"messages": chat(of_url(name))}).startswith("message 0: ")


@pytest.mark.parametrize(
    ("record", "fact"),
    [
        ({"prompt": "##", "images": [picture()]}, "not as many places"),
        ({"prompt": "a", "images": [picture()]}, "not as many places"),
        (
            {"messages": chat({"type": "image"})},
            "1 images of the messages have no name, and `images` names 0; give as many of both",
        ),
        (
            {"messages": chat({"type": "image"}), "images": [picture()] * 2},
            "1 images of the messages have no name, and `images` names 2; give as many of both",
        ),
        (
            {"messages": chat(of_url(url(picture()))), "images": [picture()]},
            "0 images of the messages have no name, and `images` names 1; give as many of both",
        ),
        ({"prompt": "#" * 257, "images": [picture()] * 257}, "the prompt has 257 images; it may have 256"),
        (
            {"messages": chat({"type": "image_url", "image_url": {"url": "a", "detail": "low"}})},
            "message 0 has an image with 'detail'; leave that out",
        ),
        ({"messages": chat({"type": "image", "image": "a", "uuid": "b"})}, "has an image with 'uuid'"),
        ({"prompt": "#", "images": [picture(size=(199, 1))]}, "prompt (199) and max_tokens (8) exceed"),
        (
            {"prompt": "#", "images": [picture()], "attachments": {"a": 1}},
            "give images or attachments, and not both",
        ),
    ],
)
def test_images_that_fit_no_prompt_are_refused(record, fact):
    assert fact in refusal(record)


@pytest.mark.parametrize("record", [{"prompt": "#", "images": [b""]}, {"messages": chat(of_url("a"))}])
def test_images_are_refused_where_the_engine_takes_none(record):
    fact = "this engine takes no images with this model; leave them out"
    assert refusal(record, model=ModelInfo(1000, 200)) == fact
    [group] = groups({"prompt": "#", "images": [picture()]})
    assert problem_of(group, SEEING) is None
    assert undivided_attachments(group.attachments, SEEING) == []
    assert problem_of(group, ModelInfo(1000, 200, divided_attachments=())) == fact


def answered(answer, question, model=SEEING, roots=()):
    """Return what becomes of an environment's answer, or why it is refused."""

    class Showing:
        async def step(self, trajectory, turn):
            return answer

    class Outcome:
        def extend(self, *extension):
            found.set_result(extension)

        def extension_failed(self, request_id, reason):
            found.set_result(reason)

    async def asked():
        calls = EnvironmentCalls(
            Showing(), TurnsTable(), RealClock(), model, Seeing(), Outcome(), image_roots=roots
        )
        calls.ask(question)
        return await asyncio.wait_for(found, PATIENCE_S)

    with asyncio.Runner() as runner:
        found = runner.get_loop().create_future()
        return runner.run(asked())


def asked(left=100, attachments={}):  # noqa: B006, never changed
    trajectory = Trajectory("g/0", "g", 0, 7, (1, 2, 3), {}, {})
    return Question(trajectory, ModelTurn(0, [5, 6], "ab", None, left), tuple, 5, attachments)


def test_an_answer_with_images_has_their_tokens_and_the_response_those_before_and_after(tmp_path):
    before = PlacedImages([PromptImage.of(picture("blue"))], [(1, 2)])
    (tmp_path / "a.png").write_bytes(picture())
    ways = [
        EnvironmentAnswer(token_ids=[97, PLACE, 98], images=[picture()]),
        EnvironmentAnswer(text="a#b", images=[tmp_path / "a.png"]),
        EnvironmentAnswer(text="a#b", images=[url(picture())]),
    ]
    for answer in ways:
        name, token_ids, _, done, images = answered(answer, asked(attachments=before), roots=[str(tmp_path)])
        assert (name, token_ids, done) == ("g/0", [97, *[PLACE] * 4, 98], False)
        assert [(at, length) for _, at, length in images.placed()] == [(1, 2), (6, 4)]
        assert images.digests == [before.digests[0], PromptImage.of(picture()).digest]
    _, token_ids, _, _, images = answered(ways[0], asked(left=4))
    assert len(token_ids) == 5  # one more than there is room for, and so no whole image
    assert images is None
    _, token_ids, _, _, images = answered(EnvironmentAnswer(text="ab"), asked(attachments=before))
    assert (token_ids, images) == ([97, 98], None)


@pytest.mark.parametrize(
    ("answer", "fact"),
    [
        (EnvironmentAnswer(text="a", images=[picture()]), "its environment's answer: not as many places"),
        (EnvironmentAnswer(text="#", images=["a.png"]), "answer: image 0: the image 'a.png' is a path"),
        (EnvironmentAnswer(text="#", images=[b"x"]), "its environment's answer: image 0: it is no image"),
        (EnvironmentAnswer(text="#" * 300, images=[picture()] * 300), "has 300 images; it may have 256"),
    ],
)
def test_an_answer_whose_images_cannot_be_taken_ends_its_response_by_an_error(answer, fact):
    assert fact in answered(answer, asked(left=2000))


def test_answers_with_images_are_refused_where_none_are_taken():
    answer = EnvironmentAnswer(text="#", images=[picture()])
    assert "which this engine does not take" in answered(answer, asked(), ModelInfo(1000, 200))
    assert "the prompt has attachments" in answered(answer, asked(attachments={"a": 1}))
