"""A process that has imported SGLang for its instances can be forked, and leaves them nothing to import.

The process is the fork server of the other tests, seen from one of its forks.
"""

import json

import pytest
from seer_sglang import preload as preloading

LOOK = """
import json, os, sys
import fork_facts

there = set(sys.modules)
facts = fork_facts.server_facts() | {"modules": sorted(there)}
worker = fork_facts.started()
facts["late"] = [name for name in sys.modules if name not in there]
facts["leaders"] = {
    fork_facts.cmdline(pid): os.getsid(int(pid)) == int(pid) for pid in fork_facts.children(os.getpid())
}
worker.close()
print(json.dumps(facts))
"""


@pytest.fixture(scope="module")
def facts(make_fleet, models, run_in_fork, tmp_path_factory):
    """Facts about a process of SGLang's environment after ``preload``, and of an instance of two ranks."""
    settings = {"tensor_parallel": 2, "max_running": 4, "max_model_tokens": 256, "kv_cache_bytes": 1 << 22}
    engine = make_fleet(models[0], block_size=1, metrics=True, **settings).engines[0]
    given = [engine.spec.instance, engine.spec.settings, str(tmp_path_factory.mktemp("fork"))]
    [*_, last] = run_in_fork(engine, LOOK, json.dumps(given))
    return json.loads(last)


@pytest.fixture
def imported(monkeypatch):
    """The modules that are asked for, none of which is imported."""
    found = []
    monkeypatch.setattr(preloading, "import_module", found.append)
    return found


@pytest.mark.engine  # needs SGLang installed
def test_after_all_imports_there_is_one_thread_and_no_device(facts):
    assert facts["title"].startswith("seer fork server")
    assert facts["threads"] == 1
    assert not facts["cuda"]
    assert facts["devices"] == []
    assert {*preloading.OWN, *preloading.SGLANG, *preloading.LIBRARIES} <= set(facts["modules"])


@pytest.mark.engine
def test_an_instance_imports_nothing_more_and_forks_its_other_rank(facts):
    roots = {name.partition(".")[0] for name in facts["late"]}
    assert not roots & {"seer_sglang", "seer_worker", "sglang", "torch", "transformers"}
    assert facts["leaders"]["seer_sglang.rank 1"]


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
