"""The names inside vLLM that the backend relies on stand in one table, are there, and are missed by name."""

import re
from pathlib import Path
from types import SimpleNamespace

import attrs
import pytest
import seer_vllm
from seer_vllm import internals
from seer_worker.process.names import Name, flaw_of

from seer_core.errors import EngineError

TABLES = (
    internals.IMPORTED,
    internals.PRELOADED,
    internals.ON_CPU,
    internals.RUNNER,
    internals.DRAFTING,
    internals.SECOND_IMPORTED,
    internals.SECOND_RUNNER,
    internals.SECOND_DRAFTING,
    internals.ROUTING,
    internals.ROUTING_SCHEDULER,
    internals.SCHEDULER,
    internals.CONNECTOR,
    internals.ADAPTERS,
)
IMPORTING = pytest.mark.filterwarnings("ignore")  # vLLM and torch deprecate this and that
NAMES = {part for table in TABLES for name in table for part in name.name.split(".")}


def test_every_private_name_of_vllm_that_is_used_stands_in_the_table(private_names):
    foreign = private_names(seer_vllm)
    assert foreign
    assert foreign <= NAMES


@pytest.mark.engine  # imports vLLM: ten seconds
@IMPORTING
def test_nothing_is_missed_in_the_vllm_installed_here():
    pytest.importorskip("vllm")
    internals.check_imports(on_cpu=True)
    names = (*internals.SECOND_IMPORTED, *internals.PRELOADED)
    assert [flaw for name in names if (flaw := flaw_of(name))] == []


@pytest.mark.engine  # imports vLLM: ten seconds
@IMPORTING
@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (
            {"name": "_sampel"},
            r"GPUModelRunner has no _sampel, and without it tokens are not sampled by key$",
        ),
        ({"owner": "vllm.v1.nowhere"}, r"there is no vllm.v1.nowhere, and without its _sample tokens are"),
        (
            {"takes": ("self", "logits", "drafts")},
            r"_sample takes \(self, logits, spec_decode_metadata\), not \(self, logits, drafts\)",
        ),
    ],
)
def test_what_is_missing_is_one_sentence(monkeypatch, change, complaint):
    pytest.importorskip("vllm")
    [name] = [each for each in internals.IMPORTED if each.name == "_sample"]
    monkeypatch.setattr(internals, "IMPORTED", (attrs.evolve(name, **change),))
    with pytest.raises(EngineError, match=complaint):
        internals.check_imports(on_cpu=False)


@pytest.mark.engine  # imports vLLM: ten seconds
@IMPORTING
def test_another_version_is_refused(monkeypatch):
    vllm = pytest.importorskip("vllm")
    monkeypatch.setattr(vllm, "__version__", "0.34.1")
    with pytest.raises(EngineError, match=r"vLLM 0.34.1 is not 0.32.\* or 0.33.\*"):
        internals.check_imports(on_cpu=False)


def test_what_a_live_part_lacks_is_named_by_its_path():
    scheduler = SimpleNamespace(
        num_spec_tokens=0,
        dynamic_sd_lookup=None,
        max_num_running_reqs=4,
        connector=None,
        kv_cache_config=SimpleNamespace(kv_cache_groups=[]),
    )
    internals.check_scheduler(scheduler)
    del scheduler.kv_cache_config.kv_cache_groups
    with pytest.raises(EngineError, match=r"Scheduler has no kv_cache_config.kv_cache_groups, and without"):
        internals.check_scheduler(scheduler)
    scheduler.kv_cache_config = SimpleNamespace(kv_cache_groups=[])
    scheduler.connector = SimpleNamespace()
    with pytest.raises(EngineError, match="has no _kv_cache_manager, and without it KV of preempted"):
        internals.check_scheduler(scheduler)


def test_a_name_says_what_breaks_without_it():
    assert all(isinstance(name, Name) and name.without for table in TABLES for name in table)


@pytest.mark.engine  # imports vLLM
@IMPORTING
def test_the_guide_lists_every_weight_transfer_that_vllm_has():
    pytest.importorskip("vllm")
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    page = (Path(__file__).parents[3] / "docs/guides/weights.md").read_text()
    table = page.split("| vLLM 0.32", 1)[1].split("\n\n", 1)[0]
    assert set(re.findall(r"^\| `(\w+)` \|", table, re.M)) == set(WeightTransferEngineFactory._registry)
