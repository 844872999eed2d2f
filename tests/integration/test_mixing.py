"""Engines of two kinds in one rollout, by one line of the config."""

import json
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
from seer_cli.installed import slots_of
from seer_host.config_files import load_config
from seer_session.assembly import assemble
from seer_session.merge_fleets import merge_fleets
from seer_session.runtime import Runtime

from seer_core.errors import ConfigError, PluginError
from seer_core.ports.clock import RealClock
from seer_core.ports.engine import ModelInfo
from tests.support.eventually import aeventually

from .helpers import play, tokens

NO_MODEL = Path(__file__).parents[2] / "examples/plugins/engines/seer_no_model/__init__.py"

MIGRATING = """
from seer_core.plugins.hookspecs import hookimpl
from seer_core.ports.policy import Placer

class Migrating(Placer):
    def place(self, request, chunk_tokens, instances):
        others = [each for each in instances if each.id != request.instance]
        return min(others or instances, key=lambda each: each.running)

@hookimpl
def seer_make_placer():
    return Migrating()
"""

CHUNKS = "[plugin.divided_rollout]\nchunk_tokens = 8\n"
RECORDS = [{"prompt_token_ids": [1, 2, 3], "n": 4}, {"prompt_token_ids": [4, 5], "n": 4}]


@pytest.fixture
def kinds(distribution):
    """Two kinds of engines, ``here`` and ``there``, of equal tokens; and the placer ``migrating``."""
    source = NO_MODEL.read_text()
    for name in ("here", "there"):
        distribution(name, source.replace("no_model", name))
    distribution("migrating", MIGRATING)


@pytest.fixture
def write(write_config):
    """Return a function that writes a config for engines of these kinds."""

    def write(engine, plugins=(), more="", slots=""):
        path = write_config(plugins, more, engine="replaced", seer=slots)
        path.write_text(path.read_text().replace('"replaced"', json.dumps(engine)))
        return path

    return write


def roll_out(config):
    async def run():
        async with Runtime.from_config(config) as runtime:
            return await runtime.rollout(runtime.groups(RECORDS)).wait()

    return play(run())


def test_one_rollout_goes_on_on_either_kind_to_the_same_tokens(kinds, write):
    plugins, slots = ["divided_rollout", "migrating"], "slots.placer = 'migrating'"
    mixed = roll_out(write(["here", "there"], plugins, f"{CHUNKS}[engine.there]\ninstances = 1", slots))
    instances = {chunk.instance for each in mixed.completions for chunk in each.chunks}
    assert instances == {"here-0", "here-1", "there-0"}
    assert mixed.summary.migrations > len(mixed.completions)
    alone = roll_out(write("here", plugins, CHUNKS, slots))
    assert tokens(mixed.completions) == tokens(alone.completions)


def test_commands_show_both_kinds_and_their_settings(kinds, write, seer, tmp_path):
    config = write(["here", "there"], more="[engine.there]\ninstances = 3")
    assert slots_of(load_config(config))["there"] == slots_of(load_config(config))["here"] == ("engines",)
    out = tmp_path / "out.json"
    assert seer("config", config, "--json", out).exit_code == 0
    rows = {row["key"]: row["value"] for row in json.loads(out.read_bytes())}
    assert rows["seer.engine"] == ["here", "there"]
    assert (rows["engine.here.instances"], rows["engine.there.instances"]) == (2, 3)
    assert seer("plugins", config, "--json", out).exit_code == 0
    assert {"here", "there"} <= {row["name"] for row in json.loads(out.read_bytes()) if row["enabled"]}
    assert seer("doctor", config).exit_code == 0


def test_a_run_says_which_engines_it_starts_and_writes_them_down(kinds, write, seer, write_prompts, tmp_path):
    prompts = write_prompts(*RECORDS)
    result = seer("run", write(["here", "there"]), "--prompts", prompts, "--out", tmp_path / "out")
    assert result.exit_code == 0, result.output
    assert "starting 4 here and there instances ..." in result.output
    assert json.loads((tmp_path / "out/summary.json").read_bytes())["engine"] == ["here", "there"]


def test_a_comparison_runs_on_both_kinds(kinds, write, seer, write_prompts, tmp_path):
    prompts, report = write_prompts(*RECORDS), tmp_path / "compare.json"
    compared = "[compare]\ntechniques = ['divided_rollout']\noracle = []\n"
    config = write(["here", "there"], ["divided_rollout"], CHUNKS + compared)
    result = seer("compare", config, "--prompts", prompts, "--json", report)
    assert result.exit_code == 0, result.output
    assert "starting 4 here and there instances ..." in result.output
    assert all(arm["tokens_equal_to_baseline"] for arm in json.loads(report.read_bytes()))


def test_a_profile_is_of_one_kind(kinds, write, seer, tmp_path):
    result = seer("profile", write(["here", "there"]), "--out", tmp_path / "profile.json")
    assert result.exit_code == 2
    assert "profile one of them: --set seer.engine=here" in result.output


@pytest.mark.parametrize(
    ("engine", "complaint"),
    [
        (["here", "here"], r"\[seer\].engine lists 'here' twice; keep one"),
        ([], r"\[seer\].engine names no engine; write `engine =` .* installed are: .*\bsim\b"),
        (["here", "their"], r"engine.their: no installed plug-in is called 'their'; did you mean 'there'"),
        (["here", "migrating"], r"plug-in 'migrating' makes no engines"),
        (
            ["here", "sim"],
            r"'sim' lives on a clock of its own, and engines of several kinds need",
        ),
    ],
)
def test_kinds_that_cannot_be_mixed_are_named(kinds, write, engine, complaint):
    with pytest.raises(ConfigError, match=complaint):
        assemble(load_config(write(engine)))


def test_ids_that_two_kinds_share_are_refused(distribution, write):
    for name in ("here", "there"):
        distribution(name, NO_MODEL.read_text())
    with pytest.raises(PluginError, match="'here' and 'there' each made an engine with the id 'no_model-0'"):
        assemble(load_config(write(["here", "there"])))


@pytest.fixture
def kind(hand):
    """Return a function that makes a fleet of one engine, ``name``."""

    def make(name, tokenizer=None, **model):
        known = ModelInfo(**{"vocab_size": 1000, "max_model_tokens": 512, **model})
        return SimpleNamespace(engines=[hand(name)], clock=RealClock(), model=known, tokenizer=tokenizer)

    return make


def test_prompts_respect_the_limits_of_all_kinds(kind):
    word, other = object(), object()
    mixed = merge_fleets(
        {
            "x": kind("x-0", max_model_tokens=400, digest="one"),
            "y": kind("y-0", word, max_model_tokens=300, max_temperature=2.0),
            "z": kind("z-0", other, digest="one"),
        }
    )
    assert [engine.id for engine in mixed.engines] == ["x-0", "y-0", "z-0"]
    assert mixed.model == ModelInfo(1000, 300, 2.0, "one")
    assert mixed.tokenizer is word


def test_a_response_may_go_to_any_kind_so_it_is_whole_where_one_cannot_go_on_with_it(kind):
    stops, both = {"controls": ("stop", "min_p"), "whole_controls": ("stop",)}, ("model", "features")
    mixed = merge_fleets(
        {
            "own": kind("x-0", controls=("min_p", "stop"), takes_images=True, divided_attachments=both),
            "remote": kind("y-0", **stops, divided_attachments=("features", "priority")),
        }
    )
    assert mixed.model.controls == ("min_p", "stop")
    assert mixed.model.whole_controls == ("stop",)
    assert mixed.model.divided_attachments == ("features",)
    assert not mixed.model.takes_images
    closed = merge_fleets({"own": kind("x-0", divided_attachments=both), "sim": kind("y-0")})
    assert closed.model.divided_attachments is None


def test_one_kind_alone_stays_as_it_is(kind):
    alone = kind("x-0")
    assert merge_fleets({"x": alone}) is alone


@pytest.mark.parametrize(
    ("other", "what"), [({"vocab_size": 999}, "vocabularies"), ({"digest": "two"}, "model files")]
)
def test_kinds_with_different_models_are_refused(kind, other, what):
    with pytest.raises(
        ConfigError, match=rf"'x' and 'y' have different {what}; .*\[engine.x\] and \[engine.y\]"
    ):
        merge_fleets({"x": kind("x-0", digest="one"), "y": kind("y-0", **{"digest": "one", **other})})


def test_fingerprints_are_compared_among_those_made_alike(by_hand, hand, tmp_path):
    class Loader(hand):
        answer = ""

        async def update_weights(self, source, version):
            return self.answer

    engines = [Loader(f"{kind}-{number}") for kind in "xy" for number in range(3)]
    for engine in engines:
        engine.answer = f"{engine.id[0]}:first"
        engine.info = msgspec.structs.replace(engine.info, fingerprint=engine.answer)

    async def run():
        async with by_hand(*engines, weights_dir="none") as runtime:
            assert len(runtime.alive) == 6
            for engine in engines:
                engine.answer = f"{engine.id[0]}:second"
            engines[4].answer = "y:stale"
            await runtime.update_weights(tmp_path)
            assert set(runtime.alive) == {"x-0", "x-1", "x-2", "y-0", "y-2"}
            engines[4].answer = "y:second"
            await aeventually(lambda: "y-1" in runtime.alive)

    play(run())
