"""The lab: what it checks, what it hides, and what it needs."""

import subprocess
import sys

import msgspec
import pytest
from seer_host.ports import reserved_port
from seer_testing import simulate as kit

from seer_core.errors import ConfigError, PluginError, StalledError
from seer_core.model import PromptGroup
from tests.support.patience import PATIENCE_S

pytest_plugins = ["seer_testing.simulate"]

HEAD = """
from seer_core.scheduling.defaults import FirstComeFirstServed, LeastLoaded
from seer_core.plugins.hookspecs import hookimpl
"""

PEEPING = f"""{HEAD}
SEEN = []

class Peeping(FirstComeFirstServed):
    def push(self, request):
        SEEN.append(request.group.known_lengths)
        super().push(request)

@hookimpl
def seer_make_prioritizer():
    return Peeping()
"""

MOODY = f"""{HEAD}
MADE = []

class Moody(LeastLoaded):
    def place(self, request, chunk_tokens, instances):
        return instances[len(MADE) % len(instances)]

@hookimpl
def seer_make_placer():
    MADE.append(1)
    return Moody()
"""

NEVER = f"""{HEAD}
class Never(LeastLoaded):
    def place(self, request, chunk_tokens, instances):
        return None

@hookimpl
def seer_make_placer():
    return Never()
"""


def test_a_rollout_takes_no_plug_in_at_all(simulation):
    result = simulation.run()
    assert len(result.completions) == len(result.order) == len(result.tokens) == 16
    assert [len(result.tokens[f"g2/{index}"]) for index in range(4)] == [15, 9, 22, 12]
    assert result.makespan_s > result.tail_s > 0
    assert result.trace[0].now == 0


def test_plug_ins_are_found_by_name_and_set_by_tables(simulation):
    result = simulation.run(
        ["divided_rollout"], [(50, 20)], settings={"divided_rollout": {"chunk_tokens": 16}}
    )
    assert result.summary.chunks == 4 + 2


def test_its_defaults_suit_those_of_divided_rollout(simulation):
    result = simulation.run(["divided_rollout"])
    assert (result.preemptions, len(result.order)) == (0, 16)


def test_the_defaults_of_divided_rollout_suit_the_lab(simulation):
    assert len(simulation.run(["divided_rollout"]).completions) == 16


def test_engines_are_set_by_keywords(simulation):
    result = simulation.run(groups=[(9, 9, 9)], instances=1, max_running=1)
    assert result.order == ["g0/0", "g0/1", "g0/2"]
    assert {name for completion in result.completions for name in completion.instances} == {"sim-0"}


def test_memory_is_scarce_by_default(simulation):
    assert simulation.run(["group_round_robin"]).preemptions > 0


def test_groups_may_be_whole_ones(simulation):
    group = PromptGroup(id="mine", prompt_token_ids=(5, 6, 7), n=2, max_tokens=30, known_lengths=(12, 99))
    result = simulation.run(groups=[group])
    assert {name: len(tokens) for name, tokens in result.tokens.items()} == {"mine/0": 12, "mine/1": 30}


@pytest.mark.parametrize(("oracle", "seen"), [(False, {None}), (True, {(7, 5)})])
def test_policies_see_lengths_only_as_oracles(simulation, distribution, oracle, seen):
    distribution("peeping", PEEPING)
    simulation.run(["peeping"], [(7, 5)], oracle=oracle)
    assert set(sys.modules["peeping_module"].SEEN) == seen


def test_a_policy_that_does_not_repeat_itself_is_found(simulation, distribution):
    distribution("moody", MOODY)
    with pytest.raises(AssertionError, match="two equal runs differ from event"):
        simulation.run(["moody"])


WRITING = f"""{HEAD}
class Writing(FirstComeFirstServed):
    def peek(self):
        request = super().peek()
        if request is not None and request.index == 1:
            request.generated_tokens += 1
        return request

@hookimpl
def seer_make_prioritizer():
    return Writing()
"""

SERVING = f"""{HEAD}
import socket

class Serving:
    async def start(self):
        self.socket = socket.create_server(("127.0.0.1", PORT))

    async def stop(self):
        self.socket.close()

    def observe(self, now, event, commands):
        assert now < LIMIT_S

@hookimpl
def seer_make_observer():
    return Serving()
"""


def test_a_policy_that_changes_a_request_is_named(simulation, distribution):
    distribution("writing", WRITING)
    fact = r"'writing', slot 'prioritizer': peek\(\) changed what it was given: generated_tokens of request"
    with pytest.raises(PluginError, match=rf"{fact} 'g0/1' from 0 to 1 at \S*writing_module.py:\d+;"):
        simulation.run(["writing"])


def test_an_observer_that_serves_a_port_can_do_so_twice(simulation, distribution):
    with reserved_port() as port:
        distribution("serving", SERVING.replace("PORT", str(port)).replace("LIMIT_S", "1e9"))
        assert len(simulation.run(["serving"]).completions) == 16


def test_an_observer_that_raises_is_named(simulation, distribution):
    distribution("serving", SERVING.replace("PORT", "0").replace("LIMIT_S", "0.01"))
    with pytest.raises(PluginError, match="'serving', slot 'observer': raised AssertionError"):
        simulation.run(["serving"])


def test_a_policy_that_stalls_is_named(simulation, distribution):
    distribution("never", NEVER)
    with pytest.raises(StalledError, match="plug-in 'never' places no chunk"):
        simulation.run(["never"])


def test_a_plug_in_that_is_not_there_and_a_key_that_is_none_are_named(simulation):
    with pytest.raises(ConfigError, match="'contxt_sched'; did you mean 'context_sched'"):
        simulation.run(["contxt_sched"])
    with pytest.raises(ConfigError, match="unknown key 'chunk'"):
        simulation.run(["divided_rollout"], settings={"divided_rollout": {"chunk": 1}})


def cut(completion):
    return msgspec.structs.replace(completion, token_ids=[7])


@pytest.mark.parametrize(
    ("spoil", "fact"),
    [
        (lambda completions: completions.pop(), "lost: "),
        (lambda completions: completions.append(completions[0]), "twice: "),
        (lambda completions: completions.append(cut(completions.pop())), "has 1 tokens instead of"),
    ],
)
def test_a_response_that_is_missing_there_twice_or_cut_is_found(simulation, monkeypatch, spoil, fact):
    roll_out = kit._roll_out

    async def rolled_out(*arguments):
        result = await roll_out(*arguments)
        spoil(result.completions)
        return result

    monkeypatch.setattr(kit, "_roll_out", rolled_out)
    with pytest.raises(AssertionError, match=fact):
        simulation.run()


def test_without_the_simulator_it_says_what_to_install(simulation, monkeypatch):
    monkeypatch.setattr(kit, "installed", dict)
    with pytest.raises(PluginError, match=r"needs the engine plug-in 'sim'.*run `make setup`"):
        simulation.run()


def test_the_core_imports_no_test_library():
    script = (
        "import sys, seer_cli, seer_session.runtime;"
        "sys.exit(bool({'pytest', 'hypothesis', 'seer_testing'} & set(sys.modules)))"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=PATIENCE_S)


def test_without_its_libraries_the_kit_says_what_to_install():
    script = "import sys; sys.modules['hypothesis'] = None; import seer_testing"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=PATIENCE_S)
    assert "seer_testing needs hypothesis, which is not installed; run `make setup`" in done.stderr
