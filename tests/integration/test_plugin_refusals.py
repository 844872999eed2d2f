"""Plug-ins that are wrong in one way each: the error names the culprit, the fact and the remedy."""

import re

import pytest
from seer_host.config_files import load_config
from seer_session.assembly import assemble

from seer_core.errors import ConfigError, PluginError

from .helpers import HEAD, NAMED_QUEUE


@pytest.fixture
def refused(distribution, write_config):
    """Return a function that enables a plug-in with this source and returns the error's text."""

    def start(source, kind=PluginError, more=""):
        distribution("mine", source)
        with pytest.raises(kind) as caught:
            assemble(load_config(write_config(["mine"], more)))
        return str(caught.value)

    return start


def test_a_plug_in_that_cannot_be_imported_is_named_with_its_distribution(refused):
    message = refused("import a_module_that_nobody_has")
    assert "plug-in 'mine' cannot be imported" in message
    assert "a_module_that_nobody_has" in message
    assert "seer-mine" in message
    assert "-p no:mine" in message


@pytest.mark.parametrize("error", ["SystemExit", "GeneratorExit", "StopIteration", "BaseException"])
def test_a_plug_in_that_raises_anything_when_imported_is_named_too(refused, error):
    message = refused(f"raise {error}(3)")
    fact = rf"plug-in 'mine' cannot be imported: {error}: 3 at \S*mine_module.py:1;"
    assert re.search(fact, message)


def test_a_factory_that_raises_is_named_with_its_hook(refused):
    message = refused(f"{HEAD}\n@hookimpl\ndef seer_make_splitter():\n    return 1 / 0\n")
    assert "plug-in 'mine' raised in hook 'seer_make_splitter': ZeroDivisionError" in message
    assert "-p no:mine" in message


def test_a_factory_s_own_complaint_is_passed_on_as_it_is(refused):
    source = f"{HEAD}from seer_core.errors import ConfigError\n"
    source += "\n@hookimpl\ndef seer_make_splitter():\n    raise ConfigError('too big; make it smaller')\n"
    assert refused(source, ConfigError) == "too big; make it smaller"


@pytest.mark.parametrize(
    ("hook", "answer", "facts"),
    [
        ("splitter", "7", ["with a int", "no Splitter", "it lacks split"]),
        ("prioritizer", "[]", ["with a list", "no Prioritizer", "it lacks peek, push, take"]),
        ("placer", "object()", ["no Placer", "it lacks place"]),
        ("observer", "print", ["no Observer", "lacks observe"]),
        ("splitter", "type('Mine', (), {'split': None})", ["the class Mine", "return an object of it"]),
    ],
)
def test_a_hook_that_answers_with_the_wrong_type_says_what_it_lacks(refused, hook, answer, facts):
    message = refused(f"{HEAD}\n@hookimpl\ndef seer_make_{hook}():\n    return {answer}\n")
    assert f"plug-in 'mine' answered hook 'seer_make_{hook}'" in message
    for fact in facts:
        assert fact in message


def test_a_plug_in_without_a_hook_is_refused_with_how_to_mark_one(refused):
    message = refused("def make_prioritizer():\n    pass\n")
    assert "plug-in 'mine' implements no hook" in message
    assert "hookimpl" in message


def test_a_hook_that_is_not_marked_is_named_even_beside_one_that_is(refused):
    message = refused(f"{NAMED_QUEUE}\ndef seer_make_splitter():\n    pass\n")
    assert "plug-in 'mine': 'seer_make_splitter' is not marked as a hook" in message
    assert "hookimpl" in message


def test_a_misspelt_hook_is_named_with_those_there_are(refused):
    message = refused(f"{HEAD}\n@hookimpl\ndef seer_make_prioritiser():\n    pass\n")
    assert "seer_make_prioritiser" in message
    assert "'mine'" in message
    assert "seer_make_prioritizer" in message


def test_a_hook_that_asks_for_what_there_is_not_is_named(refused):
    message = refused(f"{HEAD}\n@hookimpl\ndef seer_make_splitter(settings, mood):\n    pass\n")
    assert "seer_make_splitter" in message
    assert "mood" in message


def test_settings_that_are_no_struct_are_named(refused):
    message = refused(f"{NAMED_QUEUE}\nSettings = dict\n")
    assert "plug-in 'mine': its `Settings`" in message
    assert "msgspec.Struct" in message


def test_a_plug_in_without_settings_takes_none(refused):
    message = refused(NAMED_QUEUE, ConfigError, "[plugin.mine]\nspeed = 3")
    assert "unknown key 'speed' in [plugin.mine]" in message


def test_a_required_setting_that_is_missing_is_named(refused):
    source = NAMED_QUEUE + "\nfrom msgspec import Struct\nclass Settings(Struct):\n    speed: int\n"
    assert refused(source, ConfigError) == (
        "[plugin.mine] lacks `speed`, which has no default; add a line: speed = ..."
    )


def test_engines_among_the_plug_ins_are_named_before_the_settings_that_they_lack(refused):
    source = f"{HEAD}\nfrom msgspec import Struct\nclass Settings(Struct):\n    model: str\n"
    source += "@hookimpl\ndef seer_make_engines(settings):\n    pass\n"
    message = refused(source, ConfigError)
    assert message == "'mine' in [seer].plugins makes engines only; write engine = \"mine\" instead"


@pytest.mark.parametrize(
    ("hook", "words"),
    [
        ("async def seer_make_splitter()", "hook 'seer_make_splitter' is async; make it a plain function"),
        (
            "def seer_make_splitter(mood)",
            "'seer_make_splitter' asks for 'mood'; .* settings, startup and inner only",
        ),
        ("def seer_make_spliter()", "no hook 'seer_make_spliter'; did you mean 'seer_make_splitter'"),
        ("def make_splitter()", "no hook 'make_splitter'; did you mean 'seer_make_splitter'"),
        ("def seer_make_splitter()", r"ValueError: one two at \S*mine_module.py:5; run without it"),
    ],
)
def test_each_fault_of_a_hook_is_one_sentence(refused, hook, words):
    message = refused(f"{HEAD}\n@hookimpl\n{hook}:\n    raise ValueError('one\\ntwo')\n")
    assert re.search(words, message), message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("\nraise KeyError('a\\nb')", r"KeyError: 'a\\nb' at \S*mine_module.py:2; mend or"),
        ("def f(:", r"SyntaxError: invalid syntax \(mine_module.py, line 1\); mend or"),
    ],
)
def test_an_import_that_fails_names_the_line(refused, source, words):
    assert re.search(words, refused(source))
