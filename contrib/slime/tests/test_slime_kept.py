"""slime keeps its servers: the hook over those that its router lists, which are stand-ins here."""

from __future__ import annotations

import pytest
from seer_host.switch import is_off
from seer_slime import generate_rollout
from seer_slime.engines import kept_config
from sglang_standin import StandInServers
from slime.rollout.base_types import call_rollout_fn

from seer_core.errors import ConfigError

CONFIG = """
[engine.remote]
require = "exact"
[plugin.divided_rollout]
chunk_tokens = {}
"""


@pytest.fixture
def servers():
    found = StandInServers()
    yield found
    found.close()


@pytest.fixture
def kept(args, servers, tmp_path):
    """Return slime's arguments where it has servers of its own, and a function that sets the chunks."""

    def chunks(tokens):
        path = tmp_path / f"seer-{tokens}.toml"
        path.write_text(CONFIG.format(tokens), "utf-8")
        args.seer_config = str(path)
        return args

    args.rollout_num_gpus = 2
    args.sglang_router_ip, _, args.sglang_router_port = servers.router.removeprefix("http://").partition(":")
    args.offload_rollout = True
    args.debug_rollout_only = False
    args.update_weight_transport = "nccl"
    args.rollout_temperature = 0.8  # log-probs are those that slime's servers report
    return chunks


def tokens(output):
    return [[sample.tokens for sample in group] for group in output.samples]


def test_batches_run_on_slimes_own_servers_divided_and_by_the_weights_that_slime_loads(kept, source, servers):
    args = kept(4)
    first = generate_rollout(args, 0, source)
    mine = [
        [each for each in server if each["sampling_params"]["max_new_tokens"] == 4]
        for server in servers.requests
    ]
    assert all(mine)
    assert len(first.samples) == 4
    servers.weights, servers.label = 1, "1"  # slime updates its servers while they are Seer's no more
    second = generate_rollout(args, 0, type(source)())
    assert tokens(second) != tokens(first)
    whole = generate_rollout(kept(256), 0, type(source)())
    assert tokens(whole) == tokens(second)


def test_off_is_slimes_own_function(kept, source, monkeypatch):
    import sys
    from types import ModuleType

    module = ModuleType("slime.rollout.sglang_rollout")
    module.generate_rollout = lambda *arguments: arguments
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setenv("SEER", "off")
    args = kept(4)
    assert call_rollout_fn(generate_rollout, args, 3, source, evaluation=False) == (args, 3, source, False)
    monkeypatch.setenv("SEER", "of")
    with pytest.raises(ConfigError, match="set it to on or off"):
        is_off()


def test_a_config_with_engines_is_refused(tmp_path):
    path = tmp_path / "seer.toml"
    path.write_text('[seer]\nengine = "sglang"\n', "utf-8")
    with pytest.raises(ConfigError, match="the engines are slime's"):
        kept_config(str(path), "http://127.0.0.1:1")
    assert kept_config(None, "http://127.0.0.1:1").seer.engines == ("remote",)
