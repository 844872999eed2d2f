"""Forms that engines refuse are refused at the door, with the reason, on every route that takes one."""

import asyncio
import json
import threading
from contextlib import suppress

import httpx
import pytest
from seer_server import make_app
from seer_server.structured_outputs import FormChecks
from seer_server.unsupported_fields import FieldError
from seer_session.runtime import Runtime

from seer_core.model import StructuredOutputs
from seer_core.plugins.slots import Assembly, Strategies
from seer_core.ports.engine import ModelInfo
from seer_core.scheduling.scheduler import Policies, Slot
from tests.support.eventually import PATIENCE_S, aeventually

pytest.importorskip("xgrammar", reason="vLLM is not installed: `make setup` installs it")


def tag(form):
    return json.dumps({"type": "structural_tag", "format": form})


WRONG = {
    "an empty choice": {"choice": []},
    "an empty text": {"choice": ["a", ""]},
    "a text with a NUL": {"choice": ["a\0"]},
    "no JSON": {"json": "{"},
    "a number as a schema": {"json": "1"},
    "a word as a schema": {"json": "true"},
    "text as a schema": {"json": '"a"'},
    "a schema of no type": {"json": {"type": "x"}},
    "a schema that refers to nothing": {"json": {"$ref": "#/a"}},
    "a number that no engine holds": {"json": {"type": "integer", "minimum": 10**40}},
    "a pattern that is none": {"json": {"type": "string", "pattern": "("}},
    "an expression that is none": {"regex": "("},
    "an expression with a reference": {"regex": "\\1"},
    "no grammar": {"grammar": "root ::= x"},
    "an empty grammar": {"grammar": ""},
    "an empty tag": {"structural_tag": ""},
    "a number as a tag": {"structural_tag": "5"},
    "a tag of no kind": {"structural_tag": tag({"type": "x"})},
    "a tag with an expression that is none": {"structural_tag": tag({"type": "regex", "pattern": "("})},
    "nothing": {},
    "two": {"regex": "a", "choice": ["a"]},
}
SCHEMAS = [name for name, form in WRONG.items() if isinstance(form.get("json"), dict)]


LATE = "structured_outputs takes more than 10 s to compile; simplify it"


@pytest.fixture(scope="module")
def serve_forms(served_class, playing):
    """Return a function that serves an engine that has forms, and fails each chunk for a reason, if any."""

    class Ending(playing.Hand):
        reason = None

        def submit(self, job):
            super().submit(job)
            if self.reason is None:
                self.finish()
            else:
                self.jobs.pop(job.id)
                self.sink.chunk_failed(self.id, job.id, self.reason)

    def serve(reason=None):
        def make_runtime(observers):
            slots = tuple(Slot("observer", "server", each) for each in observers)
            model = ModelInfo(300, 1000, controls=("structured_outputs",))
            engine = Ending()
            engine.reason = reason
            return Runtime(
                Assembly(playing.Hands([engine], model=model), Strategies(Policies(), slots, None), None)
            )

        return served_class(make_app(make_runtime))

    return serve


@pytest.fixture(scope="module")
def served(serve_forms):
    """A server over an engine that has forms, and refuses none."""
    with serve_forms() as running:
        yield running


ROUTES = {
    "completions": lambda form: ("/v1/completions", {"prompt": [5], "structured_outputs": form}),
    "tokens": lambda form: (
        "/inference/v1/generate",
        {"token_ids": [5], "sampling_params": {"structured_outputs": form}},
    ),
    "batches": lambda form: (
        "/v1/rollouts",
        {"records": [{"prompt_token_ids": [5], "structured_outputs": form}]},
    ),
    "reservations": lambda form: (
        "/v1/reservations",
        {"groups": [{"group_id": "g", "structured_outputs": form}]},
    ),
    "response_format": lambda form: (
        "/v1/completions",
        {
            "prompt": [5],
            "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": form["json"]}},
        },
    ),
}


def expect_refused(served, path, body):
    answer = httpx.post(f"{served.url}{path}", json=body, timeout=PATIENCE_S)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["message"]
    return error


@pytest.mark.parametrize("route", ["completions", "tokens", "batches", "reservations"])
@pytest.mark.parametrize("wrong", WRONG)
def test_a_form_that_is_none_is_a_400_with_its_reason(served, route, wrong):
    error = expect_refused(served, *ROUTES[route](WRONG[wrong]))
    assert "structured_outputs" in error["message"]


@pytest.mark.parametrize("wrong", SCHEMAS)
def test_a_response_format_that_is_none_is_a_400(served, wrong):
    assert expect_refused(served, *ROUTES["response_format"](WRONG[wrong]))["param"] == "response_format"


@pytest.mark.parametrize("wrong", ["an empty choice", "a number as a schema", "an expression that is none"])
def test_a_row_s_form_is_refused_before_the_row_is_taken(served, wrong):
    body = {"group_id": "g", "index": 0, "structured_outputs": WRONG[wrong]}
    assert "structured_outputs" in expect_refused(served, "/v1/rows", body)["message"]


@pytest.mark.parametrize(
    "form",
    [
        {"choice": ["a", 'b"\\\n', "é😀"]},
        {"json": {"type": "object"}},
        {"regex": "a+"},
        {"json_object": True},
    ],
)
def test_a_form_is_taken(served, form):
    path, body = ROUTES["completions"](form)
    answer = httpx.post(f"{served.url}{path}", json={**body, "max_tokens": 4}, timeout=PATIENCE_S)
    assert answer.status_code == 200, answer.text


def test_a_form_that_engines_refuse_is_a_400_with_their_reason_also_in_a_stream(serve_forms):
    path, body = ROUTES["completions"]({"regex": "a+"})
    with serve_forms(LATE) as served:
        error = expect_refused(served, path, body)
        stream = httpx.post(f"{served.url}{path}", json={**body, "stream": True}, timeout=PATIENCE_S)
    assert (error["message"], error["param"]) == (LATE, "structured_outputs")
    assert stream.status_code == 200
    [event] = stream.text.split("\n\n")[:-1]
    assert json.loads(event.removeprefix("data: "))["error"] == error


def test_another_failure_of_the_engines_is_a_503_with_its_reason(serve_forms):
    path, body = ROUTES["completions"]({"regex": "a+"})
    with serve_forms("out of luck") as served:
        answer = httpx.post(f"{served.url}{path}", json=body, timeout=PATIENCE_S)
    assert answer.status_code == 503
    assert answer.json()["error"]["message"] == "every response ended in an error: out of luck"


def test_a_form_that_was_late_once_is_taken_when_it_has_been_read(monkeypatch):
    read = threading.Event()
    monkeypatch.setattr("seer_server.structured_outputs.READ_S", 0.01)
    monkeypatch.setattr("seer_server.structured_outputs._flaw", lambda form: read.wait(PATIENCE_S) and None)

    async def ask_twice():
        checks, form = FormChecks(), StructuredOutputs(regex="a")
        with pytest.raises(FieldError, match="s to read; simplify it"):
            await checks.require(form, "structured_outputs")
        read.set()

        async def is_taken():
            with suppress(FieldError):
                await checks.require(form, "structured_outputs")
                return True

        await aeventually(is_taken)

    asyncio.run(ask_twice())
