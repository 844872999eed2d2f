"""The names of SGLang that the backend relies on stand in one table, are there, and are missed by name."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import seer_sglang
from seer_sglang import internals
from seer_sglang.doctor import interpreter

from seer_core.errors import EngineError

TABLES = (internals.IMPORTED, internals.SCHEDULER)
NAMES = {part for table in TABLES for name in table for part in name.name.split(".")}
STAND_IN = Path(__file__).parents[1] / "standin"
LOOK = """
import attrs
internals.check_imports()
name = next(each for each in internals.IMPORTED if each.name == "run_batch")
try:
    internals.IMPORTED = (attrs.evolve(name, takes=("self", "batches")), attrs.evolve(name, name="run_bath"))
    internals.check_imports()
except EngineError as error:
    print(error)
internals.version = lambda name: "0.6.0"
try:
    internals.check_imports()
except EngineError as error:
    print(error)
"""
REFUSED = """
import sys
from types import SimpleNamespace
from seer_sglang import internals
internals.check_kernels()
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from seer_core.errors import EngineError
from seer_sglang import attention
from seer_sglang.engine import server_args

settings = {
    "model_path": sys.argv[1], "dtype": "float32", "device": "cpu", "attention_backend": "torch_native",
    "page_size": 1, "skip_tokenizer_init": True,
}
backend = SimpleNamespace(forward_extend=lambda *arguments: "SGLang's own")
attention.install(backend)
window = SimpleNamespace(sliding_window_size=128, is_cross_attention=False)

def attend(mode):
    return backend.forward_extend(None, None, None, window, SimpleNamespace(forward_mode=mode))

for attempt in (
    lambda: server_args(settings | {"colour": 1}, None),
    lambda: server_args(settings | {"colour": 1}, 1 << 20),
    lambda: server_args(settings | {"max_total_tokens": 900}, 1 << 20),
    lambda: attend(ForwardMode.EXTEND),
    lambda: attend(ForwardMode.TARGET_VERIFY),
):
    try:
        print(attempt())
    except EngineError as error:
        print(error)
"""


def test_every_private_name_of_sglang_that_is_used_stands_in_the_table(private_names):
    foreign = private_names(seer_sglang) - {"_exit"}  # of os
    assert foreign
    assert foreign <= NAMES


def test_a_name_says_what_breaks_without_it():
    assert all(name.without for table in TABLES for name in table)


@pytest.fixture(scope="module")
def sentences(make_fleet, models, run_in_fork):
    """The answers of SGLang to all attempts."""
    return run_in_fork(make_fleet(models[0]).engines[0], REFUSED + LOOK, str(models[0]))[-7:]


@pytest.mark.engine
def test_nothing_is_missed_in_the_sglang_installed_here_and_what_were_missed_is_one_sentence(sentences):
    missed, version = sentences[5:]
    assert missed.startswith("this SGLang will not do: sglang.srt.managers.scheduler:Scheduler.run_batch")
    assert missed.endswith("has no run_bath, and without it the scheduler cannot be driven step by step")
    assert version == "SGLang 0.6.0 is not 0.5.23, on whose internals Seer relies"


@pytest.mark.engine
def test_what_sglang_cannot_do_is_refused_with_one_sentence(sentences):
    *unknown, twice, own, trees = sentences[:5]
    assert unknown == ["SGLang refuses its arguments: Unexpected keyword argument 'colour'"] * 2
    assert twice.startswith("SGLang refuses its arguments: ")
    assert "multiple values for keyword argument 'max_total_tokens'" in twice
    assert own == "SGLang's own"
    assert trees.startswith(
        "on a CPU drafts cannot be verified in layers of sliding-window or cross attention"
    )


@pytest.mark.engine  # needs SGLang installed
def test_the_guide_lists_every_call_of_sglang_that_updates_weights():
    [engine] = (
        Path(interpreter()).parents[1].glob("lib/python3*/site-packages/sglang/srt/entrypoints/engine.py")
    )
    page = (Path(__file__).parents[3] / "docs/guides/weights.md").read_text()
    table = page.split(f"| SGLang {seer_sglang.SUPPORTED_SGLANG} ", 1)[1].split("\n\n", 1)[0]
    calls = re.compile(r"(?:def |`)((?:update_weights_from|init_weights_update_group)\w*)")
    assert set(calls.findall(table)) == set(calls.findall(engine.read_text()))


def test_a_stand_in_on_a_machine_with_a_gpu_is_refused(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(STAND_IN))
    monkeypatch.setenv("SGLANG_USE_CPU_ENGINE", "0")
    monkeypatch.setattr(internals, "DEVICES", (tmp_path / "none",))
    assert internals.check_kernels()
    monkeypatch.setattr(internals, "DEVICES", (tmp_path / "none", tmp_path))
    with pytest.raises(EngineError, match=r"there is a GPU \(.*\), and the stand-in for machines without"):
        internals.check_kernels()


def test_without_kernels_it_says_how_to_get_them(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "sgl_kernel", None)
    with pytest.raises(EngineError, match=r"SGLang's kernels cannot be imported: .*; run `make setup-sg"):
        internals.check_kernels()


def test_a_scheduler_that_would_come_between_logits_and_keys_is_refused():
    scheduler = SimpleNamespace(enable_overlap=False, spec_algorithm=SimpleNamespace(is_none=lambda: True))
    for name in internals.SCHEDULER:
        *path, last = name.name.split(".")
        owner = scheduler
        for part in path:
            owner.__dict__.setdefault(part, SimpleNamespace())
            owner = getattr(owner, part)
        owner.__dict__.setdefault(last, 1)
    internals.check_scheduler(scheduler)
    scheduler.enable_overlap = True
    with pytest.raises(EngineError, match="keyed sampling cannot be installed: the overlap schedule is on"):
        internals.check_scheduler(scheduler)
    del scheduler.waiting_queue
    with pytest.raises(EngineError, match="has no waiting_queue, and without it an instance cannot report"):
        internals.check_scheduler(scheduler)
