"""Images of TRL's prompts on their way to the engines: pixels, places, and what is refused."""

import io
from types import SimpleNamespace

import pytest
from PIL import Image
from seer_host.images import decode_image
from seer_trl.images import one_place_each, png_of, require_no_places, require_same_prompts

from seer_core.errors import ConfigError, EngineError
from seer_core.model import PromptGroup
from seer_core.model.arrays import Tokens

PLACE = 4


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "L", "P", "CMYK", "LA"])
def test_the_engines_see_the_pixels_that_trl_s_processor_sees(mode):
    image = Image.effect_noise((12, 7), 60).convert("RGB").convert(mode)
    found = decode_image(png_of(image))
    assert found.tobytes() == image.convert("RGB").tobytes()


def test_an_image_that_is_not_upright_stays_so_as_it_does_for_trl():
    file = io.BytesIO()
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.effect_noise((12, 7), 60).convert("RGB").save(file, "JPEG", exif=exif)
    assert decode_image(png_of(Image.open(file))).size == (12, 7)


def test_each_image_has_one_place():
    assert one_place_each([1, PLACE, PLACE, 2, 2, PLACE, 3], PLACE) == [1, PLACE, 2, 2, PLACE, 3]


def test_what_trl_could_not_train_on_is_refused():
    with pytest.raises(ConfigError, match="an image of a prompt is a str, and Seer takes those of PIL"):
        png_of("a.png")
    groups = [PromptGroup("a", (1, 2), 2, 9), PromptGroup("b", (1, PLACE), 1, 9)]
    require_same_prompts(groups, [[1, 2], [1, 2], [1, PLACE]])
    with pytest.raises(ConfigError, match="makes 3 tokens of a prompt with images, and the engines 2"):
        require_same_prompts(groups, [[1, 2], [1, 2], [1, PLACE, PLACE]])
    written = SimpleNamespace(request_id="a/0", attachments={}, token_ids=Tokens([5, 6]))
    require_no_places([written], PLACE)
    written.token_ids.append(PLACE)
    with pytest.raises(EngineError, match="response a/0 has tokens of images itself"):
        require_no_places([written], PLACE)
