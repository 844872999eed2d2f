"""Tables of plug-ins that a run does not use: checked where the plug-in is here, left alone where not."""

import sys

import pytest
from seer_host.config_files import load_config
from seer_session import assembly
from seer_session.assembly import assemble, fill_slots, installed, load_enabled

from seer_core.errors import ConfigError

SPLITTER = """
import msgspec
from seer_core.plugins.hookspecs import hookimpl

class Settings(msgspec.Struct, frozen=True):
    pieces: int = 2

@hookimpl
def seer_make_splitter(settings):
    raise AssertionError("it is not used")
"""


@pytest.fixture
def without(monkeypatch):
    """Return a function that hides installed plug-ins."""

    def hide(*names):
        rest = assembly.EntryPoints(point for point in assembly._entry_points() if point.name not in names)
        monkeypatch.setattr(assembly, "_entry_points", lambda: rest)

    return hide


@pytest.mark.parametrize("check", [assemble, fill_slots, load_enabled])
@pytest.mark.parametrize(
    "table",
    [
        "[engine.sglang]\nmodel = 'm'",
        "[kv_pool.mooncake]\nx = 1",
        "[launcher.ray]",
        "[plugin.grouped_spec]\nx = 1",
    ],
)
def test_a_table_of_a_plug_in_of_ours_that_is_neither_used_nor_installed_is_left_alone(
    write_config, without, check, table
):
    without("sglang", "mooncake", "ray", "grouped_spec")
    check(load_config(write_config((), table)))


def test_a_table_of_a_plug_in_of_another_author_that_is_not_installed_is_left_alone(write_config):
    fill_slots(load_config(write_config((), "[plugin.their_own_queue]\ndepth = 3")))


def test_a_table_whose_name_is_nearly_that_of_a_plug_in_is_an_error(write_config):
    with pytest.raises(ConfigError, match=r"\[plugin.context_shed\].*did you mean 'context_sched'"):
        fill_slots(load_config(write_config((), "[plugin.context_shed]")))


def test_a_table_of_a_plug_in_that_is_used_and_not_installed_names_the_remedy(write_config, without):
    without("grouped_spec")
    config = load_config(write_config(["grouped_spec"], "[plugin.grouped_spec]"))
    with pytest.raises(ConfigError, match="'grouped_spec' is not installed here; run `make setup`"):
        fill_slots(config)


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ("pices = 3", r"unknown key 'pices' in \[plugin.mine\]; did you mean 'pieces'"),
        ("pieces = 'x'", r"\[plugin.mine\].pieces: expected `int`"),
    ],
)
def test_a_table_that_is_not_used_is_checked_where_its_plug_in_is_installed(
    distribution, write_config, table, words
):
    distribution("mine", SPLITTER)
    fill_slots(load_config(write_config((), "[plugin.mine]\npieces = 3")))
    with pytest.raises(ConfigError, match=words):
        fill_slots(load_config(write_config((), f"[plugin.mine]\n{table}")))


def test_a_table_of_the_wrong_kind_names_the_right_one(distribution, write_config):
    distribution("mine", SPLITTER)
    with pytest.raises(
        ConfigError, match=r"\[engine.mine\]: the settings of 'mine' stand in \[plugin.mine\]"
    ):
        fill_slots(load_config(write_config((), "[engine.mine]")))
    with pytest.raises(ConfigError, match=r"\[plugin.sim\]: the settings of 'sim' stand in \[engine.sim\]"):
        fill_slots(load_config(write_config((), "[plugin.sim]")))


def test_a_broken_plug_in_stops_no_run_that_does_not_use_it(distribution, write_config):
    distribution("landmine", "raise SystemExit('imported')")
    distribution("odd", "Settings = 3")
    fill_slots(load_config(write_config((), "[plugin.landmine]\nx = 1\n[plugin.odd]\nx = 1")))
    fill_slots(load_config(write_config(["landmine"], "[plugin.landmine]\nx = 1"), without=["landmine"]))


def test_a_plug_in_without_a_table_is_not_imported(distribution, write_config):
    distribution("landmine", "raise RuntimeError('imported')")
    assert "landmine" in installed()
    fill_slots(load_config(write_config((), "[engine.sglang]\nmodel = 'm'\npython = 'p'")))
    assert "landmine_module" not in sys.modules
