"""Images of prompts: alike in every process, upright and of three colours, or refused with a sentence."""

import io
import struct
import zlib

import pytest
from PIL import Image
from seer_host import images
from seer_host.images import PlacedImages, PromptImage, decode_image, png_of

from seer_core.errors import ConfigError, PromptError

RED, WHITE = (255, 0, 0), (255, 255, 255)


def saved(image, form="PNG", **more):
    file = io.BytesIO()
    image.save(file, form, **more)
    return file.getvalue()


def chunk(kind, content):
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def png(width, height):
    """Return the header of a PNG, and next to nothing behind it."""
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"\0" * 1000))


def test_an_image_is_named_by_its_bytes_and_read_again_from_its_file(tmp_path):
    data = saved(Image.new("RGB", (3, 2), RED))
    path = tmp_path / "a.png"
    path.write_bytes(data)
    held, filed = PromptImage.of(data), PromptImage.of(data, path)
    assert (held.digest, held.width, held.height) == (filed.digest, 3, 2)
    assert (held.data, filed.data) == (data, None)
    assert held.read() == filed.read() == data
    path.write_bytes(saved(Image.new("RGB", (3, 2), WHITE)))
    with pytest.raises(PromptError, match="has changed since the prompt was read"):
        filed.read()
    path.unlink()
    with pytest.raises(PromptError, match="is no file"):
        filed.read()


def test_exif_turns_an_image_upright_before_its_size_counts():
    turned = Image.new("RGB", (4, 2), WHITE)
    turned.putpixel((0, 0), RED)
    exif = Image.Exif()
    exif[0x0112] = 6  # shown after a quarter turn to the right
    data = saved(turned, exif=exif)
    upright = decode_image(data)
    assert upright.size == (2, 4)
    assert upright.getpixel((1, 0)) == RED
    assert (PromptImage.of(data).width, PromptImage.of(data).height) == (2, 4)


@pytest.mark.parametrize("mode", ["1", "L", "P", "RGB", "CMYK"])
def test_other_colours_become_rgb(mode):
    image = Image.new("RGB", (2, 2), WHITE).convert(mode)
    found = decode_image(saved(image, "JPEG" if mode == "CMYK" else "PNG"))
    assert (found.mode, found.getpixel((0, 0))) == ("RGB", WHITE)


@pytest.mark.parametrize("mode", ["RGBA", "LA"])
def test_transparent_places_become_white(mode):
    clear = Image.new(mode, (1, 1), 0)
    assert decode_image(saved(clear)).getpixel((0, 0)) == WHITE
    colours = Image.new("P", (1, 1), 0)
    colours.putpalette([0, 0, 0])
    assert decode_image(saved(colours, transparency=0)).getpixel((0, 0)) == WHITE


@pytest.mark.parametrize(
    ("data", "fact"),
    [
        (b"", "it is no image that can be read; give PNG, JPEG, WEBP, GIF or BMP"),
        (b"<svg/>", "it is no image that can be read"),
        (saved(Image.new("RGB", (2, 2)), "TIFF"), "it is no image that can be read"),
        (saved(Image.new("RGB", (64, 64), RED))[:-40], "the image is damaged"),
        (saved(Image.effect_noise((64, 64), 50), "JPEG")[:600], "the image is damaged"),
        (png(8000, 8000), "the image has 8,000 x 8,000 pixels; it may have 50,000,000 in all"),
        (png(60_000, 60_000), "the image has more than 50,000,000 pixels"),
        (png(10_000, 9_500), "the image has more than 50,000,000 pixels"),
        (saved(Image.new("I;16", (2, 2))), "the image has pixels of the kind I;16; save it with 8 bits"),
        (
            saved(Image.new("L", (2, 2)), "GIF", save_all=True, append_images=[Image.new("L", (2, 2), 9)]),
            "the image has 2 frames; give one picture",
        ),
        (
            saved(Image.new("L", (2, 2)), "PNG", save_all=True, append_images=[Image.new("L", (2, 2), 9)]),
            "the image has 2 frames; give one picture",
        ),
    ],
)
def test_what_is_no_picture_or_too_much_of_one_is_refused(data, fact):
    with pytest.raises(PromptError) as caught:
        decode_image(data)
    assert str(caught.value).startswith(fact)


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "L", "P", "CMYK", "LA"])
def test_engines_see_the_pixels_of_an_image_that_a_trainer_s_processor_sees(mode):
    image = Image.effect_noise((12, 7), 60).convert("RGB").convert(mode)
    found = decode_image(png_of(image))
    assert found.tobytes() == image.convert("RGB").tobytes()


def test_an_image_that_is_not_upright_stays_so_as_it_does_for_a_trainer():
    exif = Image.Exif()
    exif[0x0112] = 6
    file = io.BytesIO(saved(Image.effect_noise((12, 7), 60).convert("RGB"), "JPEG", exif=exif))
    assert decode_image(png_of(Image.open(file))).size == (12, 7)
    with pytest.raises(ConfigError, match="an image of a prompt is a str, and Seer takes those of PIL"):
        png_of("a.png")


def test_a_file_is_refused_by_its_size_before_it_is_decoded(tmp_path, monkeypatch):
    monkeypatch.setattr(images, "MOST_IMAGE_BYTES", 1 << 20)
    with pytest.raises(PromptError, match="the image has more than 1 MiB; make it smaller"):
        decode_image(bytes((1 << 20) + 1))
    path = tmp_path / "a.png"
    path.write_bytes(bytes((1 << 20) + 1))
    with pytest.raises(PromptError, match="more than 1 MiB"):
        images.read_image_file(path)
    with pytest.raises(PromptError, match="is no file"):
        images.read_image_file(tmp_path)


def test_places_are_written_and_the_images_themselves_are_not():
    import msgspec

    image = PromptImage.of(saved(Image.new("RGB", (3, 2), RED)))
    placed = PlacedImages([image, image], [(1, 4), (7, 4)])
    plain = {"images": [{"digest": image.digest, "offset": offset, "length": 4} for offset in (1, 7)]}
    assert msgspec.json.decode(msgspec.json.encode(placed)) == plain == placed
    assert placed.digests == [image.digest] * 2
    assert placed.sources == {image.digest: image}
