"""A digest of a model's files: equal for copies, different where models are."""

import shutil

import pytest
from seer_worker.client.digest import digest_of


@pytest.fixture
def model(tmp_path):
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    (directory / "generation_config.json").write_text('{"eos_token_id": 1}')
    (directory / "model.safetensors").write_bytes(bytes(100_000))
    (directory / "README.md").write_text("a model")
    return directory


def test_a_copy_has_the_same(model, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(model, copy)
    (copy / "README.md").write_text("a copy")
    assert digest_of(copy) == digest_of(model)


@pytest.mark.parametrize("place", [0, 50_000, 99_999])
def test_other_weights_have_another(model, place):
    before = digest_of(model)
    values = bytearray(100_000)
    values[place] = 1
    (model / "model.safetensors").write_bytes(values)
    assert digest_of(model) != before


def test_other_ends_of_responses_and_other_files_have_another(model):
    before = digest_of(model)
    (model / "generation_config.json").write_text('{"eos_token_id": 2}')
    other = digest_of(model)
    (model / "more.safetensors").write_bytes(b"")
    assert len({before, other, digest_of(model)}) == 3
