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
import json, os, sys

there = set(sys.modules)
import torch
from seer_vllm.preload import ARCHITECTURES
from vllm.model_executor.models import ModelRegistry

server, paths = os.getppid(), []
for name in os.listdir(f"/proc/{server}/fd"):
    try:
        paths.append(os.readlink(f"/proc/{server}/fd/{name}"))
    except OSError:
        pass
facts = {
    "title": open(f"/proc/{server}/cmdline").read(),
    "threads": len(os.listdir(f"/proc/{server}/task")),
    "children": [open(f"/proc/{pid}/cmdline").read() for pid in
                 open(f"/proc/{server}/task/{server}/children").read().split()],
    "cuda": torch.cuda.is_initialized(),
    "devices": [path for path in paths if path.startswith(("/dev/nvidia", "/dev/kfd", "/dev/dri"))],
    "random_state_untouched": torch.equal(
        torch.get_rng_state(), torch.Generator().manual_seed(torch.initial_seed()).get_state()
    ),
    "to_inspect": [name for name in ARCHITECTURES if not hasattr(ModelRegistry.models[name], "model_cls")],
}

torch.set_num_threads(1)  # two that wait for a CPU spin
from seer_worker.process.adapter import ADAPTER
from seer_worker.process.worker import Worker
from seer_worker.sampling.selftest import check_keyed
from seer_worker.wire import Start

instance, settings, scratch = json.loads(sys.argv[1])
commands = []
sys.addaudithook(lambda event, given: event == "subprocess.Popen" and commands.append(given[0]))
asked = Start(instance, "vllm-0", settings, scratch)
check_keyed(Worker(print, ADAPTER.load(instance)(asked), asked))
print(json.dumps(facts | {"imported": sorted(set(sys.modules) - there), "commands": commands}))
"""


@pytest.fixture(scope="module")
def facts(make_fleet, models, run_in_fork, tmp_path_factory):
    """Facts about a process after ``preload``, and about a fork of it that has started an engine."""
    pytest.importorskip("vllm")
    engine = make_fleet(models[0]).engines[0]
    given = [engine.spec.instance, engine.spec.settings, str(tmp_path_factory.mktemp("fork"))]
    [*_, last] = run_in_fork(engine, LOOK, json.dumps(given))
    return SimpleNamespace(**json.loads(last))


def test_a_process_with_all_imports_has_one_thread_and_no_child_but_its_forks(facts):
    assert facts.title.startswith("seer fork server")
    assert facts.threads == 1
    assert not [title for title in facts.children if "python" in title and "seer" not in title]


def test_no_import_opens_a_device(facts):
    assert not facts.cuda
    assert facts.devices == []


def test_the_random_numbers_of_a_process_with_all_imports_are_still_to_come(facts):
    assert facts.random_state_untouched


def test_a_fork_imports_nothing_more_for_an_engine(facts):
    assert facts.imported == []


def test_no_process_is_started_to_inspect_a_common_model(facts):
    assert facts.to_inspect == []
    assert not [command for command in facts.commands if "python" in command]


def test_a_vllm_that_lacks_what_is_done_once_is_refused(monkeypatch):
    pytest.importorskip("vllm")
    from seer_vllm.preload import preload

    monkeypatch.setattr(internals, "PRELOADED", (Name("vllm.logger", "configure_nothing", "it is repeated"),))
    with pytest.raises(
        EngineError, match=r"vllm.logger has no configure_nothing, and without it it is repeated"
    ):
        preload()
