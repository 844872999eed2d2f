"""Which of vLLM's model runners is taken, and which cannot be."""

import os
from contextlib import nullcontext
from types import SimpleNamespace

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


def config(*, second, ahead):
    """Return a config with what vLLM has decided."""
    return SimpleNamespace(
        use_v2_model_runner=second,
        scheduler_config=SimpleNamespace(async_scheduling=ahead, scheduler_cls=None),
    )


@pytest.mark.parametrize(
    ("second", "ahead", "scheduler"),
    [
        (True, True, "AsyncAccountingScheduler"),
        (True, False, "AccountingScheduler"),
        (False, True, "AccountingScheduler"),
    ],
)
def test_steps_are_planned_ahead_where_vllm_would_and_its_second_runner_computes_them(
    runners, second, ahead, scheduler
):
    decided = config(second=second, ahead=ahead)
    runners.settle_scheduler(decided, None)
    assert decided.scheduler_config.scheduler_cls == f"seer_vllm.scheduler.{scheduler}"
    assert decided.scheduler_config.async_scheduling == (scheduler == "AsyncAccountingScheduler")


@pytest.mark.parametrize(("second", "ahead"), [(True, False), (False, True)])
def test_a_setting_that_wants_them_planned_ahead_is_refused_elsewhere(runners, second, ahead):
    complaint = r"needs vLLM's second model runner, .*: drop async_scheduling from \[engine.vllm\]"
    with pytest.raises(EngineError, match=complaint):
        runners.settle_scheduler(config(second=second, ahead=ahead), True)


@pytest.mark.parametrize(
    ("source", "ranks", "reason"), [(OURS, 0, "drafts follow from"), (None, 2, "2 ranks copy blocks")]
)
def test_with_drafts_or_a_pool_of_several_ranks_no_step_is_planned_ahead(runners, source, ranks, reason):
    assert runners.wanted_ahead(None, source, pooled_ranks=ranks) is False
    assert runners.wanted_ahead(False, source, pooled_ranks=ranks) is False
    with pytest.raises(EngineError, match=f"no step can be planned ahead, since {reason}"):
        runners.wanted_ahead(True, source, pooled_ranks=ranks)
    for wanted in (None, True, False):
        assert runners.wanted_ahead(wanted, None, pooled_ranks=1) is wanted


def test_a_worker_without_triton_refuses_the_second_in_one_sentence(start, models):
    complaint = r"did not start: vLLM's second model runner needs Triton, .*: set \[engine.vllm\].runner = "
    with pytest.raises(EngineError, match=complaint):
        start(models[0], runner="second")


@pytest.mark.parametrize(
    ("choice", "triton", "complaint"),
    [
        (
            ("first", "there is a drafter"),
            True,
            r"there is a drafter\): set \[engine.vllm\].runner = \"second\"",
        ),
        (("first", "so it is set"), False, r"so it is set\): use SGLang, or a GPU"),
        ((None, "vLLM's choice"), False, r"vLLM's choice\): use SGLang, or a GPU"),
        ((None, "vLLM's choice"), True, None),
        (("second", "so it is set"), True, None),
    ],
)
def test_experts_are_returned_by_the_second_alone(runners, monkeypatch, choice, triton, complaint):
    monkeypatch.setattr(runners, "HAS_TRITON", triton)
    refused = pytest.raises(EngineError, match=complaint) if complaint else nullcontext()
    with refused:
        runners.refuse_other_runners(runners.RunnerChoice(*choice))
