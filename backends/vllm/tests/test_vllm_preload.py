"""A process that has imported vLLM by ``preload`` can be forked, and a fork has nothing left to import."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
from seer_vllm import internals
from seer_vllm.plugin import INSTANCE, PRELOAD, Settings, engine_args, vllm_environment
from seer_worker.process.names import Name

from seer_core.errors import EngineError

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore")]  # PyTorch deprecates this and that

MODEL = Path(__file__).parents[3] / "examples" / "tiny_reasoner" / "weights"
SERVER = """
import json, os, sys
import torch

untouched = torch.get_rng_state()

from importlib import import_module

arguments, preload, path, scratch = json.loads(sys.argv[1])
module, _, name = preload.partition(":")
getattr(import_module(module), name)()

from seer_vllm.preload import ARCHITECTURES
from vllm.model_executor.models import ModelRegistry

links = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
facts = {
    "threads": len(os.listdir("/proc/self/task")),
    "children": open(f"/proc/self/task/{os.getpid()}/children").read().split(),
    "cuda": torch.cuda.is_initialized(),
    "files": [os.readlink(link) for link in links if os.path.lexists(link)],
    "random_state_untouched": torch.equal(untouched, torch.get_rng_state()),
    "to_inspect": [name for name in ARCHITECTURES if not hasattr(ModelRegistry.models[name], "model_cls")],
    "forks": [],
}

def start(scratch):
    os.mkdir(scratch)
    torch.set_num_threads(1)  # two that wait for a CPU spin
    from seer_worker.process.adapter import ADAPTER
    from seer_worker.process.worker import Worker
    from seer_worker.sampling.selftest import check_keyed
    from seer_worker.wire import Start

    before, commands = set(sys.modules), []
    sys.addaudithook(lambda event, given: event == "subprocess.Popen" and commands.append(given[0]))
    asked = Start(path, "vllm-0", arguments, scratch)
    check_keyed(Worker(print, ADAPTER.load(path)(asked), asked))
    return {"imported": sorted(set(sys.modules) - before), "commands": commands}

for number in range(2):
    readable, writable = os.pipe()
    pid = os.fork()
    if pid == 0:
        with open(writable, "w") as answer:
            json.dump(start(f"{scratch}/{number}"), answer)
        os._exit(0)
    os.close(writable)
    facts["forks"].append(json.load(open(readable)))
    os.waitpid(pid, 0)
print("FACTS", json.dumps(facts))
"""


@pytest.fixture(scope="module")
def facts(tmp_path_factory):
    """Facts about a process after ``preload``, and about two forks of it that have started an engine."""
    pytest.importorskip("vllm")
    settings = {"model": str(MODEL), "dtype": "float32", "kv_cache_bytes": 1 << 25, "max_model_tokens": 1024}
    arguments = engine_args(msgspec.convert(settings, Settings), MODEL)
    given = [arguments, PRELOAD, INSTANCE, str(tmp_path_factory.mktemp("forks"))]
    done = subprocess.run(
        [sys.executable, "-P", "-c", SERVER, json.dumps(given)],
        env=vllm_environment(os.environ, 2, ()),
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return SimpleNamespace(**json.loads(done.stdout.partition("FACTS ")[2]))


def test_a_process_with_all_imports_has_one_thread_and_no_child(facts):
    assert facts.threads == 1
    assert facts.children == []


def test_no_import_opens_a_device(facts):
    assert not facts.cuda
    assert not [file for file in facts.files if file.startswith("/dev/nvidia")]


def test_the_random_numbers_of_a_process_with_all_imports_are_still_to_come(facts):
    assert facts.random_state_untouched


def test_a_fork_imports_nothing_more_for_an_engine(facts):
    assert [fork["imported"] for fork in facts.forks] == [[], []]


def test_no_process_is_started_to_inspect_a_common_model(facts):
    assert facts.to_inspect == []
    assert not [command for fork in facts.forks for command in fork["commands"] if "python" in command]


def test_a_vllm_that_lacks_what_is_done_once_is_refused(monkeypatch):
    pytest.importorskip("vllm")
    from seer_vllm.preload import preload

    monkeypatch.setattr(internals, "PRELOADED", (Name("vllm.logger", "configure_nothing", "it is repeated"),))
    with pytest.raises(
        EngineError, match=r"vllm.logger has no configure_nothing, and without it it is repeated"
    ):
        preload()
