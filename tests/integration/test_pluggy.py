"""Plug-ins as users of pluggy expect them: order, wrappers, names of hooks, blocking, traces of calls."""

import sys

import attrs
import pytest
from seer_cli.comparison import arms_of, left_out
from seer_cli.installed import offers, slots_of
from seer_host.config_files import load_config
from seer_session.assembly import assemble, fill_slots, load_enabled
from seer_session.hooks import Plugin, SeerPluginManager

from seer_core.errors import ConfigError, PluginError

from .helpers import HEAD, NAMED_QUEUE

WATCH = f"""{HEAD}
from msgspec import Struct

class Settings(Struct, frozen=True):
    label: str = ""

class Watch:
    def __init__(self, label):
        self.label = label

    def observe(self, now, event, commands):
        pass

@hookimpl()
def seer_make_observer(settings):
    return Watch(settings.label)
"""

ROUND = f"""{HEAD}
seen = []

@hookimpl(wrapper=True)
def seer_make_observer(settings, startup):
    made = yield
    seen.append((settings.label, [each.label for each in made]))
    return made
"""


@pytest.fixture
def watches(distribution):
    """Return a function that installs an observer whose hook is marked with these options."""

    def install(name, options=""):
        distribution(name, WATCH.replace("@hookimpl()", f"@hookimpl({options})"))

    return install


def refusal(config):
    with pytest.raises((ConfigError, PluginError)) as caught:
        fill_slots(load_config(config))
    return str(caught.value)


def test_tryfirst_and_trylast_decide_the_order_of_observers(watches, write_config):
    watches("late", "trylast=True")
    watches("middle")
    watches("early", "tryfirst=True")
    strategies = fill_slots(load_config(write_config(["late", "middle", "early"])))
    assert [slot.owner for slot in strategies.observers] == ["early", "middle", "late"]


def test_tryfirst_and_trylast_decide_the_order_of_offers(distribution, write_config):
    distribution("plain", NAMED_QUEUE)
    distribution("first", NAMED_QUEUE.replace("@hookimpl", "@hookimpl(tryfirst=True)"))
    assert "slot 'prioritizer' is claimed by 'first' and 'plain'" in refusal(write_config(["plain", "first"]))


def test_a_wrapper_goes_round_every_call_of_a_hook_each_with_its_own_settings(
    watches, distribution, write_config
):
    watches("a")
    watches("b")
    distribution("round", ROUND)
    config = load_config(write_config(["a", "round", "b"]), ["plugin.a.label=x", "plugin.b.label=y"])
    strategies = fill_slots(config)
    assert [(slot.owner, slot.strategy.label) for slot in strategies.observers] == [("a", "x"), ("b", "y")]
    assert sys.modules["round_module"].seen == [("x", ["x"]), ("y", ["y"])]
    assert slots_of(config)["round"] == offers("round") == ()


@pytest.mark.parametrize(
    "body",
    [
        "@hookimpl(wrapper=True)\ndef seer_make_splitter():\n    return [Whole(each) for each in (yield)]\n",
        "@hookimpl(hookwrapper=True)\ndef seer_make_splitter():\n    outcome = yield\n"
        "    outcome.force_result([Whole(each) for each in outcome.get_result()])\n",
        "@hookimpl(wrapper=True, specname='seer_make_splitter')\ndef mine():\n"
        "    return [Whole(each) for each in (yield)]\n",
    ],
)
def test_a_wrapper_may_change_what_a_hook_returns(distribution, write_config, body):
    source = f"{HEAD}from seer_core.scheduling.defaults import WholeRequests\n"
    source += "class Whole(WholeRequests):\n    def __init__(self, other):\n        self.other = other\n"
    distribution("whole", source + body)
    splitter = fill_slots(load_config(write_config(["whole", "divided_rollout"]))).policies.splitter
    assert splitter.owner == "divided_rollout"
    assert type(splitter.strategy).__name__ == "Whole"
    assert splitter.strategy.other.__module__.startswith("seer_divided_rollout")


def test_the_wrapper_of_the_first_plug_in_is_the_outermost(distribution, write_config, watches):
    watches("a")
    for name in ("outer", "inner"):
        source = ROUND.replace("    return made", f"    made[0].label += '{name} '\n    return made")
        distribution(name, source)
    strategies = fill_slots(load_config(write_config(["outer", "inner", "a"])))
    assert strategies.observers[0].strategy.label == "inner outer "


def test_specname_names_the_hook(distribution, write_config):
    source = NAMED_QUEUE.replace("@hookimpl", "@hookimpl(specname='seer_make_prioritizer')")
    distribution("mine", source.replace("def seer_make_prioritizer", "def queue"))
    assert offers("mine") == ("prioritizer",)
    assert fill_slots(load_config(write_config(["mine"]))).policies.prioritizer.owner == "mine"

    distribution("odd", f"{HEAD}@hookimpl(specname='seer_make_quue')\ndef seer_make_splitter():\n    pass\n")
    assert refusal(write_config(["odd"])).startswith("plug-in 'odd': there is no hook 'seer_make_quue'")


def test_two_functions_of_one_plug_in_make_two_observers_and_never_two_owners(distribution, write_config):
    second = "\n@hookimpl(specname='seer_make_{}')\ndef other():\n    return {}\n"
    distribution("pair", WATCH + second.format("observer", "Watch('other')"))
    observers = fill_slots(load_config(write_config(["pair"]))).observers
    assert [(slot.owner, slot.strategy.label) for slot in observers] == [("pair", ""), ("pair", "other")]

    distribution("twice", NAMED_QUEUE + second.format("prioritizer", "FirstComeFirstServed()"))
    assert refusal(write_config(["twice"])) == (
        "plug-in 'twice' answered hook 'seer_make_prioritizer' with 2 strategies; let it return one"
    )


def test_an_optional_hook_that_does_not_exist_is_left_out(distribution, write_config):
    optional = "\n@hookimpl(optionalhook=True)\ndef seer_make_tea():\n    raise AssertionError\n"
    distribution("mine", NAMED_QUEUE + optional)
    distribution("later", HEAD + optional)
    policies = fill_slots(load_config(write_config(["mine", "later"]))).policies
    assert policies.prioritizer.owner == "mine"


def test_a_plug_in_that_is_left_out_is_blocked_by_name(watches, write_config):
    watches("mine")
    config = load_config(write_config(["mine", "context_sched"]), without=["mine"])
    manager = SeerPluginManager([plugin for _, plugin in load_enabled(config)], config.blocked)
    assert manager.is_blocked("mine")
    assert manager.register(sys.modules[__name__], "mine") is None
    assert {name for name, plugin in manager.list_name_plugin() if plugin} == {"sim", "context_sched"}


def test_debug_logs_each_call_of_a_hook(write_config, seer):
    config = write_config(["context_sched"])
    shown = seer("config", config, "--debug")
    assert "plug-in context_sched [pluginmanage]" in shown.stderr
    assert "finish seer_make_prioritizer --> [" in shown.stderr
    assert "seer_make_prioritizer" not in seer("config", config).stderr


def test_a_module_that_is_both_engine_and_plug_in_is_registered_once_and_has_both_settings(
    distribution, write_config
):
    source = "class Fleet:\n    engines = ()\n    model = tokenizer = None\n    class clock: pass\n"
    source += "@hookimpl\ndef seer_make_engines(settings):\n    Fleet.label = settings.label\n"
    distribution("both", WATCH + source + "    return Fleet()\n")
    more = '[engine.both]\nlabel = "fleet"\n[plugin.both]\nlabel = "watch"'
    config = load_config(write_config(["both"], more, engine="both"))
    assembly = assemble(config)
    assert assembly.fleet.label == "fleet"
    assert [slot.strategy.label for slot in assembly.strategies.observers] == ["watch"]
    left = assemble(load_config(write_config(["both"], more, engine="both"), without=["both"]))
    assert (left.fleet.label, left.strategies.observers) == ("fleet", ())


def test_a_module_under_two_names_has_the_settings_of_each(distribution, write_config):
    for name in ("one", "two"):
        distribution(name, WATCH, module="shared")
    config = load_config(write_config(["two", "one"]), ["plugin.one.label=x", "plugin.two.label=y"])
    observers = fill_slots(config).observers
    assert [(slot.owner, slot.strategy.label) for slot in observers] == [("two", "y"), ("one", "x")]


def test_wrappers_of_both_hooks_go_round_what_one_function_makes_for_two_slots(distribution, write_config):
    source = f"{HEAD}from seer_core.scheduling.defaults import FirstComeFirstServed, LeastLoaded\n"
    source += "class Both(FirstComeFirstServed, LeastLoaded): pass\n"
    source += "@hookimpl\ndef seer_make_prioritizer():\n    return Both()\n"
    distribution("both", source + "seer_make_placer = seer_make_prioritizer\n")
    source = f"{HEAD}seen = []\n"
    for hook in ("prioritizer", "placer"):
        source += f"@hookimpl(wrapper=True)\ndef seer_make_{hook}():\n"
        source += "    made = yield\n    seen.extend(made)\n    return made\n"
    distribution("round", source)
    policies = fill_slots(load_config(write_config(["both", "round"]))).policies
    assert policies.prioritizer.strategy is policies.placer.strategy
    assert sys.modules["round_module"].seen == [policies.placer.strategy] * 2


def test_arms_of_a_comparison_all_have_what_wraps_observers_and_none_what_wraps_placers(
    distribution, write_config
):
    distribution("watching", ROUND)
    distribution("deciding", ROUND.replace("observer", "placer"))
    config = load_config(write_config(["watching", "deciding", "context_sched"]))
    assert {arm.observers for arm in arms_of(config)} == {("watching",)}
    assert left_out(config) == ["deciding"]


@pytest.mark.parametrize(
    ("source", "fact"),
    [
        (
            "@hookimpl(wrapper=True)\ndef seer_make_observer():\n    pass\n",
            "pluggy refuses plug-in 'wrong': .* function is not a generator function",
        ),
        (
            "@hookimpl(wrapper=True, hookwrapper=True)\ndef seer_make_observer():\n    yield\n",
            "pluggy refuses plug-in 'wrong': .* options are mutually exclusive",
        ),
        (
            "@hookimpl(wrapper=True)\ndef seer_make_observer():\n    yield\n",
            "hook 'seer_make_observer', which 'wrong' wraps, returned None; let the wrapper return the list",
        ),
        (
            "@hookimpl(wrapper=True)\ndef seer_make_observer():\n    yield\n    1 / 0\n",
            r"plug-in 'wrong' raised in hook 'seer_make_observer': ZeroDivisionError: .*wrong_module.py:5;"
            r" run without it: -p no:wrong",
        ),
        (
            "@hookimpl\ndef seer_make_observer():\n    pass\n"
            "@hookimpl(wrapper=True, specname='seer_make_observer')\ndef round():\n    return (yield)\n",
            "plug-in 'wrong' answers hook 'seer_make_observer' and wraps it, too; put the wrapper into",
        ),
    ],
)
def test_a_wrapper_that_is_wrong_is_named(distribution, watches, write_config, source, fact):
    watches("right")
    distribution("wrong", HEAD + source)
    config = write_config(["right", "wrong"])
    with pytest.raises(PluginError, match=fact) as caught:
        fill_slots(load_config(config))
    assert "\n" not in str(caught.value)


def test_a_factory_that_raises_is_named_and_not_what_wraps_it(distribution, write_config):
    distribution("round", ROUND)
    distribution("broken", f"{HEAD}@hookimpl\ndef seer_make_observer():\n    1 / 0\n")
    assert refusal(write_config(["broken", "round"])).startswith(
        "plug-in 'broken' raised in hook 'seer_make_observer': ZeroDivisionError"
    )


def test_what_only_wraps_engines_makes_none(distribution, write_config):
    distribution("round", ROUND.replace("observer", "engines"))
    with pytest.raises(ConfigError, match="plug-in 'round' makes no engines"):
        assemble(load_config(write_config(engine="round")))


def test_an_object_in_place_of_a_module_needs_a_hash():
    @attrs.define
    class Mine:
        pass

    with pytest.raises(PluginError, match=r"pluggy refuses plug-in 'mine': .*unhashable"):
        SeerPluginManager([Plugin("mine", "here", Mine(), None, {})])
