"""Spans of requests, received by OTLP over HTTP as a collector would."""

import asyncio
import json
import re
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Status
from seer_host.ports import reserved_port
from seer_opentelemetry import RequestSpans, delivery
from seer_testing import ObserverContract
from seer_trace.request_life import Cause

from seer_core.model import InstanceInfo
from seer_core.model.events import (
    ChunkFinished,
    Complete,
    Dispatch,
    GroupSpec,
    GroupsSubmitted,
    InstanceLost,
    InstanceStarted,
    ResumedResponse,
)

TRACES = "/v1/traces"


@pytest.fixture(autouse=True)
def _environment(monkeypatch):
    """Leave out what the machine says, and let a failed export be given up soon."""
    for name in ("TRACEPARENT", "OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_SERVICE_NAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "0.5")


@pytest.fixture
def absent():
    """Return the address of a port at which nothing listens."""
    with reserved_port() as port:
        yield f"http://127.0.0.1:{port}{TRACES}"


@pytest.fixture
def hanging():
    """Return the address of a receiver that takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as one:
        yield f"http://127.0.0.1:{one.getsockname()[1]}{TRACES}"


class TestRequestSpans(ObserverContract):
    def make(self):
        return RequestSpans("")


def plain(value):
    """Return what a protobuf's ``AnyValue`` holds."""
    kind = value.WhichOneof("value")
    found = getattr(value, kind)
    return [plain(each) for each in found.values] if kind == "array_value" else found


class Span:
    def __init__(self, sent):
        self.name, self.id, self.parent, self.trace = (
            sent.name,
            sent.span_id,
            sent.parent_span_id,
            sent.trace_id,
        )
        self.begin_ns, self.end_ns = sent.start_time_unix_nano, sent.end_time_unix_nano
        self.error = sent.status.message if sent.status.code == Status.STATUS_CODE_ERROR else None
        self.attributes = {each.key: plain(each.value) for each in sent.attributes}

    def __getitem__(self, name):
        return self.attributes[name]


class Receiver:
    """All spans that came, and below which span each hangs."""

    def __init__(self):
        self.spans, self.services, self.address = [], set(), ""

    def take(self, body):
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            self.services |= {plain(e.value) for e in resource.resource.attributes if e.key == "service.name"}
            self.spans += [Span(each) for scope in resource.scope_spans for each in scope.spans]

    @property
    def requests(self):
        return [each for each in self.spans if each.name == "text_completion"]

    def inside(self, request, kind):
        """Return the waits or chunks of a request, in order of time."""
        mine = [e for e in self.spans if e.parent == request.id and e.name.startswith(f"{kind} ")]
        return sorted(mine, key=lambda each: each.begin_ns)


@pytest.fixture
def receiver():
    found = Receiver()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            assert self.path == TRACES
            found.take(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *arguments):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        found.address = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield found
        server.shutdown()
        thread.join()


@pytest.fixture
def run(seer, write_config, write_prompts, tmp_path):
    """Return a function that runs a simulated rollout whose requests wait, and returns its result."""

    def run(endpoint):
        config = write_config(
            ["divided_rollout", "opentelemetry"],
            "[engine.sim]\ninstances = 2\nmax_running = 4\nmax_model_tokens = 1024\n"
            "kv_capacity_tokens = 2048\n"
            "[plugin.divided_rollout]\nchunk_tokens = 128\n"
            f"[plugin.opentelemetry]\nendpoint = {json.dumps(endpoint)}\n",
        )
        prompts = [{"prompt_token_ids": [5] * 8, "n": 4, "max_tokens": 900}] * 6
        result = seer("run", config, "--prompts", write_prompts(*prompts), "--out", tmp_path / "out")
        assert result.exit_code == 0, result.output
        return result

    return run


def completions(tmp_path):
    lines = (tmp_path / "out/completions.jsonl").read_text().splitlines()
    return {each["request_id"]: each for each in map(json.loads, lines)}


def test_a_run_sends_a_span_for_each_request_with_its_chunks_and_with_the_waits_that_seer_explain_shows(
    run, seer, receiver, tmp_path
):
    run(receiver.address + TRACES)
    responses = completions(tmp_path)
    assert sorted(each["seer.request_id"] for each in receiver.requests) == sorted(responses)
    assert receiver.services == {"seer"}
    inner = waits = 0
    causes = set()
    for request in receiver.requests:
        name = request["seer.request_id"]
        response = responses[name]
        assert request.parent == b""
        assert request["gen_ai.usage.output_tokens"] == len(response["token_ids"])
        assert request["gen_ai.usage.input_tokens"] == 8
        assert request["gen_ai.response.finish_reasons"] == [response["finish_reason"]]
        chunks = receiver.inside(request, "chunk")
        assert sum(each["seer.tokens"] for each in chunks) == len(response["token_ids"])
        assert request["seer.chunks"] == len(chunks)
        assert request["seer.migrations"] == sum(each["seer.migrated"] for each in chunks)
        assert all(each.name == f"chunk {each['seer.instance_id']}" for each in chunks)
        inside = [*chunks, *receiver.inside(request, "wait")]
        assert all(request.begin_ns <= each.begin_ns <= each.end_ns <= request.end_ns for each in inside)
        assert {each.trace for each in inside} == {request.trace}
        inner += len(inside)
        assert seer("explain", tmp_path / "out", name, "--json", tmp_path / "life.json").exit_code == 0
        life = json.loads((tmp_path / "life.json").read_bytes())
        explained = [each["causes_s"] for each in life["parts"] if each["type"] == "Wait"]
        assert [causes_s(each) for each in receiver.inside(request, "wait")] == explained
        assert causes_s(request) == life["waited_s"]
        waits += len(explained)
        causes |= life["waited_s"].keys()
    assert waits >= 12
    assert causes >= {"kv", "turn"}
    assert inner + len(responses) == len(receiver.spans)
    assert len({each.trace for each in receiver.requests}) == len(responses)


def causes_s(span):
    """Return the seconds that a span has for each cause of a wait."""
    return {
        cause: span[f"seer.wait.{cause}_s"]
        for cause in Cause.__args__
        if f"seer.wait.{cause}_s" in span.attributes
    }


def test_the_example_of_the_readme_works(seer, write_prompts, receiver, tmp_path):
    text = (Path(__file__).parents[1] / "README.md").read_text("utf-8")
    [example] = re.findall(r"```toml\n(.*?)```", text, re.S)
    assert example.count("http://localhost:4318") == 1
    (tmp_path / "seer.toml").write_text(example.replace("http://localhost:4318", receiver.address))
    prompts = write_prompts({"prompt": "a", "n": 3})
    result = seer("run", tmp_path / "seer.toml", "--prompts", prompts, "--out", tmp_path / "out")
    assert result.exit_code == 0, result.output
    assert len(receiver.requests) == 3
    for span in receiver.spans:
        missing = {name for name in span.attributes if f"`{name}`" not in text and "wait" not in name}
        assert missing == set()


def test_the_environment_names_the_collector_the_service_and_the_span_above(run, receiver, monkeypatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.address)
    monkeypatch.setenv("OTEL_SERVICE_NAME", "rollouts")
    monkeypatch.setenv("TRACEPARENT", f"00-{'ab' * 16}-{'cd' * 8}-01")
    run("")
    assert len(receiver.requests) == 24
    assert {(each.trace.hex(), each.parent.hex()) for each in receiver.requests} == {("ab" * 16, "cd" * 8)}
    assert receiver.services == {"rollouts"}


def test_a_run_without_a_receiver_ends_as_any_other_and_says_once_that_spans_were_lost(run, absent, tmp_path):
    errors = run(absent).stderr
    assert len(completions(tmp_path)) == 24
    assert errors.count("spans_not_delivered") == 1
    assert errors.count("spans_lost") == 1
    assert "127.0.0.1" in errors


def test_a_receiver_that_hangs_holds_a_run_up_for_a_bounded_time(run, hanging, tmp_path, monkeypatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "3600")
    monkeypatch.setattr(delivery, "FLUSH_S", 0.1)
    assert run(hanging).stderr.count("spans_lost") == 1
    assert len(completions(tmp_path)) == 24


def test_an_endpoint_that_is_no_address_is_refused_at_the_start(seer, write_config, write_prompts, tmp_path):
    config = write_config(["opentelemetry"], '[plugin.opentelemetry]\nendpoint = "localhost:4318"\n')
    result = seer("run", config, "--prompts", write_prompts({"prompt": "a"}), "--out", tmp_path / "out")
    assert result.exit_code == 2, result.output
    assert "write it as http://HOST:4318/v1/traces" in result.stderr


def observe(endpoint, *records):
    """Show events to an observer from its start to its stop."""

    async def all_of_it():
        spans = RequestSpans(endpoint)
        await spans.start()
        for now, event, *commands in records:
            spans.observe(now, event, commands)
        await spans.stop()

    asyncio.run(all_of_it())


def started(name="x", slots=1):
    return InstanceStarted(InstanceInfo(name, 1000, 1, slots, 1024, node="n1"))


def test_a_lost_chunk_a_move_and_a_run_that_ends_early_are_each_in_a_span(receiver):
    group = GroupSpec("a", 10, 2, 100, resumed=(ResumedResponse(30), ResumedResponse(0)))
    observe(
        receiver.address + TRACES,
        (5.0, started("x")),
        (5.0, started("y")),
        (5.0, GroupsSubmitted((group,)), Dispatch("a/0", "x", 50, 64, False, "free")),
        (6.0, InstanceLost("x", "killed"), Dispatch("a/0", "y", 50, 64, True)),
        (8.5, ChunkFinished("a/0", "y", 7, True, 5, 4, 2, 16, 0, 24), Complete("a/0", "stop")),
    )
    done, cut = sorted(receiver.requests, key=lambda each: each["seer.request_id"])
    lost, moved = receiver.inside(done, "chunk")
    assert (done.error, done["gen_ai.usage.output_tokens"], done["seer.migrations"]) == (None, 37, 1)
    assert (lost.error, lost.name, lost["seer.why"]) == ("lost with its instance: killed", "chunk x", "free")
    assert (moved.error, moved.end_ns - moved.begin_ns) == (None, 2_500_000_000)
    assert (
        moved.attributes.items()
        >= {
            "seer.node": "n1",
            "seer.tokens": 7,
            "seer.steps": 5,
            "seer.drafted": 4,
            "seer.accepted": 2,
            "seer.cached_tokens": 16,
            "seer.pool_tokens": 0,
            "seer.prefilled_tokens": 24,
            "seer.end": "the model ended the response",
        }.items()
    )
    assert cut.error == "the run ended before the response"
    [wait] = receiver.inside(cut, "wait")
    assert (wait.name, causes_s(wait)) == ("wait slots", {"turn": 1.0, "slots": 2.5})
    assert wait.begin_ns == done.begin_ns


def test_ids_and_reasons_that_are_no_text_do_not_hold_up_the_others(receiver):
    group = GroupSpec("\ud800\x1b[31m", 10, 1, 100)
    request = "\ud800\x1b[31m/0"
    observe(
        receiver.address + TRACES,
        (0.0, started("x\udcff")),
        (0.0, GroupsSubmitted((group,)), Dispatch(request, "x\udcff", 50, 64, False, "\udc80")),
        (1.0, InstanceLost("x\udcff", "\udc80"), Complete(request, "error")),
    )
    [sent] = receiver.requests
    assert sent["seer.group_id"] == r"\ud800\x1b[31m"
    assert sent.error == "the response failed"
    [chunk] = receiver.inside(sent, "chunk")
    assert chunk.name == r"chunk x\udcff"


def test_a_queue_that_is_full_drops_spans_and_their_number_is_logged(hanging, monkeypatch, capfd):
    monkeypatch.setattr(delivery, "FLUSH_S", 0.0)
    monkeypatch.setattr(delivery, "QUEUE_SPANS", 600)
    group = GroupSpec("a", 10, 3000, 100)
    ends = [Complete(f"a/{index}", "aborted") for index in range(group.n)]
    observe(hanging, (0.0, GroupsSubmitted((group,))), (0.0, started(), *ends))
    shown = capfd.readouterr()
    assert "lost=3000" in shown.out + shown.err
    assert "Queue full" not in shown.out + shown.err
