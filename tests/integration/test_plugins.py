"""Plug-ins: a third party's takes a slot by config alone, and each way to be wrong names the culprit."""

import asyncio
import json
import re
import sys
from pathlib import Path

import pytest
from seer_cli.installed import describe, offers, slots_of
from seer_host.config_files import load_config
from seer_session.assembly import assemble, fill_slots, installed
from seer_session.runtime import Runtime
from seer_session.session import rollout

from seer_core.errors import ConfigError, PluginError
from seer_core.ports.engine import InstanceClient
from tests.support.patience import PATIENCE_S

from .helpers import HEAD, NAMED_QUEUE


def order_of(config):
    """Return the group ids in the order of their finish, one running at a time."""
    prompts = [{"prompt": "x" * length, "group_id": str(length)} for length in (3, 9, 6)]
    return [completion.group_id for completion in rollout(config, prompts).completions]


ONE_AT_A_TIME = """
[rollout]
n = 1
max_tokens = 8
[engine.sim]
instances = 1
max_running = 1
"""


def test_a_third_party_s_prioritizer_takes_the_slot_by_config_and_changes_the_order(
    local_plugin, write_config
):
    assert order_of(write_config([], ONE_AT_A_TIME)) == ["3", "9", "6"]

    local_plugin("longest_prompt")
    assert order_of(write_config([], ONE_AT_A_TIME)) == ["3", "9", "6"]  # installed enables nothing

    config = write_config(["longest_prompt"], ONE_AT_A_TIME)
    assert order_of(config) == ["9", "6", "3"]
    assert slots_of(load_config(config)) == {
        "sim": ("engines",),
        "longest_prompt": ("prioritizer",),
    }
    assert order_of(load_config(config, ["plugin.longest_prompt.shortest=true"])) == ["3", "6", "9"]
    assert order_of(load_config(config, without=["longest_prompt"])) == ["3", "9", "6"]


def test_a_third_party_s_distribution_is_seen_by_the_command_line(
    local_plugin, write_config, start_seer, tmp_path
):
    local_plugin("longest_prompt")
    config = write_config(["longest_prompt"])
    process = start_seer("plugins", config, "--json", tmp_path / "plugins.json")
    _, errors = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, errors) == (0, "")
    rows = {row["name"]: row for row in json.loads((tmp_path / "plugins.json").read_bytes())}
    assert rows["longest_prompt"] == {
        "name": "longest_prompt",
        "distribution": "seer-longest-prompt",
        "version": "1.0",
        "tier": "experimental",
        "enabled": True,
        "slots": ["prioritizer"],
        "passed_over": [],
    }
    assert not rows["context_sched"]["enabled"]


def test_only_what_the_config_names_is_imported(distribution, write_config):
    distribution("landmine", "raise RuntimeError('imported')")
    assert "landmine" in installed()
    assemble(load_config(write_config()))
    assert "landmine_module" not in sys.modules


def test_a_plug_in_has_its_distribution_and_version(distribution):
    distribution("mine", NAMED_QUEUE, version="2.5", project="another-queue")
    assert describe("mine") == {"name": "mine", "distribution": "another-queue", "version": "2.5"}


def test_two_owners_of_a_slot_are_both_named(distribution, write_config):
    distribution("mine", NAMED_QUEUE)
    config = write_config(["context_sched", "mine"])
    with pytest.raises(ConfigError) as caught:
        fill_slots(load_config(config))
    assert str(caught.value) == (
        "slot 'prioritizer' is claimed by 'context_sched' and 'mine'; keep one in [seer].plugins,"
        " or say which fills it: [seer.slots] prioritizer = 'mine'"
    )
    policies = fill_slots(load_config(config, without=["context_sched"])).policies
    assert policies.prioritizer.owner == "mine"


def test_a_plug_in_that_abstains_leaves_the_slot_to_another(distribution, write_config):
    distribution("shy", f"{HEAD}\n@hookimpl\ndef seer_make_prioritizer():\n    return None\n")
    policies = fill_slots(load_config(write_config(["shy", "context_sched"]))).policies
    assert policies.prioritizer.owner == "context_sched"
    assert policies.splitter.owner == "seer-core"


def test_observers_are_many_and_keep_the_order_of_the_config(distribution, write_config):
    source = f"{HEAD}\nclass O:\n    def observe(self, now, event, commands): pass\n"
    source += "\n@hookimpl\ndef seer_make_observer():\n    return O()\n"
    for name in ("a", "b", "c"):
        distribution(f"watch_{name}", source)
    observers = fill_slots(load_config(write_config(["watch_c", "watch_a", "watch_b"]))).observers
    assert [slot.owner for slot in observers] == ["watch_c", "watch_a", "watch_b"]


def test_a_name_offered_by_two_distributions_names_both(distribution, write_config):
    distribution("mine", NAMED_QUEUE, project="one-seer", module="one")
    distribution("mine", NAMED_QUEUE, project="other-seer", module="other")
    with pytest.raises(PluginError, match=r"plug-in name 'mine' is offered by .* uninstall one") as caught:
        assemble(load_config(write_config(["mine"])))
    assert "one-seer" in str(caught.value)
    assert "other-seer" in str(caught.value)


def test_an_unknown_plug_in_suggests_the_nearest(write_config):
    with pytest.raises(ConfigError, match="called 'contxt_sched'; did you mean 'context_sched'"):
        assemble(load_config(write_config(["contxt_sched"])))
    with pytest.raises(ConfigError, match="called 'smi'; did you mean 'sim'"):
        assemble(load_config(write_config(engine="smi")))


def test_a_plug_in_in_the_wrong_place_says_where_it_belongs(write_config):
    with pytest.raises(
        ConfigError, match=r"'sim' in \[seer\].plugins makes engines only; write engine = \"sim\""
    ):
        assemble(load_config(write_config(["sim"])))
    with pytest.raises(ConfigError, match=r"'context_sched' makes no engines; \[seer\].engine must name one"):
        assemble(load_config(write_config(engine="context_sched")))


@pytest.mark.parametrize(
    ("hook", "base", "method", "fact"),
    [
        (
            "splitter",
            "WholeRequests",
            "explains(self)",
            "'explains' would never be called; rename it to 'explain'",
        ),
        ("prioritizer", "FirstComeFirstServed", "ticks(self, now)", "'ticks' would never be called"),
        ("placer", "LeastLoaded", "on_tick(self, now)", "rename it to 'tick'"),
        ("placer", "LeastLoaded", "group_over(self)", "'group_over' cannot be called with group: "),
        ("observer", "Observer", "complete(self, now, completion)", "rename it to 'completed'"),
        ("observer", "Observer", "completed(self, completion)", "'completed' cannot be called with now, "),
        ("drafter", "Drafter", "sources(self)", "it lacks policy, shares, source; is 'sources' meant for"),
        ("drafter", "Drafter", "source(self, engine)", "it lacks policy, shares"),
        ("kv_pool", "Pool", "connects(self, instance, report)", "rename it to 'connect'"),
        ("kv_pool", "Pool", "store(self)", "'store' cannot be called with instance_id: "),
        ("engines", "EngineFleet", "start(self)", "it lacks clock, engines, model, tokenizer"),
    ],
)
def test_a_method_that_would_never_be_called_is_refused_at_start(
    distribution, write_config, hook, base, method, fact
):
    source = f"""{HEAD}
from seer_core.scheduling.defaults import FirstComeFirstServed, LeastLoaded, WholeRequests
from seer_core.ports.kv import KVPool
from seer_core.ports.policy import Observer

class Pool(KVPool):
    async def start(self, instances): pass
    async def stop(self): pass
    async def clear(self): pass
    def store(self, instance_id): pass
    def stats(self): pass

class Drafter: pass
class EngineFleet: pass

class Mine({base}):
    def {method}: pass

@hookimpl
def seer_make_{hook}():
    return Mine()
"""
    if base == "Observer":
        observe = "class Mine(Observer):\n    def observe(self, now, event, commands): pass\n"
        source = source.replace("class Mine(Observer):\n", observe)
    distribution("mine", source)
    config = {
        "engines": {"engine": "mine"},
        "kv_pool": {"seer": 'kv_pool = "mine"'},
    }.get(hook, {"plugins": ["mine"]})
    with pytest.raises(PluginError) as caught:
        assemble(load_config(write_config(**config)))
    assert str(caught.value).startswith(f"plug-in 'mine' answered hook 'seer_make_{hook}' with a Mine, which")
    assert fact in str(caught.value)


def test_an_observer_of_a_program_is_checked_too(write_config):
    class Mine:
        def observe(self, now, event, commands):
            pass

        def complete(self, now, completion):
            pass

    with pytest.raises(PluginError, match="observer Mine is no Observer: its method 'complete' would never"):
        rollout(write_config(), [{"prompt": "x"}], observers=[Mine()])


@pytest.mark.parametrize(
    ("engines", "fact"),
    [
        ("['gpu']", "answered hook 'seer_make_engines' with a str among its engines, which is no Engine"),
        ("[Engine(), Engine()]", "made two engines with the id 'same'; number them"),
    ],
)
def test_engines_that_are_none_or_share_an_id_are_refused(distribution, write_config, engines, fact):
    methods = [name for name in vars(InstanceClient) if name[0] != "_"]
    source = f"{HEAD}\nclass Engine:\n    id = 'same'\n" + "".join(
        f"    {name} = print\n" for name in methods
    )
    source += f"class Fleet:\n    engines = {engines}\n    model = tokenizer = None\n"
    source += "    class clock: pass\n@hookimpl\ndef seer_make_engines():\n    return Fleet()\n"
    distribution("odd", source)
    with pytest.raises(PluginError) as caught:
        assemble(load_config(write_config(engine="odd")))
    assert fact in str(caught.value)
    assert "'odd'" in str(caught.value)


def test_the_page_s_example_of_settings_works(distribution, write_config):
    page = (Path(__file__).parents[2] / "docs/reference/hooks.md").read_text()
    [source] = [
        body for body in re.findall("```python\n(.*?)```", page, re.DOTALL) if "class Settings" in body
    ]
    distribution("even_pieces", source)
    config = load_config(write_config(["even_pieces"]), ["plugin.even_pieces.chunk_tokens=64"])
    splitter = fill_slots(config).policies.splitter
    assert (splitter.owner, splitter.strategy.chunk_tokens) == ("even_pieces", 64)
    with pytest.raises(ConfigError, match=r"\[plugin.even_pieces\].chunk_tokens"):
        fill_slots(load_config(write_config(["even_pieces"]), ["plugin.even_pieces.chunk_tokens=0"]))


def test_slots_are_listed_without_an_import(distribution):
    distribution("landmine", f"{NAMED_QUEUE}\nraise RuntimeError('imported')")
    distribution("relay", "from landmine_module import seer_make_prioritizer, seer_make_observer")
    distribution("garbled", "def f(:")
    assert offers("landmine") == ("prioritizer",)
    assert offers("relay") == ("prioritizer", "observer")
    assert offers("garbled") == ()
    assert offers("vllm") == ("engines",)
    assert offers("divided_rollout") == ("splitter", "placer")
    assert not {"landmine_module", "relay_module"} & set(sys.modules)


def test_every_installed_plug_in_of_ours_fills_a_slot_or_answers_the_doctor_alone():
    doctors = {"skyrl", "slime", "trl"}
    assert {name for name in installed() if not offers(name)} == doctors


def test_no_hook_is_called_and_nothing_is_looked_up_during_a_rollout(distribution, write_config, monkeypatch):
    source = f"""{HEAD}
from seer_core.scheduling.defaults import FirstComeFirstServed, LeastLoaded, WholeRequests

calls = []

class Watch:
    def observe(self, now, event, commands):
        calls.append("observed")

def made(slot, strategy):
    calls.append(slot)
    return strategy

@hookimpl
def seer_make_splitter(settings, startup):
    return made("splitter", WholeRequests())

@hookimpl
def seer_make_prioritizer(settings, startup):
    return made("prioritizer", FirstComeFirstServed())

@hookimpl
def seer_make_placer(settings, startup):
    return made("placer", LeastLoaded())

@hookimpl
def seer_make_observer(settings, startup):
    return made("observer", Watch())
"""
    distribution("counting", source)

    async def run():
        async with Runtime.from_config(write_config(["counting"])) as runtime:
            groups = runtime.groups({"prompt": letter, "n": 3, "max_tokens": 8} for letter in "ab")
            with monkeypatch.context() as patch:
                patch.setattr("pluggy._hooks.HookCaller.__call__", _forbidden)
                patch.setattr("pluggy._manager.PluginManager.__init__", _forbidden)
                patch.setattr("seer_host.discovery.entry_points", _forbidden)
                return await runtime.rollout(groups).wait()

    assert len(asyncio.run(run()).completions) == 6
    calls = sys.modules["counting_module"].calls
    assert calls[:4] == ["splitter", "prioritizer", "placer", "observer"]
    assert set(calls[4:]) == {"observed"}


def _forbidden(*arguments, **options):
    raise AssertionError("a hook was called, or plug-ins were looked up, after start-up")
