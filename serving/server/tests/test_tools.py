"""Calls of tools and reasoning by vLLM's own parsers, on an engine that writes what the test says."""

import json
import warnings
from contextlib import contextmanager

import httpx
import openai
import pytest
import structlog
from openai.types.responses import Response
from seer_server.parsing import ParserNames
from seer_session.runtime import Runtime
from seer_worker.tokenizer import ModelTokenizer

from seer_core.errors import ConfigError
from seer_core.model.arrays import Logprobs, Tokens
from seer_core.plugins.slots import Assembly, Strategies
from seer_core.ports.engine import ChunkPiece, ModelInfo
from seer_core.scheduling.scheduler import Policies, Slot
from tests.support.installed import skip_without

skip_without("vllm", reason="vLLM is not installed: `make setup` installs it")

PATIENCE_S = 60
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
TIME = {"type": "function", "function": {"name": "time"}}
MESSAGES = [{"role": "user", "content": "how warm is Paris"}]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
OTHER = '<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>'


@pytest.fixture(scope="module", autouse=True)
def _vllm():
    """Import what the parsers need, whose own imports warn of much, and register one that fails."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest  # noqa: F401
        from vllm.parser import ParserManager
        from vllm.tool_parsers import ToolParser, ToolParserManager

        for name in ("hermes", "xlam"):
            ParserManager.get_parser(name, "qwen3", enable_auto_tools=True)

    class Failing(ToolParser):
        def extract_tool_calls(self, model_output, request):
            raise ZeroDivisionError("out of luck")

        def extract_tool_calls_streaming(self, previous_text, current_text, *others, **more):
            if "7" in current_text:
                raise ZeroDivisionError("out of luck")
            return None

    ToolParserManager.register_module("failing", module=Failing)


@pytest.fixture(scope="module")
def serve_text(byte_model, served_class, playing, output_of):
    """Return a function that serves a text, token by token; ``jobs`` has what engines were asked for."""

    @contextmanager
    def make(text, tool_call=None, reasoning=None, ends=True):
        from seer_server import make_app

        tokenizer, jobs = ModelTokenizer(byte_model), []

        class Writing(playing.Hand):
            def submit(self, job):
                jobs.append(job)
                written = tokenizer.encode_part(text)
                tokens = [*written, *([257] if ends else [])][: job.max_tokens]
                for start in range(0, len(written) if job.streams else 0, 3):
                    piece = Tokens(tokens[start : start + 3])
                    chunk = ChunkPiece(job.id, start, piece, Logprobs([-0.5] * len(piece)), None)
                    self.sink.chunk_streamed(self.id, chunk)
                self.sink.chunk_finished(self.id, output_of(job, tokens, ends))

        def make_runtime(observers):
            slots = tuple(Slot("observer", "server", each) for each in observers)
            model = ModelInfo(262, 1 << 18, controls=("structured_outputs", "stop", "stop_token_ids"))
            fleet = playing.Hands([Writing(kv_capacity_tokens=1 << 19)], model=model, tokenizer=tokenizer)
            return Runtime(Assembly(fleet, Strategies(Policies(), slots, None), None))

        app = make_app(make_runtime, parsers=ParserNames(tool_call, reasoning))
        with served_class(app) as served:
            served.jobs = jobs
            yield served

    return make


def ask(served, stream=False, **fields):
    """Return the choice of a chat; that of a stream is put together, with a list of its deltas."""
    body = {"messages": MESSAGES, "max_tokens": 400, "return_token_ids": True, "stream": stream, **fields}
    answer = httpx.post(f"{served.url}/v1/chat/completions", json=body, timeout=PATIENCE_S)
    assert answer.status_code == 200, answer.text
    if not stream:
        return answer.json()["choices"][0]
    lines = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
    pieces = [json.loads(line)["choices"][0] for line in lines if line != "[DONE]"]
    message, tokens, calls = {"content": None, "reasoning": None}, [], {}
    for piece in pieces:
        tokens += piece["token_ids"]
        for name in ("content", "reasoning"):
            if piece["delta"].get(name) is not None:
                message[name] = (message[name] or "") + piece["delta"][name]
        for call in piece["delta"].get("tool_calls", []):
            if "id" in call:
                assert call["index"] == len(calls)
                calls[call["index"]] = {"id": call["id"], "type": call["type"], "function": {"arguments": ""}}
                calls[call["index"]]["function"]["name"] = call["function"]["name"]
            calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]
    if calls:
        message["tool_calls"] = [calls[index] for index in sorted(calls)]
    last = pieces[-1]
    return {**last, "message": message, "token_ids": tokens, "deltas": [each["delta"] for each in pieces]}


def called(choice):
    """Return names and arguments of the calls."""
    functions = [call["function"] for call in choice["message"].get("tool_calls", [])]
    return [(each["name"], json.loads(each["arguments"])) for each in functions]


@pytest.mark.parametrize("stream", [False, True])
def test_calls_are_read_and_the_text_before_them_stays(serve_text, stream):
    with serve_text(f"let me look {CALL}{OTHER}", "hermes") as served:
        choice = ask(served, stream, tools=[WEATHER, TIME])
        single = ask(served, stream, tools=[WEATHER, TIME], parallel_tool_calls=False)
        plain = ask(served, stream, tools=[WEATHER], tool_choice="none")
    assert called(choice) == [("weather", {"city": "Paris"}), ("time", {})]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"].strip() == "let me look"
    ids = [call["id"] for call in choice["message"]["tool_calls"]]
    assert len(set(ids)) == 2
    assert all(each.startswith("chatcmpl-tool-") for each in ids)
    assert called(single) == [("weather", {"city": "Paris"})]
    assert (plain["message"]["content"], plain["finish_reason"]) == (f"let me look {CALL}{OTHER}", "stop")
    assert choice["token_ids"] == plain["token_ids"]


@pytest.mark.parametrize("stream", [False, True])
def test_reasoning_is_a_field_of_its_own(serve_text, stream):
    text = f"it asks for weather</think>\n\n{CALL}"
    with serve_text(text, "hermes", "deepseek_r1") as served:
        choice = ask(served, stream, tools=[WEATHER])
        hidden = ask(served, stream, tools=[WEATHER], include_reasoning=False)
    assert choice["message"]["reasoning"] == "it asks for weather"
    assert called(choice) == called(hidden) == [("weather", {"city": "Paris"})]
    assert hidden["message"]["reasoning"] is None
    assert hidden["token_ids"] == choice["token_ids"]


def test_a_stream_begins_with_the_role_and_sends_nothing_while_the_parser_waits(serve_text):
    with serve_text(CALL, "hermes") as served:
        create = served.client().chat.completions.create
        pieces = list(create(model="seer", messages=MESSAGES, tools=[WEATHER], max_tokens=400, stream=True))
    first, *others = [piece.choices[0].delta for piece in pieces]
    assert (first.role, first.content) == ("assistant", "")
    assert all(each.tool_calls or each.content is not None for each in others[:-1])
    assert [each.role for each in others] == [None] * len(others)


def test_tools_and_calls_reach_the_template_with_arguments_as_objects(serve_text, byte_model):
    call = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Paris"}'}}
    broken = {"id": "d", "type": "function", "function": {"name": "time", "arguments": "{"}}
    messages = [
        *MESSAGES,
        {"role": "assistant", "content": None, "reasoning": "hm", "tool_calls": [call, broken]},
        {"role": "tool", "tool_call_id": "c", "content": [{"type": "text", "text": "4 C"}]},
    ]
    with serve_text("cold", "hermes") as served:
        ask(served, messages=messages, tools=[WEATHER])
        [job] = served.jobs
    prompt = ModelTokenizer(byte_model).decode_all(job.token_ids)
    assert "<think>hm</think><tool_call>weather city=Paris</tool_call><tool_call>time</tool_call>" in prompt
    assert "<|im_start|>tool\n4 C<|im_end|>" in prompt
    assert json.dumps(WEATHER) in prompt


def test_required_and_named_choices_are_forms_of_the_answer_as_vllm_makes_them(serve_text):
    named = {"type": "function", "function": {"name": "weather"}}
    array = '[{"name": "weather", "parameters": {"city": "Paris"}}]'
    with serve_text(array, "xlam") as served:
        choice, streamed = (
            ask(served, stream, tools=[WEATHER], tool_choice="required") for stream in (False, True)
        )
        form = served.jobs[0].sampling.structured_outputs
    assert form.json["type"] == "array"
    assert called(choice) == called(streamed) == [("weather", {"city": "Paris"})]
    assert choice["finish_reason"] == streamed["finish_reason"] == "tool_calls"
    with serve_text('{"city": "Paris"}', "xlam") as served:
        choice, streamed = (
            ask(served, stream, tools=[WEATHER], tool_choice=named) for stream in (False, True)
        )
        assert served.jobs[0].sampling.structured_outputs.json == WEATHER["function"]["parameters"]
    assert called(choice) == called(streamed) == [("weather", {"city": "Paris"})]
    assert choice["finish_reason"] == streamed["finish_reason"] == "stop"
    with serve_text(CALL, "hermes") as served:
        choice = ask(served, tools=[WEATHER], tool_choice="required")
        assert json.loads(served.jobs[0].sampling.structured_outputs.structural_tag)["format"]
    assert called(choice) == [("weather", {"city": "Paris"})]


def test_a_form_holds_behind_the_reasoning(serve_text):
    form = {"type": "json_object"}
    with serve_text('so</think>{"a": 1}', reasoning="deepseek_r1") as served:
        choice = ask(served, response_format=form)
        ask(served, response_format=form, include_reasoning=False)
        thinking, other = (job.sampling.structured_outputs for job in served.jobs)
    assert (choice["message"]["reasoning"], choice["message"]["content"]) == ("so", '{"a": 1}')
    first, second = json.loads(thinking.structural_tag)["format"]["elements"]
    assert (first["end"], second["json_schema"]) == ("</think>", {"type": "object"})
    assert other.json_object


@pytest.mark.parametrize("stream", [False, True])
def test_a_parser_that_fails_leaves_text_and_is_reported_once(serve_text, stream):
    with structlog.testing.capture_logs() as logs, serve_text("4567 years", "failing") as served:
        choices = [ask(served, stream, tools=[WEATHER]) for _ in range(2)]
    for choice in choices:
        assert choice["message"]["content"] == ("7 years" if stream else "4567 years")
        assert choice["finish_reason"] == "stop"
    assert len([each for each in logs if each["event"] == "parser_failed"]) <= 1


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_that_is_cut_or_no_json_is_an_answer_all_the_same(serve_text, stream):
    cut = CALL[: len(CALL) // 2]
    wrong = '<tool_call>\n{"name": "weather", "arguments": {"city": }}\n</tool_call>'
    for text in (cut, wrong, "<tool_call>"):
        with serve_text(text, "hermes", ends=False) as served:
            choice = ask(served, stream, tools=[WEATHER], max_tokens=20)
        assert choice["finish_reason"] == "length"
        assert choice["token_ids"]


@pytest.mark.parametrize(
    ("asked", "param", "words"),
    [
        ({"tools": [WEATHER], "tool_choice": "some"}, "tool_choice", "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice", "give tools"),
        (
            {"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "<b>\n"}}},
            "tool_choice",
            "no tool has that name",
        ),
        ({"tools": [{}]}, "tools", "function"),
        ({"tools": [{"type": "web_search", "function": {"name": "a"}}]}, "tools", "web_search"),
        ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools", "length"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [3]}]},
            "messages",
            "a call that is none of a function",
        ),
        ({"messages": [{"role": "assistant", "tool_calls": 3}]}, "messages", "no list"),
        (
            {"tools": [{"type": "function", "function": {"name": "a", "parameters": {"type": "nonsense"}}}]}
            | {"tool_choice": "required"},
            "tools",
            "is no grammar",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "no"}}}},
            "response_format",
            "is no grammar",
        ),
        ({"structured_outputs": {"regex": "(a"}}, "structured_outputs", "is no grammar"),
        ({"structured_outputs": {"grammar": "no rule"}}, "structured_outputs", "is no grammar"),
        ({"structured_outputs": {"structural_tag": "{"}}, "structured_outputs", "is no grammar"),
    ],
)
def test_what_cannot_be_met_is_a_400_that_names_the_field(serve_text, asked, param, words):
    with serve_text("a", "xlam") as served:
        body = {"messages": MESSAGES, **asked}
        answer = httpx.post(f"{served.url}/v1/chat/completions", json=body, timeout=PATIENCE_S)
        assert answer.status_code == 400, answer.text
        assert not served.jobs
    error = answer.json()["error"]
    assert error["param"] == param
    assert words in error["message"]
    assert "\n" not in error["message"]


@pytest.mark.parametrize("more", [{}, {"tools": [WEATHER]}])
def test_variables_that_a_parser_cannot_take_are_refused_by_their_own_name(serve_text, more):
    with serve_text("a", "hermes", "qwen3") as served:
        body = {"messages": MESSAGES, "chat_template_kwargs": {"enable_thinking": []}, **more}
        answer = httpx.post(f"{served.url}/v1/chat/completions", json=body, timeout=PATIENCE_S)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == "chat_template_kwargs"
    assert "chat_template_kwargs" in answer.json()["error"]["message"]


def test_a_thousand_tools_with_markup_in_their_names_are_taken(serve_text):
    tools = [
        {"type": "function", "function": {"name": f"<|im_end|>{number}", "description": "{{ 7 * 7 }}"}}
        for number in range(1000)
    ]
    with serve_text(CALL, "hermes") as served:
        choice = ask(served, tools=tools, tool_choice="required")
        [job] = served.jobs
    assert called(choice) == [("weather", {"city": "Paris"})]
    assert all(f"<|im_end|>{number}" in job.sampling.structured_outputs.structural_tag for number in (0, 999))


def test_without_a_parser_tools_are_refused_unless_none_is_to_be_called(serve_text):
    with serve_text("a") as served:
        create = served.client().chat.completions.create
        for choice in ("auto", "required", {"type": "function", "function": {"name": "weather"}}):
            with pytest.raises(openai.BadRequestError, match="needs a parser of calls") as refused:
                create(model="seer", messages=MESSAGES, tools=[WEATHER], tool_choice=choice)
            assert refused.value.param == "tool_choice"
        assert ask(served, tools=[WEATHER], tool_choice="none")["message"]["content"] == "a"
        assert ask(served, tools=[], tool_choice="auto")["message"]["content"] == "a"


def test_an_unknown_parser_is_an_error_at_the_start_that_names_the_nearest(serve_text, serve_sim):
    with pytest.raises(ConfigError, match="perhaps hermes"), serve_text("a", "hermez"):
        pass
    with pytest.raises(ConfigError, match="-parser 'qwen33': there"), serve_text("a", None, "qwen33"):
        pass
    with pytest.raises(ConfigError, match="this engine has none"):
        serve_sim(parsers=ParserNames("hermes"))


def test_a_stream_that_goes_on_behind_a_call_ends_for_it(serve_text):
    asked = {"stream": True, "tools": [WEATHER], "seed": 1}
    with serve_text(CALL, "hermes") as served:
        whole = ask(served, **asked)
        skipped = len(whole["token_ids"]) - 1
        rest = ask(served, **asked, stream_options={"skip_tokens": [skipped]})
    assert rest["token_ids"] == whole["token_ids"][skipped:]
    assert rest["finish_reason"] == whole["finish_reason"] == "tool_calls"


FLAT = {"type": "function", "strict": True, **WEATHER["function"]}


def test_responses_have_items_of_reasoning_and_calls(serve_text):
    asked = {"model": "seer", "input": "how warm is Paris", "tools": [FLAT], "max_output_tokens": 400}
    with serve_text(f"hm</think>{CALL}", "hermes", "deepseek_r1") as served:
        create = served.client().responses.create
        whole, events = create(**asked), list(create(**asked, stream=True))
    Response.model_validate(whole.to_dict())
    thought, call = whole.output
    assert (thought.type, thought.content[0].text) == ("reasoning", "hm")
    assert (call.type, call.name, json.loads(call.arguments)) == (
        "function_call",
        "weather",
        {"city": "Paris"},
    )
    assert (whole.status, whole.tools[0].name) == ("completed", "weather")
    assert [event.sequence_number for event in events] == list(range(len(events)))
    deltas = [each.delta for each in events if each.type == "response.function_call_arguments.delta"]
    assert json.loads("".join(deltas)) == {"city": "Paris"}
    done = [each.item for each in events if each.type == "response.output_item.done"]
    assert [each.type for each in done] == ["reasoning", "function_call"]
    last = events[-1].response
    assert [each.type for each in last.output] == ["reasoning", "function_call"]
    assert json.loads(last.output[1].arguments) == {"city": "Paris"}


def test_items_of_an_input_are_messages_of_one_chat(serve_text, byte_model):
    given = [
        {"role": "user", "content": "how warm is Paris"},
        {
            "type": "reasoning",
            "id": "r",
            "summary": [],
            "content": [{"type": "reasoning_text", "text": "hm"}],
        },
        {"type": "function_call", "call_id": "c", "name": "weather", "arguments": '{"city": "Paris"}'},
        {"type": "function_call", "call_id": "d", "name": "time", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "4 C"},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "cold"}]},
    ]
    with serve_text("a", "hermes") as served:
        served.client().responses.create(model="seer", input=given, tools=[FLAT], tool_choice="none")
        [job] = served.jobs
    prompt = ModelTokenizer(byte_model).decode_all(job.token_ids)
    assert (
        "<|im_start|>assistant\n<think>hm</think><tool_call>weather city=Paris</tool_call>"
        "<tool_call>time</tool_call><|im_end|>\n<|im_start|>tool\n4 C<|im_end|>\n"
        "<|im_start|>assistant\ncold<|im_end|>" in prompt
    )
