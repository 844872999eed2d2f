"""Messages reach a template as vLLM hands them on; images, and all else that is no text, are refused."""

import copy
import warnings
from functools import partial
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from types import SimpleNamespace

import pytest
from seer_host.images import IMAGE_PART
from seer_worker.chat.messages import content_format, prepare, texts_of

from seer_core.errors import PromptError

PLAIN = "{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}"
IN_PARTS = "{% for m in messages %}{% for part in m['content'] %}{{ part.text }}{% endfor %}{% endfor %}"
WITH_DEVELOPER = PLAIN + "{% if 'developer' %}{% endif %}"
FORMS = {"string": PLAIN, "openai": IN_PARTS, "developer": WITH_DEVELOPER}


def text(content, kind="text", field="text", **more):
    return {"type": kind, field: content, **more}


def call(arguments, **more):
    function = {"name": "weather", "arguments": arguments}
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "c", "type": "function", "function": function}],
    }


CHATS = {
    "text": [{"role": "system", "content": "terse"}, {"role": "user", "content": " 2 < 3? "}],
    "parts": [
        {
            "role": "user",
            "content": [
                text("a"),
                text("b\n", "input_text"),
                text("c", "output_text"),
                text("d", "refusal", "refusal"),
                text("e", "thinking", "thinking", closed=True),
            ],
        }
    ],
    "plain strings as parts": [{"role": "user", "content": ["a", text("b"), "c"]}],
    "parts with fields of their own": [{"role": "user", "content": [text("a", cache_control={"type": "x"})]}],
    "no parts": [{"role": "user", "content": []}],
    "empty text": [{"role": "user", "content": ""}],
    "null": [{"role": "assistant", "content": None}],
    "absent": [{"role": "assistant"}],
    "a call": [call('{"city": "Rome", "n": 1.0}')],
    "a call that was cut": [call('{"city": "Ro')],
    "a call whose arguments are a list": [call("[1]")],
    "a call with empty arguments": [call("")],
    "no calls": [{"role": "assistant", "content": "a", "tool_calls": []}],
    "null calls": [{"role": "assistant", "content": "a", "tool_calls": None}],
    "reasoning": [{"role": "assistant", "content": "a", "reasoning": "r"}],
    "reasoning by its old name": [{"role": "assistant", "content": "a", "reasoning_content": "r"}],
    "reasoning by both names": [
        {"role": "assistant", "content": "a", "reasoning": "r", "reasoning_content": "s"}
    ],
    "reasoning of a user": [{"role": "user", "content": "a", "reasoning": "r"}],
    "a result": [{"role": "tool", "content": "4", "tool_call_id": "c"}],
    "a result with a name": [{"role": "tool", "content": "4", "tool_call_id": "c", "name": "weather"}],
    "a result without an id": [{"role": "tool", "content": "4"}],
    "a result in parts": [{"role": "tool", "content": [text("a"), text("b")], "tool_call_id": "c"}],
    "an id of a user": [{"role": "user", "content": "a", "tool_call_id": "c"}],
    "a name": [{"role": "user", "content": "a", "name": "Bob"}],
    "a role of the template's own": [{"role": "ipython", "content": "4"}],
    "a line that is not for the model": [
        {"role": "system", "content": "x-anthropic-billing-header: cch=1\nterse"},
        {"role": "user", "content": "x-anthropic-billing-header: mine"},
    ],
    "nothing but such a line": [{"role": "system", "content": "x-anthropic-billing-header: cch=1"}],
    "a developer": [{"role": "developer", "content": "terse"}, {"role": "user", "content": "a"}],
    "a developer after the system": [
        {"role": "system", "content": [text("s"), text("t")]},
        {"role": "developer", "content": "terse"},
        {"role": "user", "content": "a"},
        {"role": "developer", "content": ""},
    ],
    "a developer between": [{"role": "user", "content": "a"}, {"role": "developer", "content": [text("b")]}],
    "two of the system": [
        {"role": "user", "content": "a"},
        {"role": "system", "content": "s"},
        {"role": "system", "content": "t"},
    ],
}


@pytest.fixture(scope="module")
def vllm():
    """Return the modules of vLLM that read messages."""
    pytest.importorskip("vllm", reason="vLLM is not installed: `make setup` installs it")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # vLLM's own imports
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
        from vllm.renderers import chat_utils, hf
    return SimpleNamespace(request=ChatCompletionRequest, chat=chat_utils, hf=hf)


def by_vllm(vllm, messages, source):
    """Return the messages that vLLM's server gives to a template."""
    request = vllm.request(messages=copy.deepcopy(messages))
    config = SimpleNamespace(multimodal_config=None, enable_prompt_embeds=False)
    config.allowed_local_media_path, config.allowed_media_domains = "", None
    form = vllm.hf._detect_content_format(source, default="string")
    found, _, _ = vllm.chat.parse_chat_messages(request.messages, config, form)
    developer = any(each["role"] == "developer" for each in found)
    if developer and not vllm.hf._detect_developer_role_support(source):
        found = vllm.hf._consolidate_system_messages(vllm.hf._convert_developer_to_system(found))
    return found


@pytest.mark.engine  # imports vLLM
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("chat", CHATS)
def test_a_template_receives_what_vllm_would_give_it(vllm, chat, form):
    assert prepare(CHATS[chat], FORMS[form]) == by_vllm(vllm, CHATS[chat], FORMS[form])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("chat", CHATS)
def test_messages_stay_as_they_are_and_may_be_read_twice(chat, form):
    given = copy.deepcopy(CHATS[chat])
    read = prepare(given, FORMS[form])
    assert given == CHATS[chat]
    assert texts_of(prepare(read, FORMS[form])) == texts_of(read)


LOOPS = {
    "of a slice": "{% set rest = messages[1:] %}{% for m in rest %}"
    "{% for p in m.content %}{% endfor %}{% endfor %}",
    "of a filter": "{% for m in messages %}"
    "{% for p in m['content'] | selectattr('type') %}{% endfor %}{% endfor %}",
    "of a macro": "{% macro show(x) %}{% for p in x %}{% endfor %}{% endmacro %}"
    "{% for m in messages %}{{ show(m.content) }}{% endfor %}",
    "of a macro by name": "{% macro show(y, x) %}{% for p in x %}{% endfor %}{% endmacro %}"
    "{% for m in messages %}{{ show(1, x=m.content) }}{% endfor %}",
    "of another argument": "{% macro show(x, y) %}{% for p in y %}{% endfor %}{% endmacro %}"
    "{% for m in messages %}{{ show(m.content, [1]) }}{% endfor %}",
    "of content in a macro": "{% macro show(content) %}{% for p in content %}{% endfor %}{% endmacro %}"
    "{% for m in messages %}{{ show(m.role) }}{% endfor %}",
    "of content that is set": "{% for m in messages %}{% set content = m.content %}"
    "{% for p in content %}{% endfor %}{% endfor %}",
    "of another chat": "{% for m in chat %}{% for p in m.content %}{% endfor %}{% endfor %}",
    "over pairs": "{% for a, b in messages %}{% for p in a.content %}{% endfor %}{% endfor %}",
    "marked": "{% for m in messages %}{% generation %}{% for p in m.content %}{{ p }}{% endfor %}"
    "{%- endgeneration -%}{% endfor %}",
    "broken": "{% for m in messages %}",
}


def shipped():
    """Return the templates that TRL and vLLM ship, by name."""
    found = [find_spec(each) for each in ("trl", "vllm")]
    places = [place for each in found if each for place in each.submodule_search_locations]
    return {path.stem: path for path in chain(*(sorted(Path(each).rglob("*.jinja")) for each in places))}


@pytest.mark.engine  # imports vLLM
def test_the_form_of_a_content_is_found_as_vllm_finds_it(vllm):
    sources = LOOPS | FORMS | {name: path.read_text("utf-8") for name, path in shipped().items()}
    assert len(sources) > 80
    forms = {name: content_format(source) for name, source in sources.items()}
    detect = partial(vllm.hf._detect_content_format, default="string")
    assert forms == {name: detect(source) for name, source in sources.items()}
    assert {*forms.values()} == {"string", "openai"}


def test_names_that_stand_for_each_other_are_followed_once():
    circle = "{% set a = messages %}{% set messages = a %}"  # vLLM follows them for ever
    assert (
        content_format(circle + "{% for m in a %}{% for p in m.content %}{% endfor %}{% endfor %}")
        == "openai"
    )


MEDIA = [
    {"type": "image_url", "image_url": {"url": "data:,"}},
    {"type": "input_image", "image_url": "data:,"},
    {"type": "image"},
    {"type": "image_pil", "image_pil": None},
    {"type": "image_embeds", "image_embeds": "AA"},
    {"type": "input_audio", "input_audio": {"data": "", "format": "wav"}},
    {"type": "audio_url", "audio_url": {"url": "data:,"}},
    {"type": "audio"},
    {"type": "video_url", "video_url": {"url": "data:,"}},
    {"type": "video", "video": "a.mp4"},
    {"type": "prompt_embeds", "data": "AA"},
    {"type": "file", "file": {"file_id": "f"}},
]


@pytest.mark.parametrize("source", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("part", MEDIA, ids=lambda part: part["type"])
def test_an_image_is_refused_by_its_message_and_type(part, source):
    chat = [{"role": "user", "content": "a"}, {"role": "user", "content": [text("what is it"), part]}]
    with pytest.raises(
        PromptError, match=f"message 1 has a part of type '{part['type']}', and Seer rolls out text"
    ):
        prepare(chat, source)


def test_an_image_without_a_type_or_beside_a_text_is_refused_too():
    for part in ({"image_url": "data:,"}, {"type": "text", "text": "a", "image": "data:,"}):
        with pytest.raises(PromptError, match="message 0 has a part of type 'image"):
            prepare([{"role": "user", "content": [part]}], PLAIN)


def test_a_tool_s_result_stays_in_parts_if_it_has_an_image():
    result = {"role": "tool", "content": [text("a"), IMAGE_PART, text("b")], "tool_call_id": "c"}
    assert prepare([result], IN_PARTS) == [result]
    with pytest.raises(PromptError, match="message 0, of role 'tool', has an image, which this chat"):
        prepare([result], PLAIN)


def test_columns_that_a_dataset_leaves_empty_are_no_parts():
    columns = {"tool_calls": None, "name": None, "thinking": None}
    chat = [{"role": "user", "content": [{"type": "text", "text": "a", "image": None}], **columns}]
    assert prepare(chat, PLAIN) == [{"role": "user", "content": "a"}]
    assert prepare(chat, IN_PARTS) == [{"role": "user", "content": [{"type": "text", "text": "a"}]}]


def test_fields_that_only_the_template_reads_are_handed_on():
    chat = [{"role": "assistant", "content": "a", "thinking": "t"}]
    assert prepare(chat, PLAIN) == chat


REFUSED = {
    "no list": ("hello", "messages are 'hello'; give a list"),
    "one message": ({"role": "user", "content": "a"}, "give a list of them"),
    "no message": ([{"role": "user", "content": "a"}, "b"], "message 1 is 'b'; give a mapping"),
    "no role": ([{"content": "a"}], "message 0 has no role"),
    "a number for a role": ([{"role": 1, "content": "a"}], "message 0 has no role"),
    "null": ([{"role": "user", "content": None}], "message 0, of role 'user', has no content"),
    "no content": ([{"role": "tool"}], "message 0, of role 'tool', has no content"),
    "a number": (
        [{"role": "user", "content": 4}],
        "message 0 has the content 4; give text or a list of parts",
    ),
    "a mapping": ([{"role": "tool", "content": {"a": 1}}], "message 0 has the content {'a': 1}; give text"),
    "a part that is none": ([{"role": "user", "content": [4]}], "message 0 has the part 4"),
    "a part of another type": (
        [{"role": "user", "content": [{"type": "tool_reference", "name": "f"}]}],
        "message 0 has a part of type 'tool_reference', which Seer cannot read",
    ),
    "a part without a type": (
        [{"role": "user", "content": [{"text": "a"}]}],
        "a part of type None, which Seer",
    ),
    "a part without text": (
        [{"role": "user", "content": [{"type": "text"}]}],
        "message 0 has a part without 'text'",
    ),
    "calls that are none": (
        [{"role": "assistant", "tool_calls": {"name": "f"}}],
        "message 0 has tool_calls that are no list",
    ),
    "a call of another kind": (
        [{"role": "assistant", "tool_calls": [{"type": "custom", "custom": {}}]}],
        "message 0 has a call that is none of a function",
    ),
    "a call without a name": (
        [{"role": "assistant", "tool_calls": [{"function": {"arguments": "{}"}}]}],
        "message 0 has a call without the name",
    ),
    "reasoning in parts": (
        [{"role": "assistant", "reasoning": [text("r")]}],
        "message 0 has reasoning that is no text",
    ),
    "a developer's tools": (
        [{"role": "developer", "content": "a", "tools": [{"type": "function", "function": {"name": "f"}}]}],
        "message 0 has tools of its own",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_no_message_of_text_is_refused_by_its_number(case):
    messages, words = REFUSED[case]
    with pytest.raises(PromptError) as refused:
        prepare(messages, PLAIN)
    assert words in str(refused.value)


def test_texts_are_those_of_each_content():
    chat = [{"role": "user", "content": ["a", text("b")]}, {"role": "assistant", "content": None}]
    assert texts_of(chat) == [["a", "b"], []]
