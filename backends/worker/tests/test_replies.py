"""Messages behind the model's own turn become the text that a whole chat has there, or are refused."""

import copy
import json
from datetime import datetime
from functools import lru_cache
from importlib.util import find_spec
from itertools import chain
from os.path import commonprefix
from pathlib import Path

import pytest
from jinja2 import TemplateError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from seer_host.images import IMAGE_PART
from seer_worker.chat.messages import prepare, texts_of
from seer_worker.chat.replies import reply_text
from seer_worker.tokenizer.generation_tag import Generation

from seer_core.errors import PromptError

QUESTION = {"role": "user", "content": "How warm is it?"}
RESULT = '4 "degrees" & <b>'


def call(number, name, arguments):
    return {"id": f"call_{number}", "type": "function", "function": {"name": name, "arguments": arguments}}


def tool(name, argument):
    parameters = {"type": "object", "properties": {argument: {"type": "string"}}, "required": [argument]}
    function = {"name": name, "description": f"The {name}", "parameters": parameters}
    return {"type": "function", "function": function}


TOOLS = [tool("weather", "city"), tool("clock", "zone")]
WEATHER, CLOCK = call(1, "weather", {"city": "Rome"}), call(2, "clock", {"zone": "CET"})
TURNS = {
    "text": {"role": "assistant", "content": "It is warm."},
    "a thought": {"role": "assistant", "content": "<think>\nhm\n</think>\n\nIt is warm."},
    "reasoning": {"role": "assistant", "content": "It is warm.", "reasoning": "hm"},
    "a call": {"role": "assistant", "content": None, "tool_calls": [WEATHER]},
    "text and a call": {"role": "assistant", "content": "I look.", "tool_calls": [WEATHER]},
    "two calls": {"role": "assistant", "content": None, "tool_calls": [WEATHER, CLOCK]},
}


def result(**more):
    return {"role": "tool", "content": RESULT, **more}


REPLIES = {
    "a user": [{"role": "user", "content": "And now?"}],
    "a user in parts": [{"role": "user", "content": [{"type": "text", "text": "And"}, "now?"]}],
    "two users": [{"role": "user", "content": "And"}, {"role": "user", "content": "now?"}],
    "the system": [{"role": "system", "content": "Be terse."}],
    "a developer": [{"role": "developer", "content": "Be terse."}],
    "an assistant": [{"role": "assistant", "content": "More."}],
    "a tool": [result()],
    "a tool with an id": [result(tool_call_id="call_1")],
    "a tool with a name": [result(name="weather")],
    "a tool with both": [result(tool_call_id="call_1", name="weather")],
    "two tools": [
        result(tool_call_id="call_1"),
        {"role": "tool", "content": "12:00", "tool_call_id": "call_2"},
    ],
    "a tool and a user": [result(tool_call_id="call_1"), {"role": "user", "content": "And now?"}],
    "nothing": [],
}


def shipped():
    """Return the templates that TRL and vLLM ship, by name."""
    found = [find_spec(each) for each in ("trl", "vllm")]
    places = [place for each in found if each for place in each.submodule_search_locations]
    return {path.stem: path for path in chain(*(sorted(Path(each).rglob("*.jinja")) for each in places))}


TEMPLATES = shipped()
if not TEMPLATES:
    pytest.skip("TRL and vLLM are not installed: `make setup` installs them", allow_module_level=True)


def compiled(source):
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )

    def refuse(words):
        raise TemplateError(words)

    environment.filters["tojson"] = lambda value, ensure_ascii=False, **more: json.dumps(
        value, ensure_ascii=ensure_ascii, **more
    )
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = datetime(2026, 11, 27).strftime
    return environment.from_string(source)


def renderer(source, tools=None):
    """Return what renders chats with a template as prompts are rendered."""
    template = compiled(source)

    def render(messages, add_generation_prompt):
        return template.render(
            messages=prepare(messages, source),
            add_generation_prompt=add_generation_prompt,
            tools=tools,
            documents=None,
            bos_token="<s>",
            eos_token="</s>",
        )

    return render


@lru_cache
def of_template(name, tools=True):
    return renderer(TEMPLATES[name].read_text("utf-8"), TOOLS if tools else None)


def without_ids(turn):
    calls = [{name: value for name, value in each.items() if name != "id"} for each in turn["tool_calls"]]
    return {**turn, "tool_calls": calls}


def has_all(text, messages):
    """Return whether a text has the contents, as they are or in JSON."""
    contents = [content for each in texts_of(messages) for content in each]
    return all(each in text or json.dumps(each)[1:-1] in text for each in contents)


def whole_chat(render, turn, reply):
    """Return the texts before the turn, to its end, and of the whole chat; None where it is refused."""
    try:
        before = render([QUESTION], True)
        return before, render([QUESTION, turn], False), render([QUESTION, turn, *reply], True)
    except (TemplateError, TypeError):
        return None


@pytest.mark.parametrize("reply", REPLIES)
@pytest.mark.parametrize("name", TEMPLATES)
def test_the_text_is_the_difference_of_the_whole_chats(name, reply):
    for turn in TURNS.values():
        compare(name, REPLIES[reply], turn)


def compare(name, reply, turn):
    """Compare the text with that of the whole chat; return whether, and if not, why not."""
    render = of_template(name)
    answers = sum(each["role"] == "tool" for each in reply)
    calls = len(turn.get("tool_calls", ()))
    if answers and calls and not any("tool_call_id" in each for each in reply):
        turn = without_ids(turn)
    found = whole_chat(render, turn, reply)
    prompt, before, whole = found or ("", "", "")
    written = before[len(commonprefix([prompt, before])) :]  # noqa: RUF071, of texts
    try:
        text = reply_text(reply, render, tools=TOOLS, written=written)
    except PromptError:
        text = None
    assert text is None or has_all(text, reply)
    if found is None:
        return "the template refuses the chat"
    rewritten = not before or not whole.startswith(before)
    difference = "" if rewritten else whole.removeprefix(before)
    if text is not None and whole.endswith(text) and text.endswith(difference):
        assert not any(each in text.removesuffix(difference) for each in ("warm", "Rome", "CET"))
        return "equal, behind a turn that is rewritten" if rewritten else "equal"
    if not has_all(difference or whole, reply) or not before:
        assert text is None or (answers and not calls)
        return "the template leaves content out"
    if answers != calls and answers:
        return "results of other calls"
    assert rewritten
    assert text is None or (answers and turn["content"])
    return "the template moves the turn's text" if text else "refused behind a turn that is rewritten"


def test_without_the_text_of_the_turn_results_with_names_are_the_same():
    for name in TEMPLATES:
        for reply in (REPLIES["a tool with a name"], REPLIES["a tool with both"]):
            texts = []
            for written in ("", "<tool_call>\n"):
                try:
                    texts.append(reply_text(reply, of_template(name), tools=TOOLS, written=written))
                except PromptError as refused:
                    texts.append(str(refused))
            assert texts[0] == texts[1]
            turn = TURNS["a call"]
            found = whole_chat(of_template(name), turn, reply)
            if found and found[2].startswith(found[1]) and has_all(found[2], reply):
                assert found[2].endswith(texts[0]), name


EXACT = {
    ("gemma3", "a user", "text"): "<end_of_turn>\n<start_of_turn>user\nAnd now?<end_of_turn>\n"
    "<start_of_turn>model\n",
    ("gemma3", "nothing", "text"): "<end_of_turn>\n<start_of_turn>model\n",
    ("gemma4", "a tool with a name", "a call"): '<|tool_response>response:weather{value:<|"|>'
    f'{RESULT}<|"|>}}<tool_response|>',
    ("gemma4", "a user", "text"): "<turn|>\n<|turn>user\nAnd now?<turn|>\n<|turn>model\n",
    (
        "qwen3",
        "a tool",
        "a call",
    ): f"<|im_end|>\n<|im_start|>user\n<tool_response>\n{RESULT}\n</tool_response>"
    "<|im_end|>\n<|im_start|>assistant\n",
    ("qwen3", "a user", "a thought"): "<|im_end|>\n<|im_start|>user\nAnd now?<|im_end|>\n"
    "<|im_start|>assistant\n",
    ("phi3", "a user", "text"): "<|end|>\n<|user|>\nAnd now?<|end|>\n<|assistant|>\n",
    ("idefics3", "a user", "text"): "<end_of_utterance>\nUser: And now?<end_of_utterance>\nAssistant:",
    ("gptoss", "a user", "text"): "<|end|><|start|>user<|message|>And now?<|end|><|start|>assistant",
    ("gptoss", "a tool with a name", "a call"): "<|call|><|start|>functions.weather to=assistant"
    f"<|channel|>commentary<|message|>{json.dumps(RESULT)}<|end|><|start|>assistant",
    ("deepseek_r1_distill", "a tool", "a call"): (
        f"<|end▁of▁sentence|><|tool▁outputs▁begin|><|tool▁output▁begin|>{RESULT}<|tool▁output▁end|>"
        "<|tool▁outputs▁end|>"
    ).replace("|", "\uff5c"),
    ("glm4moe", "a tool", "a call"): f"<|observation|>\n<tool_response>\n{RESULT}\n</tool_response>"
    "<|assistant|>",
    ("template_chatml", "a user", "text"): "<|im_end|>\n<|im_start|>user\nAnd now?<|im_end|>\n"
    "<|im_start|>assistant\n",
    ("template_basic", "a user", "text"): "And now?",
}


@pytest.mark.parametrize(("name", "reply", "turn"), EXACT)
def test_the_text_begins_with_the_end_of_the_turn(name, reply, turn):
    assert reply_text(REPLIES[reply], of_template(name), tools=TOOLS) == EXACT[name, reply, turn]


def test_a_function_is_named_by_the_message_the_only_tool_or_the_turn():
    render = of_template("gemma4")
    response = '<|tool_response>response:{}{{value:<|"|>4<|"|>}}<tool_response|>'

    def text(tools=None, written="", **more):
        return reply_text([{"role": "tool", "content": "4", **more}], render, tools=tools, written=written)

    written = '<|tool_call>call:clock{zone:<|"|>CET<|"|>}<tool_call|><|tool_response>'
    assert text(tool_call_id="c", name="weather", written=written) == response.format("weather")
    assert text(tool_call_id="c", written=written) == response.format("clock")
    assert text(tool_call_id="c", tools=TOOLS[:1]) == response.format("weather")
    assert text() == response.format("unknown")  # as Gemma's own templates say it
    with pytest.raises(PromptError, match="give the message its 'name'"):
        text(tool_call_id="c", tools=TOOLS)
    two = [{"role": "tool", "content": "4", "tool_call_id": each} for each in "cd"]
    both = reply_text(two, render, written=written.replace("<|tool_response>", "<|tool_call>call:weather{}"))
    assert both == response.format("clock") + response.format("weather")


def test_a_user_behind_a_call_follows_the_end_of_the_call():
    written = '<|tool_call>call:clock{zone:<|"|>CET<|"|>}<tool_call|><|tool_response>'
    text = reply_text(REPLIES["a user"], of_template("gemma4"), written=written)
    assert text == "<|tool_response><|turn>user\nAnd now?<turn|>\n<|turn>model\n"
    text = reply_text(
        REPLIES["a user"], of_template("gptoss"), written=" to=functions.clock <|constrain|>json"
    )
    assert text == "<|call|><|start|>user<|message|>And now?<|end|><|start|>assistant"


REFUSED = {
    ("phi3", "a tool"): "leaves out content of message 0, of role 'tool'",
    ("idefics3", "a tool with a name"): "leaves out content of message 0, of role 'tool'",
    ("qwen3_vl", "the system"): "leaves out content of message 0, of role 'system'",
    ("qwen3", "a developer"): "leaves out content of message 0, of role 'developer'",
    ("deepseekv3", "the system"): "leaves out content of message 0, of role 'system'",
    ("gemma3", "a tool"): "the chat template refused messages: Conversation roles must alternate",
    ("gemma", "two users"): "the chat template refused messages: Conversation roles must alternate",
    ("gptoss", "a tool"): "give the message its 'name'",
    ("gptoss", "the system"): "leaves out content of message 0, of role 'system'",
    ("template_kimi_audio", "a user"): "does not write a turn of the assistant's once",
}


@pytest.mark.parametrize(("name", "reply"), REFUSED)
def test_a_message_that_a_template_loses_is_refused_by_its_role(name, reply):
    with pytest.raises(PromptError) as refused:
        reply_text(REPLIES[reply], of_template(name), tools=TOOLS)
    assert REFUSED[name, reply] in str(refused.value)


def test_content_that_repeats_words_of_the_template_is_not_taken_for_it():
    content = "turn<end_of_turn>\n<start_of_turn>model\nturn question user"
    text = reply_text([{"role": "user", "content": content}], of_template("gemma3"))
    assert text == f"<end_of_turn>\n<start_of_turn>user\n{content}<end_of_turn>\n<start_of_turn>model\n"
    with pytest.raises(PromptError, match="leaves out content of message 0, of role 'tool'"):
        reply_text([{"role": "tool", "content": "user"}], of_template("phi3"))


CHATML = "{% for m in messages %}<{{ m.role }}>{{ CONTENT }}<end>{% endfor %}"


def text_with(content, messages, loop=CHATML):
    return reply_text(messages, renderer(loop.replace("CONTENT", content)))


def test_content_may_be_trimmed_or_escaped_but_not_cut():
    user = [{"role": "user", "content": ' "a" & <b> '}]
    assert text_with("m.content | trim", user) == '<end><user>"a" & <b><end>'
    assert text_with("m.content | escape", user) == "<end><user> &#34;a&#34; &amp; &lt;b&gt; <end>"
    assert text_with("m.content | tojson", user) == '"<end><user>" \\"a\\" & <b> "<end>'
    for cut in ("m.content[:40]", "m.content | replace('<b>', '')", "m.content if '&' not in m.content"):
        with pytest.raises(PromptError, match="leaves out content of message 0, of role 'user'"):
            text_with(cut, [{"role": "user", "content": "4 " * 30 + "& <b>"}])


def test_a_thought_that_a_template_drops_is_not_lost_in_silence():
    thought = {"role": "assistant", "content": "<think>why</think>so"}
    with pytest.raises(PromptError, match="leaves out content of message 0, of role 'assistant'"):
        reply_text([thought, {"role": "user", "content": "go on"}], of_template("qwen3"))


def test_a_template_that_ends_turns_by_their_content_is_refused():
    for ending in ("m.content | length", "m.content | last"):
        with pytest.raises(PromptError, match="writes another text behind another turn"):
            text_with(f"m.content ~ ({ending})", [{"role": "user", "content": "a"}])


def test_an_end_that_stands_only_before_another_message_is_there():
    loop = "{% for m in messages %}{{ m.content }}{% if not loop.last %}<end>{% endif %}{% endfor %}"
    assert text_with("", [{"role": "user", "content": "a"}], loop) == "<end>a"


def test_messages_are_read_as_prompts_are():
    given = [{"role": "user", "content": [{"type": "text", "text": "a"}, "b"]}]
    asked = copy.deepcopy(given)
    assert text_with("m.content", asked) == "<end><user>a\nb<end>"
    assert asked == given
    image = [{"role": "user", "content": "a"}, {"role": "user", "content": [{"type": "image_url"}]}]
    with pytest.raises(PromptError, match="message 1 has a part of type 'image_url'"):
        text_with("m.content", image)
    for none in ("hello", [4], [{"role": "user"}]):
        with pytest.raises(PromptError):
            text_with("m.content", none)


SHOWS = "{% for message in messages %}{% for part in message['content'] %}{% endfor %}{% endfor %}"


def test_an_image_of_a_message_leaves_its_place_where_the_template_puts_it():
    def render(chat, prompted):
        parts = [part for each in prepare(chat, SHOWS) for part in each["content"]]
        return "".join(part.get("text", "<image>") for part in parts) + (">" if prompted else "")

    content = [{"type": "text", "text": "see"}, IMAGE_PART, IMAGE_PART, {"type": "text", "text": "both"}]
    assert reply_text([{"role": "user", "content": content}], render) == "see<image><image>both>"
    for role in ("user", "tool"):
        assert reply_text([{"role": role, "content": [IMAGE_PART]}], render) == "<image>>"


@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen3_vl", "qwen3_6"])
def test_an_image_of_a_tool_s_result_is_shown_by_qwen_s_templates(name):
    render = renderer(TEMPLATES[name].read_text("utf-8"), TOOLS)
    content = [{"type": "text", "text": "see"}, IMAGE_PART]
    reply = [{"role": "tool", "content": content, "tool_call_id": "call_1"}]
    found = reply_text(reply, render, tools=TOOLS)
    assert found.count("see<|vision_start|><|image_pad|><|vision_end|>") == 1
    assert render([QUESTION, TURNS["a call"], *reply], True).endswith(found)
