"""Pictures of squares: what is drawn, what the teacher writes, and what is right."""

import importlib.util
import random
from pathlib import Path

import pytest
from seer_rl import Response
from seer_rl.config import load_training

pytest.importorskip("PIL", reason="Pillow is not installed")

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def squares():
    spec = importlib.util.spec_from_file_location("tiny_vision_squares", HERE / "squares.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_each_square_is_drawn_in_its_place_and_colour(squares):
    rng = random.Random(1)
    for _ in range(20):
        rows = squares.make_rows(rng)
        image = squares.draw(rows, rng)
        side = squares.PLACE_PIXELS
        for y, row in enumerate(rows):
            for x, colour in enumerate(row):
                place = image.crop((x * side, y * side, (x + 1) * side, (y + 1) * side))
                found = {pixel for _, pixel in place.getcolors() if len(set(pixel)) > 1}
                assert found == ({squares.COLOURS[colour]} if colour else set())


def test_the_number_of_squares_alone_is_right_and_the_teacher_never_sees_too_many(squares):
    rng = random.Random(2)
    right = 0
    for _ in range(300):
        rows = squares.make_rows(rng)
        text = squares.write_response(rows, rng)
        said = int(text.rpartition("=")[2])
        assert said <= squares.count(rows)
        response = Response({"answer": squares.count(rows)}, text, [], "stop")
        right += squares.reward(response)
        assert squares.reward(response) == (said == squares.count(rows))
    assert 100 < right < 250
    assert squares.reward(Response({"answer": 0}, "red blue", [], "length")) == 0.0


def test_each_iteration_and_seed_has_other_pictures(squares):
    rows = [list(squares.prompts(iteration, 4, seed)) for iteration, seed in ((0, 0), (1, 0), (0, 1), (0, 0))]
    images = [[row["images"] for row in each] for each in rows]
    assert images[0] == images[3]
    assert len({str(each) for each in images}) == 3


def test_the_example_can_be_loaded_and_its_weights_are_small():
    table, config = load_training(HERE / "train.toml")
    weights = HERE / config.engine["vllm"]["model"] / "model.safetensors"
    assert weights.stat().st_size < 2_000_000
    assert table.groups == 16
