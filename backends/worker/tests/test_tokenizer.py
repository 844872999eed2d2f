"""Chats become the tokens that transformers makes of them, in any style of template."""

import json
import subprocess
import sys

import pytest
from seer_host.images import IMAGE_PART
from seer_worker.tokenizer import ModelTokenizer

from seer_core.errors import ConfigError, PromptError

CHAT = [
    {"role": "system", "content": "  You are terse. "},
    {"role": "user", "content": "What is 2 < 3 & 4?"},
    {"role": "assistant", "content": "<think>easy</think>\nTrue."},
    {"role": "user", "content": 'Grüße, und "jetzt"?'},
]

TEMPLATES = {
    "turns between marks": """{% for message in messages %}
{{ '<|start|>' + message['role'] + '\\n' + message['content'] + '<|end|>' + '\\n' }}
{% endfor %}
{% if add_generation_prompt %}{{ '<|start|>assistant\\n' }}{% endif %}""",
    "generation marked": """{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {{- '<|a|>' }}
        {%- generation %}{{- message.content + eos_token }}{%- endgeneration %}
    {%- else %}
        {{- '<|' + message.role + '|>' + message.content }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|a|>' }}{%- endif %}""",
    "named": [
        {"name": "tool_use", "template": "{{ raise_exception('no tools here') }}"},
        {
            "name": "default",
            "template": "{{ bos_token }}{% for m in messages %}"
            "{{ m.role }}: {{ m.content | trim }}\n{% endfor %}",
        },
    ],
    "system first": """{%- if messages[0].role == 'system' -%}
{%- set system = messages[0].content | trim + '\\n\\n' -%}{%- set turns = messages[1:] -%}
{%- else -%}{%- set system = '' -%}{%- set turns = messages -%}{%- endif -%}
{{ bos_token }}{%- for m in turns -%}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) -%}
{{ raise_exception('roles must alternate') }}{%- endif -%}
{%- if m.role == 'user' -%}{{ '[INST] ' + (system if loop.first else '') + m.content + ' [/INST]' }}
{%- else -%}{{ m.content + eos_token }}{%- endif -%}{%- endfor -%}""",
    "tools": """{%- if tools is not none and tools | length > 0 %}{{- '# Tools\\n' }}
{%- for tool in tools %}{{- tool | tojson(indent=2) }}{%- endfor %}
{%- elif not tools %}{{- 'No tools.\\n' }}{%- endif %}
{%- for m in messages %}
{%- if m.tool_calls is defined and m.tool_calls %}{{- m.tool_calls | tojson }}
{%- else %}{{- '<|' ~ m.role ~ '|>' ~ m.content }}{%- endif %}{%- endfor %}
{{- '<|assistant|>' }}""",
    "thoughts of earlier turns dropped": """{%- set ns = namespace(last=-1) %}
{%- for m in messages[::-1] %}{%- set i = messages | length - 1 - loop.index0 %}
{%- if ns.last < 0 and m.role == 'user' and m.content is string %}{%- set ns.last = i %}{%- endif %}
{%- endfor %}
{%- for m in messages %}
{%- set content = m.content %}
{%- if m.role == 'assistant' and '</think>' in content and loop.index0 < ns.last %}
{%- set content = content.split('</think>')[-1].lstrip('\\n') %}{%- endif %}
{{- '<|im_start|>' + m.role + '\\n' + content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n' }}{%- endif %}
{%- endif %}""",
    "a macro": """{% macro turn(role, text) -%}
<turn of="{{ role | replace('assistant', 'model') }}">{{ text | trim | escape }}</turn>
{% endmacro -%}
{%- for m in messages if m.role != 'system' %}{{ turn(m.role, m.content) }}{% endfor %}
{{- '<turn of="model">' }}""",
    "parts of a content": """{%- for m in messages %}{{- '<' ~ m['role'] ~ '>' }}
{%- if m['content'] is string %}{{- m['content'] }}
{%- else %}{%- for part in m['content'] | selectattr('type', 'equalto', 'text') %}{{- part['text'] }}
{%- endfor %}{%- endif %}{%- endfor %}""",
    "the year": """{%- if not date is defined %}{%- set date = strftime_now('%Y') %}{%- endif %}
{{- bos_token }}{{- 'Year: ' + date + '\\n' }}
{%- for m in messages %}{%- if m.role == 'system' %}{% continue %}{%- endif %}
{{- m.role | upper + ': ' + m.content + '\\n' }}{%- if loop.index > 3 %}{% break %}{%- endif %}
{%- endfor %}""",
    "documents and json": """{%- if documents %}{{- documents | tojson }}{%- endif %}
{{- {'chat': messages | map(attribute='content') | list} | tojson(sort_keys=true) }}
{{- messages | tojson(indent=1) }}{{- ' ' + (eos_token if add_generation_prompt else '') }}""",
}

BY_TRANSFORMERS = """
import json, sys
from transformers import AutoTokenizer
tokens = {}
for name, directory in json.load(sys.stdin)["models"].items():
    tokenizer = AutoTokenizer.from_pretrained(directory)
    chat = json.loads(sys.argv[1])
    out = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=True, return_dict=False)
    tokens[name] = out
print(json.dumps(tokens))
"""


def write_tokenizer(directory, template):
    """Write a tokenizer that has a token for every byte, and two special ones."""
    tokenizers = pytest.importorskip("tokenizers")
    directory.mkdir()
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: number for number, letter in enumerate(["<s>", "</s>", *letters])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": {"__type": "AddedToken", "content": "</s>", "special": True},
        "add_bos_token": False,
        "chat_template": template,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory


@pytest.mark.engine  # imports transformers: ten seconds
def test_templates_of_ten_styles_give_the_tokens_that_transformers_gives(tmp_path):
    pytest.importorskip("transformers")
    models = {name: write_tokenizer(tmp_path / name, source) for name, source in TEMPLATES.items()}
    rendered = subprocess.run(
        [sys.executable, "-c", BY_TRANSFORMERS, json.dumps(CHAT)],
        input=json.dumps({"models": {name: str(path) for name, path in models.items()}}),
        capture_output=True,
        text=True,
        check=True,
    )
    expected = json.loads(rendered.stdout.splitlines()[-1])
    found = {name: ModelTokenizer(path).encode_chat(CHAT) for name, path in models.items()}
    assert len(found) == 10
    assert found == expected


def rendered(tmp_path, template):
    tokenizer = ModelTokenizer(write_tokenizer(tmp_path / "model", template))
    return tokenizer.decode(tokenizer.encode_chat(CHAT))


def test_what_is_marked_as_generated_is_rendered(tmp_path):
    assert "<|a|><think>easy</think>" in rendered(tmp_path, TEMPLATES["generation marked"])


def test_of_several_templates_the_default_is_taken(tmp_path):
    assert rendered(tmp_path, TEMPLATES["named"]).startswith("system: You are terse.\nuser: ")


@pytest.mark.parametrize(
    ("template", "kind", "complaint"),
    [
        ([{"name": "rag", "template": ""}], PromptError, "templates named rag, and none named default"),
        ([{"title": "rag"}], ConfigError, "no list of names and templates; copy the model's files anew"),
        (["rag"], ConfigError, "no list of names and templates"),
        (None, PromptError, "has no chat template; give prompts as text"),
        ("{% generation %}", ConfigError, "its chat template is broken"),
    ],
)
def test_templates_that_cannot_be_used_are_named(tmp_path, template, kind, complaint):
    with pytest.raises(kind, match=complaint):
        rendered(tmp_path, template)


def test_a_template_sees_the_variables_that_are_given_to_it(tmp_path):
    template = "{% if enable_thinking is defined and not enable_thinking %}-{% endif %}{{ bos_token }}"
    tokenizer = ModelTokenizer(write_tokenizer(tmp_path / "model", template))
    plain = tokenizer.encode_chat(CHAT)
    assert tokenizer.encode_chat(CHAT, {}) == plain
    assert tokenizer.encode_chat(CHAT, {"enable_thinking": True, "unknown": [1]}) == plain
    assert tokenizer.encode_chat(CHAT, {"enable_thinking": False})[1:] == plain
    for name in ("messages", "add_generation_prompt", "bos_token"):
        with pytest.raises(PromptError, match=f"chat_template_kwargs cannot set {name}"):
            tokenizer.encode_chat(CHAT, {name: None})


REPLY = [{"role": "user", "content": "And 3 < 2?"}]


@pytest.mark.parametrize("name", ["turns between marks", "generation marked", "parts of a content"])
def test_messages_are_appended_as_the_template_writes_a_whole_chat(tmp_path, name):
    """The model's own tokens stay; behind them stands what the template would have written there."""
    tokenizer = ModelTokenizer(write_tokenizer(tmp_path / "model", TEMPLATES[name]))
    chat = [{"role": "user", "content": "Is 2 < 3?"}, {"role": "assistant", "content": "True"}]
    whole, written = tokenizer.encode_chat([*chat, *REPLY]), tokenizer.encode_part("True")
    answer = tokenizer.encode_reply(REPLY, written)
    assert whole[-len(written) - len(answer) :] == [*written, *answer]


def test_an_end_token_that_the_model_has_written_is_not_written_again(tmp_path):
    template = TEMPLATES["generation marked"]
    tokenizer = ModelTokenizer(write_tokenizer(tmp_path / "model", template))
    written = tokenizer.encode_part("True")
    [end] = tokenizer.encode_part("</s>")
    answer = tokenizer.encode_reply(REPLY, written)
    assert answer[0] == end
    assert tokenizer.encode_reply(REPLY, [*written, end]) == answer[1:]


def test_a_turn_that_the_template_writes_in_another_way_when_messages_follow_keeps_its_tokens(tmp_path):
    template = "{% for m in messages %}{{ '*' if loop.last }}{{ m.content }}{% endfor %}"
    tokenizer = ModelTokenizer(write_tokenizer(tmp_path / "model", template))
    assert tokenizer.encode_reply(REPLY, [5]) == tokenizer.encode_part("*And 3 < 2?")


def test_messages_whose_content_the_template_leaves_out_are_refused(tmp_path):
    template = "{% for m in messages if m.role != 'tool' %}{{ m.content }}{% endfor %}"
    tokenizer = ModelTokenizer(write_tokenizer(tmp_path / "model", template))
    with pytest.raises(PromptError, match="let the environment answer text or token ids"):
        tokenizer.encode_reply([{"role": "tool", "content": "4 degrees"}], [5])
    with pytest.raises(PromptError, match="message 0, of role 'tool', has an image, which this chat"):
        tokenizer.encode_reply([{"role": "tool", "content": [IMAGE_PART]}], [5])


def test_an_image_is_refused_and_not_left_out(tmp_path):
    tokenizer = ModelTokenizer(write_tokenizer(tmp_path / "model", TEMPLATES["parts of a content"]))
    parts = [{"type": "text", "text": "what is this?"}, {"type": "image_url", "image_url": {"url": "a.png"}}]
    with pytest.raises(
        PromptError, match="message 1 has a part of type 'image_url', and Seer rolls out text"
    ):
        tokenizer.encode_chat([CHAT[0], {"role": "user", "content": parts}])


def test_variables_of_the_template_are_given_to_messages_that_are_appended_too(tmp_path):
    template = TEMPLATES["thoughts of earlier turns dropped"]
    tokenizer = ModelTokenizer(write_tokenizer(tmp_path / "model", template))
    plain = tokenizer.encode_reply(REPLY, [5])
    longer = tokenizer.encode_reply(REPLY, [5], {"enable_thinking": False})
    assert len(longer) > len(plain)
    assert longer[: len(plain)] == plain
    with pytest.raises(PromptError, match="cannot set messages"):
        tokenizer.encode_reply(REPLY, [5], {"messages": []})


def test_tools_go_to_the_template_for_them(tmp_path):
    named = [
        {"name": "default", "template": "{{ bos_token }}"},
        {"name": "tool_use", "template": "{{ bos_token }}{{ bos_token if tools[0].name == 'a' }}"},
    ]
    tokenizer = ModelTokenizer(write_tokenizer(tmp_path / "model", named))
    [bos] = tokenizer.encode_chat(CHAT, {"tools": None})
    assert tokenizer.encode_chat(CHAT) == [bos]
    assert tokenizer.encode_chat(CHAT, {"tools": [{"name": "a"}]}) == [bos, bos]
