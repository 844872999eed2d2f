"""Which of vLLM's model runners is taken, and which cannot be."""

import os

import pytest

from seer_core.errors import EngineError
from seer_core.ports.drafting import SourceSpec

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore")]  # imports vLLM

VARIABLE = "VLLM_USE_V2_MODEL_RUNNER"
OWN, OURS = SourceSpec("vllm:ngram", {}, 4), SourceSpec("draft_sources:Scripted", {}, 4)


@pytest.fixture
def runners(monkeypatch):
    """The module, on a machine where Triton works; the environment names no runner."""
    pytest.importorskip("vllm")
    from seer_vllm import runners
    from vllm import envs

    envs.disable_envs_cache()  # which an engine that another test had in this process has enabled
    monkeypatch.setattr(runners, "HAS_TRITON", True)
    monkeypatch.setenv(VARIABLE, "")
    monkeypatch.delenv(VARIABLE)
    return runners


def test_without_a_drafter_the_choice_is_vllm_s(runners, monkeypatch):
    assert runners.settle_runner(None, 1) == (None, "vLLM's choice")
    monkeypatch.setattr(runners, "HAS_TRITON", False)
    assert runners.settle_runner(None, 1) == (None, "vLLM's choice, as Triton does not work here")
    assert VARIABLE not in os.environ


@pytest.mark.parametrize("source", [OWN, OURS])
def test_with_a_drafter_it_is_the_first_unless_the_settings_say_otherwise(runners, monkeypatch, source):
    assert runners.settle_runner(source, 1) == ("first", "there is a drafter")
    assert os.environ[VARIABLE] == "0"
    monkeypatch.setenv(VARIABLE, "1")
    assert runners.settle_runner(OURS, 1).runner == "second"


@pytest.mark.parametrize(("variable", "name"), [("0", "first"), ("1", "second")])
def test_the_settings_are_the_reason_where_they_name_one(runners, monkeypatch, variable, name):
    monkeypatch.setenv(VARIABLE, variable)
    assert runners.settle_runner(None, 2) == (name, f'[engine.vllm].runner = "{name}"')


@pytest.mark.parametrize(
    ("triton", "source", "devices", "complaint"),
    [
        (False, None, 1, "second model runner needs Triton, which does not work here"),
        (True, OWN, 1, "second model runner does not draft by 'vllm:ngram'"),
        (True, OURS, 2, "second model runner drafts on one device, and an instance has 2"),
    ],
)
def test_the_second_is_refused_where_it_cannot_run(runners, monkeypatch, triton, source, devices, complaint):
    monkeypatch.setattr(runners, "HAS_TRITON", triton)
    monkeypatch.setenv(VARIABLE, "1")
    with pytest.raises(EngineError, match=rf'{complaint}.*: set \[engine.vllm\].runner = "first"'):
        runners.settle_runner(source, devices)
    monkeypatch.setenv(VARIABLE, "0")
    assert runners.settle_runner(source, devices).runner == "first"


def test_a_worker_without_triton_refuses_the_second_in_one_sentence(start, models):
    complaint = r"did not start: vLLM's second model runner needs Triton, .*: set \[engine.vllm\].runner = "
    with pytest.raises(EngineError, match=complaint):
        start(models[0], runner="second")
