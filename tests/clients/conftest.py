"""``seer serve`` in Seer's environment, on one vLLM, for clients that have an environment of their own.

The model has the weights of the tiny reasoner and a tokenizer of single characters, so that it can write
JSON; its text means nothing.
"""

import json
import os
import re
import shutil
import string
import subprocess
import threading
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

os.environ |= {
    "HF_DATASETS_OFFLINE": "1",
    "HF_HUB_OFFLINE": "1",
    "LANGSMITH_TRACING": "false",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "OPENAI_AGENTS_DISABLE_TRACING": "1",
}

import openai
import pytest

collect_ignore = [] if find_spec("verifiers") else ["test_verifiers.py"]
"""verifiers has an environment of its own, for it excludes what other clients need."""

ROOT = Path(__file__).parents[2]
SEER = ROOT / ".venv/bin/seer"
WEIGHTS = ROOT / "examples/tiny_reasoner/weights"

START_S = 300
PATIENCE_S = 60

SPECIAL = ["<pad>", "<bos>", "<eos>", "<unk>"]
LETTERS = [*(string.ascii_letters + string.digits + ' {}[]":,.-_?!+=#()/*<>|\n')]
VOCABULARY = {word: token for token, word in enumerate([*SPECIAL, *LETTERS])}

TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message['content'] }}{% endfor %}"
    "{% if enable_thinking is defined and not enable_thinking %}/{% endif %}"
)

CONFIG = """
[seer]
plugins = ["divided_rollout"]
engine = "vllm"

[engine.vllm]
model = "model"
dtype = "float32"
kv_cache_bytes = 33_554_432
max_model_tokens = 2048
max_running = 64

[plugin.divided_rollout]
chunk_tokens = 32
"""


def tokenizer():
    """A tokenizer of a token for each character, as its library has it in a file."""
    added = [{"id": token, "content": word, "special": True} for token, word in enumerate(SPECIAL)]
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    begin = {"SpecialToken": {"id": "<bos>", "type_id": 0}}
    text, second = {"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [each | flags for each in added],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Split",
            "pattern": {"Regex": "[\\s\\S]"},
            "behavior": "Isolated",
            "invert": False,
        },
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [begin, text],
            "pair": [begin, text, second],
            "special_tokens": {"<bos>": {"id": "<bos>", "ids": [1], "tokens": ["<bos>"]}},
        },
        "decoder": {"type": "Fuse"},
        "model": {"type": "WordLevel", "vocab": VOCABULARY, "unk_token": "<unk>"},
    }


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """The folder of the server, with its model."""
    found = tmp_path_factory.mktemp("server")
    shutil.copytree(WEIGHTS, found / "model")
    (found / "model/tokenizer.json").write_text(json.dumps(tokenizer()))
    (found / "model/chat_template.jinja").write_text(TEMPLATE)
    settings = found / "model/tokenizer_config.json"
    settings.write_text(json.dumps({**json.loads(settings.read_text()), "chat_template": TEMPLATE}))
    return found


@pytest.fixture(scope="session")
def server(folder):
    """A server: its ``url``, the ``token`` that clients bring, the folder of its ``model``."""
    (folder / "seer.toml").write_text(CONFIG)
    (folder / "token").write_text("a-token-of-tests-that-is-long-enough")
    command = [SEER, "serve", folder / "seer.toml", "--port", "0", "--token-file", folder / "token"]
    command += ["--tool-call-parser", "hermes"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    lines, running, urls = [], threading.Event(), []

    def read():
        for line in process.stderr:
            lines.append(line)
            if found := re.search(r"running on (http://\S+)", line):
                urls.append(found[1])
                running.set()
        running.set()

    reading = threading.Thread(target=read)
    reading.start()
    try:
        assert running.wait(START_S), "the server has not come up"
        assert urls, "".join(lines)
        yield SimpleNamespace(
            url=f"{urls[0]}/v1", token=(folder / "token").read_text(), model=folder / "model", root=urls[0]
        )
    finally:
        process.terminate()
        try:
            process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            process.kill()
        reading.join(PATIENCE_S)


@pytest.fixture(scope="session")
def client(server):
    """OpenAI's client."""
    with openai.OpenAI(base_url=server.url, api_key=server.token, max_retries=0, timeout=PATIENCE_S) as found:
        yield found


@pytest.fixture
def vocabulary():
    """The token of each character."""
    return VOCABULARY
