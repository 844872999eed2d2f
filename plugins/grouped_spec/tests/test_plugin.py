"""The plug-in: what it refuses, and what it hands to the workers."""

from pathlib import Path

import msgspec
import pytest
from seer_grouped_spec.plugin import Settings, seer_make_drafter

from seer_core.errors import ConfigError
from seer_core.model.arrays import Tokens
from seer_core.plugins.hookspecs import Startup
from seer_core.ports.drafting import Drafter, ResponseMemory

from .helpers import FLAT


def make(base_dir=Path(), **settings):
    return seer_make_drafter(Settings(**settings), Startup(0, Path(base_dir)))


def test_it_is_a_drafter_with_both_halves():
    drafter = make(draft_tokens=4)
    assert isinstance(drafter, Drafter)
    assert (drafter.source().path, drafter.source().draft_tokens) == (
        "seer_grouped_spec.source:GroupedSource",
        4,
    )
    assert drafter.policy(FLAT).lengths(1, 1) != (0, 0)


def test_text_is_shared_between_instances_unless_that_is_switched_off():
    assert make().shares()
    assert not make(share=False).shares()


def test_earlier_responses_are_kept_only_where_they_are_asked_for():
    for count, recalled in ((0, []), (2, [[8], [9]])):
        drafter = make(earlier_responses=count)
        assert isinstance(drafter, ResponseMemory)
        for token in (7, 8, 9):
            drafter.remember((1, 2), Tokens([token]))
        assert list(drafter.recall((1, 2))) == recalled
        drafter.clear()
        assert list(drafter.recall((1, 2))) == []


@pytest.mark.parametrize(
    ("settings", "remedy"),
    [
        ({"earlier_file": "earlier.sqlite"}, "is of no use while earlier_responses is 0"),
        ({"earlier_responses": 4, "share": False}, "need share = true"),
        ({"earlier_responses": 4, "earlier_file": "no/such/directory"}, "unable to open database file"),
    ],
)
def test_a_memory_that_cannot_work_is_refused(tmp_path, settings, remedy):
    with pytest.raises(ConfigError, match=remedy):
        make(tmp_path, **settings)


def test_a_profile_goes_to_the_workers(tmp_path):
    (tmp_path / "profile.json").write_bytes(msgspec.json.encode(FLAT))
    assert make(tmp_path, profile="profile.json").source().step_times == FLAT
    assert make(tmp_path).source().step_times is None


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"profile": "nowhere.json"},
            r"profile: .*nowhere.json is no profile: .*`seer profile`",
        ),
        ({"profile": "bad.json"}, r"bad.json is no profile"),
        ({"lookup_min": 9, "lookup_max": 4}, r"lookup_min = 9 exceeds lookup_max = 4"),
    ],
)
def test_what_cannot_work_is_refused_at_the_start(tmp_path, settings, message):
    (tmp_path / "bad.json").write_text('{"batch": []}')
    with pytest.raises(ConfigError, match=message):
        make(tmp_path, **settings)
