"""Reading a configuration: every wrong key and value is an error that says where and what instead."""

import pytest
from seer_host.config_files import load_config
from seer_session.assembly import assemble

from seer_core.errors import ConfigError, SeerError


@pytest.fixture
def refused(tmp_path):
    """Return a function that loads and assembles a config and returns the error's text."""

    def load(text, *overrides, without=()):
        path = tmp_path / "seer.toml"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        with pytest.raises(SeerError) as caught:
            assemble(load_config(path, overrides, without))
        return str(caught.value)

    return load


def test_defaults_fill_what_a_config_leaves_out(tmp_path):
    path = tmp_path / "seer.toml"
    path.write_text("")
    config = load_config(path)
    assert (config.seer.engine, config.seer.plugins, config.rollout.n) == ((), (), 8)
    assert config.origins == {}
    assert config.base_dir == tmp_path


def test_every_set_value_remembers_where_it_was_set(write_config):
    path = write_config(
        ["divided_rollout", "context_sched"],
        "[rollout]\nn = 2\n[engine.sim.lengths]\nsigma = 0.5\n[plugin.divided_rollout]\nchunk_tokens = 64",
    )
    config = load_config(path, ["rollout.n=4", "engine.sim.cost={overhead_s = 0.1}"], ["context_sched"])
    assert config.rollout.n == 4
    assert config.seer.plugins == ("divided_rollout",)
    assert config.origins == {
        "seer.plugins": "-p no:context_sched",
        "seer.engine": str(path),
        "rollout.n": "--set rollout.n=4",
        "engine.sim.lengths.sigma": str(path),
        "engine.sim.cost.overhead_s": "--set engine.sim.cost={overhead_s = 0.1}",
        "plugin.divided_rollout.chunk_tokens": str(path),
    }


def test_a_table_set_as_a_whole_replaces_the_file_s(write_config):
    path = write_config(more="[engine.sim.lengths]\nsigma = 0.5\nmean_tokens = 9")
    config = load_config(path, ["engine.sim.lengths={sigma = 0.1}"])
    assert config.engine["sim"]["lengths"] == {"sigma": 0.1}
    assert "engine.sim.lengths.mean_tokens" not in config.origins
    assert config.origins["engine.sim.lengths.sigma"].startswith("--set")


@pytest.mark.parametrize(
    ("override", "value"),
    [("seer.engine=sim", "sim"), ('seer.engine="sim"', "sim"), ("seer.engine = 'sim'", "sim")],
)
def test_a_set_value_is_toml_or_else_a_string(write_config, override, value):
    assert load_config(write_config(), [override]).seer.engine == value


@pytest.mark.parametrize(
    ("text", "facts"),
    [
        ("[seeer]", ["unknown key 'seeer'", "top level", "did you mean 'seer'?"]),
        ("[seer]\npulgins = []", ["'pulgins'", "[seer]", "did you mean 'plugins'?"]),
        ("[rollout]\nmax_token = 3", ["'max_token'", "[rollout]", "did you mean 'max_tokens'?"]),
        ("[compare]\nbase_line = []", ["'base_line'", "[compare]", "did you mean 'baseline'?"]),
        ("[engine.sim]\ninstanses = 2", ["'instanses'", "[engine.sim]", "did you mean 'instances'?"]),
        ("[engine.sim.lengths]\nsgma = 1", ["'sgma'", "[engine.sim.lengths]", "did you mean 'sigma'?"]),
        (
            "[plugin.divided_rollout]\nchunk_size = 1",
            ["'chunk_size'", "[plugin.divided_rollout]", "did you mean 'chunk_tokens'?"],
        ),
        ("[plugin.divided_rolout]", ["[plugin.divided_rolout]", "did you mean 'divided_rollout'?"]),
        ("[engine.simm]", ["[engine.simm]", "did you mean 'sim'?"]),
        ("rollout = 3", ["rollout must be a table", "[rollout]"]),
        ("[engine]\nsim = 3", ["engine.sim must be a table", "3"]),
    ],
)
def test_an_unknown_key_is_named_with_the_nearest_known_one(refused, text, facts):
    head = '[seer]\nengine = "sim"\nplugins = ["divided_rollout"]\n' if "seer" not in text else ""
    # A bare key at the top level must come before the first table.
    message = refused(f"{text}\n{head}" if text.startswith("rollout") else f"{head}{text}")
    for fact in facts:
        assert fact in message


@pytest.mark.parametrize(
    ("text", "facts"),
    [
        ("[rollout]\nn = 'many'", ["[rollout].n", "expected `int`", "'many'"]),
        ("[rollout]\nn = 0", ["[rollout].n", ">= 1", "0"]),
        ("[rollout]\nn = 1.5", ["[rollout].n", "expected `int`", "1.5"]),
        ("[rollout]\nmax_tokens = true", ["[rollout].max_tokens", "expected `int`", "True"]),
        ("[rollout]\ntemperature = -1", ["[rollout].temperature", ">= 0"]),
        ("[rollout]\ntemperature = nan", ["[rollout].temperature", ">= 0"]),
        ("[rollout]\ntop_p = 1.5", ["[rollout].top_p", "<= 1"]),
        ("[rollout]\ntop_k = -1", ["[rollout].top_k", ">= 0"]),
        ("[compare]\noracle = 'x'", ["[compare].oracle", "expected `array`", "'x'"]),
        ("[plugin.divided_rollout]\nchunk_tokens = '2k'", ["chunk_tokens", "auto", "'2k'"]),
        ("[plugin.divided_rollout]\nchunk_tokens = 0", ["chunk_tokens", ">= 1"]),
        ("[plugin.divided_rollout]\nchunk_kib = 2", ["'chunk_kib'", "did you mean 'chunk_tokens'?"]),
        ("[engine.sim]\nstart_ms = 10", ["'start_ms'", "did you mean 'start_s'?"]),
        ("[engine.sim]\nstart_s = '10 ms'", ["[engine.sim].start_s", "expected `float`", "'10 ms'"]),
        ("[engine.sim]\npreset = 'h800-moonligt'", ["[engine.sim].preset", "did you mean 'h800-moonlight'?"]),
        ("[engine.sim.lengths]\nsigma = 'x'", ["[engine.sim].lengths.sigma", "expected `float`"]),
        ("[[engine.sim.kill_at_s]]\ninstance = 'sim-0'", ["kill_at_s[0]", "`at_s`"]),
    ],
)
def test_a_wrong_type_or_unit_names_the_key_and_what_is_expected(refused, text, facts):
    message = refused(f'[seer]\nengine = "sim"\nplugins = ["divided_rollout"]\n{text}')
    for fact in facts:
        assert fact in message


@pytest.mark.parametrize("text", ["[seer]\nplugins = 'divided_rollout'", "[seer]\nplugins = [1]"])
def test_the_plug_ins_are_a_list_of_names(refused, text):
    message = refused(text)
    assert "[seer].plugins" in message
    assert "expected" in message


def test_a_plug_in_enabled_twice_is_named(refused):
    message = refused('[seer]\nplugins = ["context_sched", "context_sched"]')
    assert "[seer].plugins lists 'context_sched' twice; keep one" in message
    message = refused('[compare]\ntechniques = ["context_sched", "context_sched"]')
    assert "[compare].techniques lists 'context_sched' twice; keep one" in message


@pytest.mark.parametrize(
    ("text", "fact"),
    [
        (b"[seer", "Expected ']'"),
        (b"# \xff\xfe", "byte 0xff at 2"),
        (b"\xff\xfe[\0", "it is text in UTF-16 or UTF-32, save it as UTF-8"),
        (b"[seer]\nseed 1\n", "line 2"),
    ],
)
def test_what_is_not_toml_is_an_error_with_its_place(refused, tmp_path, text, fact):
    message = refused(text)
    assert f"{tmp_path / 'seer.toml'} is not valid TOML" in message
    assert fact in message


def test_a_config_that_cannot_be_read_is_named(tmp_path):
    for path in (tmp_path / "none.toml", tmp_path):
        with pytest.raises(ConfigError, match=f"cannot read {path}: .*; name an existing TOML file"):
            load_config(path)


@pytest.mark.parametrize(
    ("override", "fact"),
    [
        ("rollout.n", "is not KEY=VALUE"),
        ("n=3", "dotted key"),
        ("rollout..n=3", "dotted key"),
        ("rollout.m=3", "unknown key 'm' in [rollout]; known: allowed_token_ids, bad_words,"),
        ("seer.engine.sim=3", "'engine' is a value, not a table"),
        ("rollout.n=several", "expected `int`"),
    ],
)
def test_a_wrong_override_says_why(refused, override, fact):
    assert fact in refused('[seer]\nengine = "sim"\n[rollout]\nn = 2', override)


def test_only_an_enabled_plug_in_can_be_left_out(refused):
    message = refused('[seer]\nplugins = ["context_sched"]', without=["contxt_sched"])
    assert "-p no:contxt_sched" in message
    assert "did you mean 'context_sched'?" in message


@pytest.mark.parametrize(
    ("text", "fact"),
    [
        (b"\xef\xbb\xbf[seer]", "byte-order mark, save it as UTF-8 without one"),
        (b"[rollout]\nn = " + b"9" * 5000, "an integer in it has thousands of digits"),
        (b"[plugin.x]\na = " + b"[" * 5000, "nested too deeply"),
        (b"[plugin.x]\na = " + b"{a = " * 5000, "nested too deeply"),
    ],
    ids=range(4),
)
def test_toml_that_python_s_reader_dies_of_is_an_error_with_the_file(refused, tmp_path, text, fact):
    message = refused(text)
    assert message.startswith(f"{tmp_path / 'seer.toml'} is not valid TOML: ")
    assert fact in message


@pytest.mark.parametrize(
    ("text", "fact"),
    [
        ("[rollout]\nn = 0x" + "f" * 5000, "rollout.n is an integer beyond 64 bits"),
        ("[rollout]\nseed = [[9223372036854775808]]", "rollout.seed is an integer beyond 64 bits"),
        (f"{'a.' * 200}a = 1", "a is nested more than 100 deep"),
    ],
    ids=range(3),
)
def test_toml_beyond_its_own_limits_is_an_error_with_the_key(refused, text, fact):
    assert fact in refused(text)


@pytest.mark.parametrize(
    ("override", "fact"),
    [
        ("rollout.n=\udcff", r"--set 'rollout.n=\udcff' is not UTF-8; type it anew"),
        ("rollout.n=" + "9" * 5000, "--set rollout.n: an integer in it has thousands of digits"),
        ("rollout.n=" + "[" * 5000, "--set rollout.n: it is nested too deeply"),
        ("rollout.n=0x" + "f" * 5000, "rollout.n is an integer beyond 64 bits"),
        (f"a{'.a' * 200}=1", "its key has 201 parts"),
        ("engine." + "k" * 1_000_000 + "=1", "(1,000,000 characters)"),
        ("rollout.\x1b[2J=1", r"unknown key '\x1b[2J'"),
    ],
    ids=range(7),
)
def test_an_override_that_no_reader_survives_is_one_short_sentence(refused, override, fact):
    message = refused("", override)
    assert fact in message
    assert len(message) < 1000
    assert message.isprintable()


@pytest.mark.parametrize("value", ["inf", "-inf", "nan", "1e300"])
@pytest.mark.parametrize(
    "key",
    [
        "rollout.temperature",
        "engine.sim.start_s",
        "engine.sim.report_interval_s",
        "engine.sim.lengths.mean_tokens",
        "engine.sim.lengths.sigma",
        "engine.sim.cost.overhead_s",
        "engine.sim.acceptance.step_s",
        "kv_pool.sim_pool.latency_s",
        "kv_pool.sim_pool.bandwidth_bytes_per_s",
        "plugin.divided_rollout.growth_headroom",
        "plugin.grouped_spec.group_ttl_s",
        "plugin.grouped_spec.priority_factor",
    ],
)
def test_no_setting_takes_infinity_nan_or_what_becomes_it(refused, key, value):
    plugins = '[seer]\nengine = "sim"\nkv_pool = "sim_pool"\nplugins = ["divided_rollout", "grouped_spec"]'
    message = refused(plugins, f"{key}={value}")
    assert key.rpartition(".")[2] in message
    assert "expected `float`" in message.lower()


def test_counts_that_would_fill_the_machine_are_refused(refused):
    message = refused('[seer]\nengine = "sim"', "engine.sim.instances=1000000000000")
    assert "[engine.sim].instances: expected `int` <= 65536" in message
