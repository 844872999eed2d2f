"""A server in a thread, on a port of its own; engines are simulated, or played by hand."""

import asyncio
import importlib.util
import json
import random
import threading
from contextlib import ExitStack
from functools import lru_cache, partial
from pathlib import Path

import openai
import pytest
import uvicorn
from seer_host.config_files import make_config
from seer_server import make_app
from seer_session.runtime import Runtime
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from seer_core.plugins.slots import Assembly, Strategies
from seer_core.ports.engine import ChunkOutput
from seer_core.scheduling.scheduler import Policies, Slot
from tests.support.patience import PATIENCE_S

ROOT = Path(__file__).parents[3]
MARKS = ("<tool_call>", "</tool_call>", "<think>", "</think>")
TEMPLATE = """\
{%- if tools %}<|im_start|>tools
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}
{{- message.content }}
{%- for call in message.tool_calls or [] %}<tool_call>{{ call.function.name }}
{%- for name, value in call.function.arguments.items() %} {{ name }}={{ value }}{% endfor %}</tool_call>
{%- endfor %}<|im_end|>
{% endfor %}<|im_start|>assistant
{% if enable_thinking is false %}<think></think>{% endif %}"""
TABLES = {
    "seer": {"plugins": ["divided_rollout", "context_sched"], "engine": "sim"},
    "rollout": {"n": 2, "max_tokens": 200},
    "plugin": {"divided_rollout": {"chunk_tokens": 32}},
    # A request that names no group has one of a random name, so lengths do not depend on that.
    "engine": {"sim": {"lengths": {"mean_tokens": 120.0, "sigma": 0.3, "group_share": 0.0}}},
}


@pytest.fixture(autouse=True)
def slow_machine(monkeypatch):
    """Have forms read for as long as a slow machine takes."""
    monkeypatch.setattr("seer_server.structured_outputs.READ_S", PATIENCE_S)


class Served:
    """An application that a thread serves; ``url`` is where."""

    def __init__(self, app):
        self.server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning", lifespan="on"))
        self.thread = threading.Thread(target=self.server.run)
        self.ready = threading.Event()
        self.clients = ExitStack()
        startup = self.server.startup

        async def started(sockets=None):
            await startup(sockets)
            self.ready.set()

        self.server.startup = started

    def __enter__(self):
        self.thread.start()
        assert self.ready.wait(PATIENCE_S)
        port = self.server.servers[0].sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        return self

    def __exit__(self, *_):
        self.clients.close()
        self.server.should_exit = True
        self.thread.join(PATIENCE_S)
        assert not self.thread.is_alive()

    def client(self, token="none"):
        """Return OpenAI's client, which is closed before the server."""
        client = openai.OpenAI(base_url=f"{self.url}/v1", api_key=token, max_retries=0, timeout=PATIENCE_S)
        return self.clients.enter_context(client)

    def do(self, call):
        """Call where the event loop runs, as an engine does."""
        done = threading.Event()
        loop = self.server.servers[0].get_loop()
        loop.call_soon_threadsafe(lambda: (call(), done.set()))
        assert done.wait(PATIENCE_S)


@pytest.fixture
def expected(config):
    """Return a function: what the library writes for these records, by request."""

    def roll_out(*records):
        async def run():
            async with Runtime.from_config(config) as runtime:
                return await runtime.rollout(runtime.groups(records, iteration=0)).wait()

        result = asyncio.run(asyncio.wait_for(run(), PATIENCE_S))
        return {each.request_id: each for each in result.completions}

    return roll_out


@pytest.fixture(scope="session")
def config(tmp_path_factory):
    return make_config(TABLES, base_dir=tmp_path_factory.mktemp("server"), origin="a test")


@pytest.fixture(scope="session")
def served_class():
    """Return the class of servers in a thread, for fixtures of other scopes."""
    return Served


@pytest.fixture
def serve():
    """Return a function that makes a server of what makes a runtime."""

    def make(make_runtime, **settings):
        return Served(make_app(make_runtime, **settings))

    return make


@pytest.fixture
def serve_sim(serve, config):
    return partial(serve, partial(Runtime.from_config, config))


@pytest.fixture(scope="session")
def output_of():
    """Return a function: the output of a chunk that prefills everything and has these tokens."""

    def make(job, tokens, stopped):
        count = len(tokens)
        return ChunkOutput(
            job_id=job.id,
            token_ids=tokens,
            logprobs=[-0.5] * count,
            stopped=stopped,
            cached_tokens=0,
            prefilled_tokens=len(job.token_ids),
            computed_tokens=len(job.token_ids) + count - 1,
            preemptions=0,
            weight_version=job.weight_version,
            pool_tokens=0,
        )

    return make


@pytest.fixture(scope="session")
def playing():
    """Return a module: that of the engines which tests play by hand."""
    spec = importlib.util.spec_from_file_location("playing", ROOT / "tests/conftest.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def byte_model(tmp_path_factory):
    """Return a directory with a tokenizer of bytes and some marks, and a template for tools."""
    folder = tmp_path_factory.mktemp("bytes")
    alphabet = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    made = Tokenizer(models.BPE(alphabet, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    made.add_tokens([AddedToken(word, normalized=False) for word in MARKS])
    made.save(str(folder / "tokenizer.json"))
    named = {"eos_token": "<|im_end|>", "pad_token": "<|im_end|>"}
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **named}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "config.json").write_text('{"model_type": "llama"}')
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


SPECIAL = ["<s>", "</s>", "<|mark|>"]
SYLLABLES = ["ka", "to", "mi", "é", "😀", "❤", "한", "a", "b", " ", "\n"]


def byte_level(draw):
    """Return a tokenizer of bytes, and of some that are merged, also within a character."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary, merges = {letter: number for number, letter in enumerate(letters)}, []
    common = pre_tokenizers.ByteLevel(add_prefix_space=False)
    for _ in range(40):
        [(text, _), *_] = common.pre_tokenize_str("".join(draw.choices(SYLLABLES[:9], k=2)))
        start = draw.randrange(len(text))
        for stop in range(start + 2, min(len(text), start + 4) + 1):
            if text[start:stop] not in vocabulary:
                vocabulary[text[start:stop]] = len(vocabulary)
                merges.append((text[start : stop - 1], text[stop - 1]))
    made = Tokenizer(models.BPE(vocabulary, merges))
    made.pre_tokenizer, made.decoder = common, decoders.ByteLevel()
    return made


def byte_fallback(draw, marked=True):
    """Return a tokenizer of words with a mark for the space before them, and of bytes for all else."""
    vocabulary = {"<unk>": 0, **{f"<0x{byte:02X}>": byte + 1 for byte in range(256)}}
    for _ in range(20):
        word = draw.choice(["▁", "▁▁", "", ""]) + "".join(draw.choices(SYLLABLES[:9], k=draw.randrange(1, 4)))
        vocabulary.setdefault(word, len(vocabulary))
    for word in ("▁", "▁▁", "\N{REPLACEMENT CHARACTER}"):
        vocabulary.setdefault(word, len(vocabulary))
    made = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    if marked:
        made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    strip = decoders.Strip(content=" ", left=1, right=0)
    marks = decoders.Replace("▁", " ")
    made.decoder = decoders.Sequence([marks, decoders.ByteFallback(), decoders.Fuse(), strip])
    return made


def unmarked_fallback(draw):
    """Return one as older models have, which do not say which mark they have for spaces."""
    return byte_fallback(draw, marked=False)


def word_piece(draw):
    """Return a tokenizer of words and of their further parts."""
    parts = {"".join(draw.choices(SYLLABLES[:9], k=draw.randrange(1, 3))) for _ in range(20)}
    words = ["[UNK]", *sorted(parts), *sorted(f"##{part}" for part in parts), ".", ","]
    made = Tokenizer(models.WordPiece({word: number for number, word in enumerate(words)}, unk_token="[UNK]"))
    made.pre_tokenizer, made.decoder = pre_tokenizers.BertPreTokenizer(), decoders.WordPiece()
    return made


TOKENIZER_KINDS = (byte_level, byte_fallback, unmarked_fallback, word_piece)


@pytest.fixture(scope="session", params=TOKENIZER_KINDS, ids=lambda kind: kind.__name__)
def random_tokenizer(request):
    """Return a function: a tokenizer of one kind, with special tokens, that a seed draws."""

    @lru_cache(maxsize=64)
    def make(seed):
        made = request.param(random.Random(seed))
        made.add_special_tokens(SPECIAL)
        return made

    make.kind = request.param.__name__
    return make


@pytest.fixture
def serve_by_hand(serve, playing):
    """Return a function that makes a server over an engine that is played by hand."""

    def make(engine, tokenizer=None, model=None, **settings):
        def make_runtime(observers):
            slots = tuple(Slot("observer", "server", each) for each in observers)
            fleet = playing.Hands([engine], tokenizer=tokenizer)
            fleet.model = model or fleet.model
            return Runtime(Assembly(fleet, Strategies(Policies(), slots, None), None))

        return serve(make_runtime, **settings)

    return make
