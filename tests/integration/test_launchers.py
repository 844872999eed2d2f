"""The launcher that a config names, and the parts of a run that cannot do with one."""

import pytest
from seer_host.config_files import load_config
from seer_session.assembly import assemble

from seer_core.errors import ConfigError
from seer_core.ports.contracts import implemented

from .helpers import HEAD

LAUNCHER = f"""{HEAD}
class Launcher:
    async def launch(self, name, interpreter, environment, log, keep_log):
        raise NotImplementedError

    async def address(self):
        raise NotImplementedError

    async def find_place(self, name, waiting):
        raise NotImplementedError

@hookimpl
def seer_make_launcher(settings, startup):
    return Launcher()
"""

REAL = """
[engine.paced]
clock = "real"
"""


@pytest.fixture
def assembled(distribution, write_config):
    """Return a function that assembles a run whose launcher is of this source."""

    def assembled(source=LAUNCHER, more="", engine="paced", seer="", launcher="elsewhere", plugins=()):
        distribution("elsewhere", source)
        config = write_config(plugins, more, engine=engine, seer=f'launcher = "{launcher}"\n{seer}')
        return assemble(load_config(config))

    return assembled


def test_the_launcher_that_the_config_names_starts_the_workers(assembled):
    pytest.importorskip("seer_vllm")
    assembly = assembled(more=REAL)
    assert assembly.launcher.owner == "elsewhere"
    launchers = {engine.spec.launcher for engine in assembly.fleet.engines}
    assert launchers == {assembly.launcher.strategy}


@pytest.mark.parametrize("name", ["local", "mooncake"])
def test_a_pool_that_asks_for_the_launcher_serves_a_cluster(assembled, name):
    pytest.importorskip("seer_vllm")
    pool = assembled(more=REAL, seer=f'kv_pool = "{name}"').kv_pool.strategy
    assert implemented(pool, "add") is not None


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        (
            {"engine": "sim"},
            "[seer].launcher = 'elsewhere', but the engine 'sim' starts no workers by one; name another"
            " engine, or launcher = 'local'",
        ),
        (
            {"more": REAL, "seer": 'kv_pool = "sim_pool"'},
            "but the kv_pool 'sim_pool' is of one machine; write kv_pool = 'none', or launcher = 'local'",
        ),
        (
            {"launcher": "elswhere"},
            "[seer].launcher: no installed plug-in is called 'elswhere'; did you mean",
        ),
        ({"launcher": "sim"}, "plug-in 'sim' makes no launcher; [seer].launcher must name one that does"),
        (
            {"source": LAUNCHER.replace("Launcher()", "None"), "more": REAL},
            "plug-in 'elsewhere' makes no launcher; [seer].launcher must name one that does, or 'local'",
        ),
        (
            {"more": "[launcher.elsewhere]\nnodes = 2"},
            "unknown key 'nodes' in [launcher.elsewhere]",
        ),
        (
            {"plugins": ["elsewhere"], "more": REAL},
            """makes a launcher only; write launcher = "elsewhere" instead""",
        ),
    ],
)
def test_a_launcher_that_cannot_serve_a_run_is_refused_in_one_sentence(assembled, changes, complaint):
    with pytest.raises(ConfigError) as caught:
        assembled(**changes)
    assert complaint in str(caught.value)
