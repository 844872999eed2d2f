"""A process that has imported vLLM by ``preload`` can be forked, and a fork has nothing left to import.

The process is the fork server of the other tests, seen from one of its forks.
"""

import json
from types import SimpleNamespace

import pytest
from seer_vllm import internals
from seer_worker.process.names import Name

from seer_core.errors import EngineError

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore")]  # PyTorch deprecates this and that

LOOK = """
import json, sys
import fork_facts

there = set(sys.modules)
import torch
from seer_vllm.preload import ARCHITECTURES
from vllm.model_executor.models import ModelRegistry

facts = fork_facts.server_facts() | {
    "random_state_untouched": torch.equal(
        torch.get_rng_state(), torch.Generator().manual_seed(torch.initial_seed()).get_state()
    ),
    "to_inspect": [name for name in ARCHITECTURES if not hasattr(ModelRegistry.models[name], "model_cls")],
}

torch.set_num_threads(1)  # two that wait for a CPU spin
commands = []
sys.addaudithook(lambda event, given: event == "subprocess.Popen" and commands.append(given[0]))
fork_facts.started()
print(json.dumps(facts | {"imported": sorted(set(sys.modules) - there), "commands": commands}))
"""


@pytest.fixture(scope="module")
def facts(make_fleet, models, run_in_fork, tmp_path_factory):
    """Facts about a process after ``preload``, each from two forks of it that have started an engine."""
    pytest.importorskip("vllm")
    engine = make_fleet(models[0]).engines[0]
    found = []
    for _ in range(2):
        given = [engine.spec.instance, engine.spec.settings, str(tmp_path_factory.mktemp("fork"))]
        [*_, last] = run_in_fork(engine, LOOK, json.dumps(given))
        found.append(SimpleNamespace(**json.loads(last)))
    return found


def test_a_process_with_all_imports_has_one_thread_and_no_child_but_its_forks(facts):
    for fork in facts:
        assert fork.title.startswith("seer fork server")
        assert fork.threads == 1
        assert fork.children
        assert all(title.startswith("seer worker ") for title in fork.children)


def test_no_import_opens_a_device(facts):
    assert [fork.cuda for fork in facts] == [False, False]
    assert [fork.devices for fork in facts] == [[], []]


def test_the_random_numbers_of_a_process_with_all_imports_are_still_to_come(facts):
    assert [fork.random_state_untouched for fork in facts] == [True, True]


def test_a_fork_imports_nothing_more_for_an_engine(facts):
    assert [fork.imported for fork in facts] == [[], []]


def test_no_process_is_started_to_inspect_a_common_model(facts):
    assert [fork.to_inspect for fork in facts] == [[], []]
    assert not [command for fork in facts for command in fork.commands if "python" in command]


def test_a_vllm_that_lacks_what_is_done_once_is_refused(monkeypatch):
    pytest.importorskip("vllm")
    from seer_vllm.preload import preload

    monkeypatch.setattr(internals, "PRELOADED", (Name("vllm.logger", "configure_nothing", "it is repeated"),))
    with pytest.raises(
        EngineError, match=r"vllm.logger has no configure_nothing, and without it it is repeated"
    ):
        preload()
