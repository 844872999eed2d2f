"""A process that has imported SGLang for its instances can be forked, and leaves them nothing to import."""

import json
import os
import subprocess

import pytest
from seer_sglang import preload as preloading
from seer_sglang.doctor import interpreter
from seer_sglang.plugin import FIXED_ENGINE_ARGS

SERVER = """
import json, os, sys
from seer_sglang.preload import preload
preload()
there = set(sys.modules)
import torch
from seer_worker.process.fork_server import unfitness
paths = []
for name in os.listdir("/proc/self/fd"):
    try:
        paths.append(os.readlink(f"/proc/self/fd/{name}"))
    except OSError:
        pass
facts = {
    "threads": len(os.listdir("/proc/self/task")),
    "cuda": torch.cuda.is_initialized(),
    "devices": [path for path in paths if path.startswith(("/dev/nvidia", "/dev/kfd", "/dev/dri"))],
    "unfitness": unfitness(),
    "modules": sorted(there),
}

from seer_worker.sampling.selftest import check_keyed
from seer_worker.wire import Start
from seer_sglang.instance import SglangAdapter
from seer_worker.process.worker import Worker

start = Start("", "sglang-0", json.loads(sys.argv[1]), "")
worker = Worker(print, SglangAdapter(start), start)
check_keyed(worker)
children = open(f"/proc/self/task/{os.getpid()}/children").read().split()
facts["late"] = [name for name in sys.modules if name not in there]
facts["leaders"] = {
    open(f"/proc/{pid}/cmdline").read(): os.getsid(int(pid)) == int(pid) for pid in children
}
print(json.dumps(facts))
sys.stdout.flush()
worker.close()
os._exit(0)
"""


@pytest.fixture(scope="module")
def facts(models):
    """Facts about a process of SGLang's environment after ``preload``, and with an instance of two ranks."""
    settings = FIXED_ENGINE_ARGS | {
        "model_path": str(models[0]),
        "dtype": "float32",
        "page_size": 1,
        "tp_size": 2,
        "max_running_requests": 4,
        "context_length": 256,
        "draft_paths": 4,
        "enable_metrics": True,
        "kv_cache_bytes": 1 << 22,
    }
    ran = subprocess.run(
        [interpreter(), "-P", "-c", SERVER, json.dumps(settings)],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
    )
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout.splitlines()[-1])


@pytest.fixture
def imported(monkeypatch):
    """The modules that are asked for, none of which is imported."""
    found = []
    monkeypatch.setattr(preloading, "import_module", found.append)
    return found


@pytest.mark.engine  # needs SGLang installed
def test_after_all_imports_there_is_one_thread_and_no_device_and_a_fork_is_sound(facts):
    assert facts["threads"] == 1
    assert not facts["cuda"]
    assert facts["devices"] == []
    assert facts["unfitness"] is None
    assert {*preloading.OWN, *preloading.SGLANG, *preloading.LIBRARIES} <= set(facts["modules"])


@pytest.mark.engine
def test_an_instance_imports_nothing_more_and_forks_its_other_rank(facts):
    roots = {name.partition(".")[0] for name in facts["late"]}
    assert not roots & {"seer_sglang", "seer_worker", "sglang", "torch", "transformers"}
    titles = {title.rstrip("\0"): leads for title, leads in facts["leaders"].items()}
    assert titles["seer_sglang.rank 1"]


def test_without_the_stand_in_for_its_kernels_neither_sglang_nor_they_are_imported(monkeypatch, imported):
    monkeypatch.setattr(preloading, "_has_standin", lambda: False)
    preloading.preload()
    assert imported == [*preloading.LIBRARIES]
    assert not {name.partition(".")[0] for name in imported} & {"sgl_kernel", "sglang", "seer_sglang"}


def test_a_module_that_cannot_be_imported_is_left_to_the_instance(monkeypatch):
    found = []

    def fail_once(module):
        found.append(module)
        if module == preloading.LIBRARIES[0]:
            raise ImportError(f"no {module}")

    monkeypatch.setattr(preloading, "import_module", fail_once)
    monkeypatch.setattr(preloading, "_has_standin", lambda: False)
    preloading.preload()
    assert found == [*preloading.LIBRARIES]
