from pathlib import Path

import pytest
from seer_divided_rollout import Chunks, KvAware, Settings
from seer_trace.records import read_trace, replay

from seer_core.errors import SeerError
from seer_core.model.events import Dispatch
from seer_core.scheduling.defaults import FirstComeFirstServed
from seer_core.scheduling.scheduler import Policies, Scheduler, Slot

RECORDED = Path(__file__).parent / "recorded"
"""Traces of `rollout.toml` there, written at cfdd2299, before the placer was made of a filter and scorers."""


def scheduler(**changed):
    defaults = {
        name: getattr(Settings(), name) for name in ("stay_kv_fraction", "growth_headroom", "reserved_share")
    }
    placer = KvAware(**defaults | changed)
    return Scheduler(
        Policies(
            Slot("splitter", "divided_rollout", Chunks(256)),
            Slot("prioritizer", "seer-core", FirstComeFirstServed()),
            Slot("placer", "divided_rollout", placer),
        )
    )


@pytest.mark.parametrize(("name", "dispatches", "moves"), [("pool", 80, 18), ("no_pool", 81, 4)])
def test_each_chunk_goes_where_it_went_before_there_were_scorers(name, dispatches, moves):
    trace = RECORDED / f"{name}.jsonl"
    records = list(read_trace(trace))
    choices = [each for record in records for each in record.commands if isinstance(each, Dispatch)]
    assert (len(choices), sum(each.migrated for each in choices)) == (dispatches, moves)
    assert replay(trace, scheduler()) == len(records)


def test_another_placer_chooses_otherwise():
    for changed in ({"stay_kv_fraction": 0.0}, {"growth_headroom": 0.0}):
        with pytest.raises(SeerError, match="replay differs at record"):
            replay(RECORDED / "no_pool.jsonl", scheduler(**changed))
