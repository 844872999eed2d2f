"""A worker compares its Seer and its model with the runtime's before it imports an engine."""

import socket

import pytest
from seer_worker.client.digest import digest_of
from seer_worker.process.place_checks import check_place
from seer_worker.seer_version import seer_version
from seer_worker.wire import Start

from seer_core.errors import EngineError

HOST = socket.gethostname()


@pytest.fixture
def model(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(bytes(9000))
    return tmp_path


def start(**changes):
    return Start("no.such:Engine", "a", {}, "", **changes)


def refusal(**changes):
    with pytest.raises(EngineError) as caught:
        check_place(start(**changes))
    return str(caught.value)


def test_the_same_model_and_version_pass(model):
    check_place(start(seer=seer_version(), model_dir=str(model), model_digest=digest_of(model)))
    check_place(start())


def test_another_version_is_refused_by_host_and_interpreter():
    assert seer_version()
    found = refusal(seer="9.9")
    assert f"on {HOST}, of Python" in found
    assert f"has Seer {seer_version()}, and the runtime has Seer 9.9; install the same version" in found


def test_a_model_that_is_not_there_is_refused_by_path_and_host(tmp_path):
    found = refusal(model_dir=str(tmp_path / "none"), model_digest="0")
    assert f"the model in {tmp_path}/none cannot be read on {HOST}: No such file or directory; copy" in found


def test_another_model_is_refused_with_both_digests(model):
    digest = digest_of(model)
    (model / "model.safetensors").write_bytes(bytes(8999) + b"x")
    found = refusal(model_dir=str(model), model_digest=digest)
    assert f"the model in {model} on {HOST} is not the runtime's: its files have the digest" in found
    assert f", not {digest}; copy" in found
