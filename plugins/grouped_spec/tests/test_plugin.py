"""The plug-in: what it refuses, and what it hands to the workers."""

from pathlib import Path

import msgspec
import pytest
from seer_grouped_spec.plugin import Settings, seer_make_drafter

from seer_core.errors import ConfigError
from seer_core.plugins.hookspecs import Startup
from seer_core.ports.drafting import Drafter

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
