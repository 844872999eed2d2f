"""Slots that compose: a config says who fills one, strategies wrap each other, one object fills two."""

import json
import sys

import pytest
from seer_cli.installed import slots_of
from seer_host.config_files import load_config
from seer_session.assembly import fill_slots
from seer_session.session import rollout

from seer_core.errors import ConfigError

HEAD = "from seer_core.plugins.hookspecs import hookimpl\n"

THREES = f"""{HEAD}
class Threes:
    def split(self, request):
        return min(3, request.remaining_tokens)

@hookimpl
def seer_make_splitter():
    return Threes()
"""

CAP = f"""{HEAD}
class Cap:
    def __init__(self, inner):
        self.inner = inner

    def place(self, request, chunk_tokens, instances):
        if sum(request.group.in_flight.values()) < 2:
            return self.inner.place(request, chunk_tokens, instances)

@hookimpl
def seer_make_placer(inner):
    return Cap(inner)
"""

BOTH = f"""{HEAD}
from seer_core.scheduling.defaults import FirstComeFirstServed, LeastLoaded

class Both(FirstComeFirstServed, LeastLoaded):
    made = 0

    def __init__(self):
        super().__init__()
        Both.made += 1

@hookimpl
def seer_make_prioritizer():
    return Both()

seer_make_placer = seer_make_prioritizer
"""


@pytest.fixture
def threes(distribution):
    """Install a third party's splitter."""
    distribution("threes", THREES)


def owners(config):
    return {slot.name: slot.owner for slot in fill_slots(config).slots}


def test_a_third_party_s_splitter_works_beside_our_placer_by_config_alone(threes, write_config):
    config = write_config(["divided_rollout", "threes"], '[seer.slots]\nsplitter = "threes"')
    result = rollout(config, [{"prompt": "a third party", "n": 4, "max_tokens": 8}])
    chunks = [[chunk.tokens for chunk in completion.chunks] for completion in result.completions]
    assert len(chunks) == 4
    assert all(set(lengths[:-1]) <= {3} for lengths in chunks)
    assert any(len(lengths) > 1 for lengths in chunks)
    loaded = load_config(config)
    assert owners(loaded)["placer"] == "divided_rollout"
    assert slots_of(loaded)["threes"] == ("splitter",)
    assert slots_of(loaded)["divided_rollout"] == ("placer",)


def test_the_command_line_chooses_too_and_leaving_a_plug_in_out_leaves_its_entry_out(threes, write_config):
    config = write_config(["divided_rollout", "threes"])
    assert owners(load_config(config, ["seer.slots.splitter=threes"]))["splitter"] == "threes"
    ours = load_config(config, ["seer.slots.splitter=threes"], without=["threes"])
    assert owners(ours)["splitter"] == "divided_rollout"


def test_the_core_s_own_strategy_can_be_named(write_config):
    chosen = load_config(write_config(["divided_rollout"]), ["seer.slots.splitter=seer-core"])
    assert owners(chosen) == {
        "splitter": "seer-core",
        "prioritizer": "seer-core",
        "placer": "divided_rollout",
    }
    assert fill_slots(chosen).passed_over == {"splitter": ("divided_rollout",)}


@pytest.mark.parametrize(
    ("entry", "fact"),
    [
        ('placr = "threes"', "unknown key 'placr' in [seer.slots]; did you mean 'placer'?"),
        (
            'splitter = "three"',
            "[seer.slots].splitter names 'three', which is not in [seer].plugins; did you mean 'threes'?",
        ),
        (
            'placer = "threes"',
            "[seer.slots].placer names 'threes', which offers none; known: divided_rollout, seer-core",
        ),
        (
            'splitter = ["divided_rollout", "threes"]',
            "[seer.slots].splitter: 'divided_rollout' wraps no other; name it last, or alone",
        ),
        (
            'splitter = ["seer-core", "threes"]',
            "[seer.slots].splitter: 'seer-core' wraps no other; name it last, or alone",
        ),
        ('splitter = ["threes", "threes"]', "[seer.slots].splitter lists 'threes' twice; keep one"),
        ("splitter = 3", "[seer].slots.splitter: expected `str | array`, got `int`"),
    ],
)
def test_an_entry_that_cannot_be_meant_is_one_sentence(threes, write_config, entry, fact):
    with pytest.raises(ConfigError) as caught:
        fill_slots(load_config(write_config(["divided_rollout", "threes"], f"[seer.slots]\n{entry}")))
    assert str(caught.value) == fact


def test_a_named_plug_in_that_abstains_is_named(distribution, write_config):
    distribution("shy", f"{HEAD}\n@hookimpl\ndef seer_make_splitter():\n    return None\n")
    with pytest.raises(ConfigError, match="names 'shy', which abstains as it is configured; name another"):
        fill_slots(load_config(write_config(["shy"], '[seer.slots]\nsplitter = "shy"')))


def test_commands_show_who_fills_a_slot_and_who_was_passed_over(threes, write_config, seer, tmp_path):
    config = write_config(["divided_rollout", "threes"], '[seer.slots]\nsplitter = "threes"')
    listed = seer("plugins", config, "--json", tmp_path / "plugins.json")
    assert listed.exit_code == 0, listed.output
    rows = {row["name"]: row for row in json.loads((tmp_path / "plugins.json").read_bytes())}
    assert (rows["threes"]["slots"], rows["threes"]["passed_over"]) == (["splitter"], [])
    assert rows["divided_rollout"]["slots"] == ["placer"]
    assert rows["divided_rollout"]["passed_over"] == ["splitter"]
    shown = seer("config", config, "--json", tmp_path / "config.json")
    assert "passed over: divided_rollout" in shown.output
    rows = {row["key"]: row for row in json.loads((tmp_path / "config.json").read_bytes())}
    assert rows["seer.slots.splitter"] == {
        "key": "seer.slots.splitter",
        "value": "threes",
        "origin": str(config),
        "passed_over": ["divided_rollout"],
    }
    assert rows["seer.slots.placer"]["value"] == "divided_rollout"
    assert rows["seer.slots.drafter"]["value"] == "seer-core"


def test_arms_of_a_comparison_choose_among_the_plug_ins_that_they_have(
    threes, write_config, write_prompts, seer, tmp_path
):
    more = '[seer.slots]\nsplitter = "threes"\n[compare]\noracle = []\n'
    more += 'techniques = ["divided_rollout", "threes"]\n[plugin.divided_rollout]\nchunk_tokens = 4\n'
    config = write_config(["divided_rollout", "threes"], more)
    prompts = write_prompts({"prompt": "once", "n": 4, "max_tokens": 12})
    result = seer("compare", config, "--prompts", prompts, "--json", tmp_path / "arms.json")
    assert result.exit_code == 0, result.output
    _, ours, theirs = json.loads((tmp_path / "arms.json").read_bytes())
    assert theirs["chunks"] > ours["chunks"]


def test_policies_of_the_simulator_choose_among_the_plug_ins_that_they_have(threes, seer):
    run = ("sim", "synthetic", "--lengths", "groups=2", "--lengths", "mean_tokens=30", "--policy", "divided")
    mine = ("--policy", "mine=divided_rollout,threes")
    result = seer(*run, *mine, "--set", "seer.slots.splitter=threes")
    assert result.exit_code == 0, result.output
    result = seer(*run, *mine, "--set", "seer.slots.splitter=three")
    assert result.exit_code == 2
    assert "did you mean 'threes'?" in result.output


def test_a_strategy_wraps_the_one_that_the_next_plug_in_offers(distribution, write_config):
    distribution("cap", CAP)
    config = load_config(
        write_config(["divided_rollout", "cap"]), ['seer.slots.placer=["cap", "divided_rollout"]']
    )
    placer = fill_slots(config).policies.placer
    assert [link.owner for link in placer.links] == ["cap", "divided_rollout"]
    assert type(placer.strategy.inner).__name__ == "KvAware"
    assert slots_of(config)["divided_rollout"] == ("splitter", "placer")
    capped = rollout(config, [{"prompt": "a group that is capped", "n": 6, "max_tokens": 8}])
    assert len(capped.completions) == 6
    spans = [(chunk.dispatched_s, chunk.finished_s) for each in capped.completions for chunk in each.chunks]
    assert max(sum(began <= at < ended for began, ended in spans) for at, _ in spans) == 2


def test_a_strategy_that_wraps_has_the_core_s_own_where_no_other_is_named(distribution, write_config):
    distribution("cap", CAP)
    placer = fill_slots(load_config(write_config(["cap"]))).policies.placer
    assert [link.owner for link in placer.links] == ["cap", "seer-core"]


def test_one_function_under_two_hooks_fills_both_slots_with_one_object(distribution, write_config):
    distribution("both", BOTH)
    config = write_config(["both"])
    policies = fill_slots(load_config(config)).policies
    assert policies.prioritizer.strategy is policies.placer.strategy
    assert sys.modules["both_module"].Both.made == 1
    assert slots_of(load_config(config))["both"] == ("prioritizer", "placer")
    assert len(rollout(config, [{"prompt": "one", "n": 3, "max_tokens": 8}]).completions) == 3
    chosen = load_config(config, ["seer.slots.placer=seer-core"])
    assert owners(chosen)["prioritizer"] == "both"
