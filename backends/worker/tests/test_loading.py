"""Classes that a worker loads by name: one that cannot be made is named, one that fails is left alone."""

import sys
from types import SimpleNamespace

import pytest
import structlog
from seer_worker.process.drafts import check_source
from seer_worker.process.stores import STORE, FailsafeStore

from seer_core.errors import EngineError
from seer_core.ports.drafting import SourceSpec
from seer_core.ports.kv import StoreContext


def test_a_store_that_fails_is_not_calls_again():
    class Broken:
        calls = 0

        def find(self, keys):
            self.calls += 1
            raise RuntimeError("out of order")

    store, reasons = Broken(), []
    guarded = FailsafeStore(store, reasons.append)
    with structlog.testing.capture_logs() as logs:
        assert [guarded.ask(lambda it: it.find([bytes(32)]), 0) for _ in range(3)] == [0, 0, 0]
    assert store.calls == 1
    assert reasons == ["the KV store failed: RuntimeError: out of order"]
    assert [(entry["event"], entry["exc_info"]) for entry in logs] == [("kv_store_failed", True)]


@pytest.mark.parametrize(
    ("path", "fact"),
    [
        ("nowhere:Store", "KV store 'nowhere:Store' cannot be imported"),
        ("json:JSONDecoder", "is no KVStore: it lacks close, drop, find, get, lacks, put"),
        ("seer_core.ports.kv:KVStore", "is no KVStore: it lacks close, drop, find, get, lacks, put"),
        ("elsewhere:Choosy", "cannot be made: TypeError"),
    ],
)
def test_a_store_that_cannot_be_made_is_named(path, fact, monkeypatch):
    methods = dict.fromkeys(("close", "drop", "find", "get", "lacks", "put"), lambda self, *_: None)
    choosy = type("Choosy", (), {**methods, "__init__": lambda self: None})
    monkeypatch.setitem(sys.modules, "elsewhere", SimpleNamespace(Choosy=choosy))
    with pytest.raises(EngineError, match=fact):
        STORE.make(path, {}, StoreContext("vllm-0", 64, 32))


def test_what_is_named_must_be_a_class(monkeypatch):
    methods = ("close", "drop", "find", "get", "lacks", "put")
    made = SimpleNamespace(**dict.fromkeys(methods, print))
    monkeypatch.setitem(sys.modules, "elsewhere", SimpleNamespace(made=made))
    with pytest.raises(EngineError, match="is no KVStore: it is an object, not a class"):
        STORE.load("elsewhere:made")


@pytest.mark.parametrize(
    ("path", "draft_tokens", "complaint"),
    [
        ("seer_core.ports.kv:KVStore", 0, "0 draft tokens; it must be 1 at least"),
        ("nowhere:Source", 4, "draft source 'nowhere:Source' cannot be imported"),
        (
            "seer_core.ports.kv:KVStore",
            4,
            "is no DraftSource: it lacks add_sibling_tokens, forget, open, propose, reset",
        ),
        ("mine:guess", 4, "of mine's methods only ngram, suffix will do"),
    ],
)
def test_a_wrong_draft_source_is_named_before_an_engine_is_imported(path, draft_tokens, complaint):
    with pytest.raises(EngineError, match=complaint):
        check_source(SourceSpec(path, {}, draft_tokens), ("mine:ngram", "mine:suffix"))


def test_an_engine_s_own_method_of_drafting_needs_no_class():
    check_source(SourceSpec("mine:ngram", {}, 4), ("mine:ngram",))
