"""Tiny tokenizers in the layouts in which models come, by name: ``write(name, directory)`` writes one."""

import base64
import io
import json

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

TEXTS = [
    "How far is the moon? Let me think about the sum of two numbers.  What is 2 + 2?\n\nAnswer: 42",
    " leading and trailing  spaces \n",
    "Grüße 世界 😀 \u0000 \ud7ff \u2028 x",
    "call <tool_call> now <|obs|> and <think>ok</think><|im_end|></s><s>",
]
CHAT = [{"role": "user", "content": " How far is the moon? "}]
LONGER = [*CHAT, {"role": "assistant", "content": "384,400 km"}, {"role": "user", "content": "And the sun?"}]
TOOLS = {"tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}]}

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
CORPUS = TEXTS[:3] + ["The quick brown fox jumps over the lazy dog. def f(x):\n    return x * 2\n"] * 30
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]

REMOTE_CODE = '''
import base64
from pathlib import Path
from transformers import PreTrainedTokenizer

class TinyTokenizer(PreTrainedTokenizer):
    """Bytes, and pairs of them; written in Python."""
    vocab_files_names = {"vocab_file": "tiktoken.model"}

    def __init__(self, vocab_file, **options):
        lines = Path(vocab_file).read_text().split()
        self.ranks = {base64.b64decode(t).decode("latin-1"): int(n) for t, n in zip(lines[::2], lines[1::2])}
        self.words = {n: t for t, n in self.ranks.items()}
        super().__init__(**options)

    @property
    def vocab_size(self):
        return len(self.ranks)

    def get_vocab(self):
        return {**self.ranks, **self.added_tokens_encoder}

    def _tokenize(self, text):
        return list(text.encode().decode("latin-1"))

    def _convert_token_to_id(self, token):
        return self.ranks[token]

    def _convert_id_to_token(self, number):
        return self.words[number]

    def convert_tokens_to_string(self, tokens):
        return "".join(tokens).encode("latin-1").decode("utf-8", "replace")
'''


def bpe(add_prefix_space=False):
    """Return a byte-level BPE with three special tokens and two others that were added."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.add_tokens(["<think>", "</think>"])
    return tokenizer


def sentencepiece_model(kind):
    """Return a model of the library sentencepiece."""
    import sentencepiece

    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([line for text in CORPUS for line in text.splitlines()]),
        model_writer=model,
        vocab_size=330,
        model_type=kind,
        byte_fallback=True,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    return model.getvalue()


def after_two_tokens(json_file, config, directory):
    json_file["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [
            {"SpecialToken": {"id": "<|im_start|>", "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}},
            {"SpecialToken": {"id": "<|im_end|>", "type_id": 0}},
        ],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {
            name: {
                "id": name,
                "ids": [next(a["id"] for a in json_file["added_tokens"] if a["content"] == name)],
            }
            | {"tokens": [name]}
            for name in SPECIAL[1:]
        },
    }


def truncated(json_file, config, directory):
    json_file["truncation"] = {
        "direction": "Right",
        "max_length": 16,
        "strategy": "LongestFirst",
        "stride": 0,
    }


def padded(json_file, config, directory):
    json_file["padding"] = {
        "strategy": {"Fixed": 64},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 3,
        "pad_type_id": 0,
        "pad_token": "<|endoftext|>",
    }


def in_special_tokens_map(json_file, config, directory):
    named = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    (directory / "special_tokens_map.json").write_text(json.dumps(named))
    del config["eos_token"]
    config["chat_template"] = "{{ bos_token }}" + CHATML


def in_added_tokens(json_file, config, directory):
    number = 1 + max(each["id"] for each in json_file["added_tokens"])
    (directory / "added_tokens.json").write_text(json.dumps({"<tool_call>": number}))


def in_added_tokens_decoder(json_file, config, directory):
    number = 1 + max(each["id"] for each in json_file["added_tokens"])
    flags = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": False}
    config["added_tokens_decoder"] = {
        str(number): {"content": "<tool_call>", **flags},
        str(number + 1): {"content": "<|obs|>", **flags, "special": True},
    }


def in_additional_special_tokens(json_file, config, directory):
    config["additional_special_tokens"] = ["<tool_call>", "<|obs|>"]


def named_token_that_is_lacking(json_file, config, directory):
    config["eos_token"] = "</s>"
    config["bos_token"] = {"__type": "AddedToken", "content": "<s>", "special": True}


def named_templates_in_a_list(json_file, config, directory):
    tools = "TOOLS {{ tools | tojson }} " + CHATML
    config["chat_template"] = [
        {"name": "default", "template": CHATML},
        {"name": "tool_use", "template": tools},
    ]


def template_file(json_file, config, directory):
    (directory / "chat_template.jinja").write_text("FILE " + config["chat_template"])


def additional_templates(json_file, config, directory):
    template_file(json_file, config, directory)
    del config["chat_template"]
    (directory / "additional_chat_templates").mkdir()
    tools = "TOOLS {{ tools | tojson }} " + CHATML
    (directory / "additional_chat_templates" / "tool_use.jinja").write_text(tools)


def adding_bos(json_file, config, directory):
    config |= {"bos_token": "<|im_start|>", "add_bos_token": True}


def with_model_specific_tokens(json_file, config, directory):
    config["extra_special_tokens"] = {"image_token": "<|im_end|>"}
    config["chat_template"] = "{{ image_token }}" + CHATML


CHANGES = {
    "plain": None,
    "truncated": truncated,
    "padded": padded,
    "after two tokens": after_two_tokens,
    "special_tokens_map.json": in_special_tokens_map,
    "added_tokens.json": in_added_tokens,
    "added_tokens_decoder": in_added_tokens_decoder,
    "additional_special_tokens": in_additional_special_tokens,
    "a named token that is lacking": named_token_that_is_lacking,
    "named templates in a list": named_templates_in_a_list,
    "chat_template.jinja": template_file,
    "additional_chat_templates": additional_templates,
    "add_bos_token": adding_bos,
    "extra_special_tokens": with_model_specific_tokens,
}
MODELS = {
    "qwen2": "Qwen2TokenizerFast",
    "qwen3": "Qwen2Tokenizer",
    "llama": "PreTrainedTokenizerFast",
    "llama4": "LlamaTokenizerFast",
    "deepseek_v3": "LlamaTokenizerFast",
    "gpt2": "GPT2TokenizerFast",
    "mistral": "LlamaTokenizerFast",
    "phi3": "LlamaTokenizer",
}
"""Kinds of models, and the class that their checkpoints name."""


def write_bpe(directory, kind="qwen3", change=None, classes=MODELS):
    """Write a ``tokenizer.json`` and what goes with it."""
    json_file = json.loads(bpe().to_str())
    config = {
        "tokenizer_class": classes[kind],
        "eos_token": "<|endoftext|>",
        "pad_token": "<|endoftext|>",
        "chat_template": CHATML,
    }
    if change is not None:
        change(json_file, config, directory)
    (directory / "tokenizer.json").write_text(json.dumps(json_file, ensure_ascii=False))
    write_configs(directory, kind, config)


def write_configs(directory, kind, tokenizer):
    (directory / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    config = {"model_type": kind, "vocab_size": 512, "eos_token_id": 5}
    (directory / "config.json").write_text(json.dumps(config))


def vocabulary_and_merges(directory, kind="qwen2"):
    bpe().model.save(str(directory))
    names = {"tokenizer_class": MODELS[kind], "eos_token": "<|endoftext|>", "chat_template": CHATML}
    write_configs(directory, kind, {**names, "additional_special_tokens": SPECIAL[1:]})


def sentences(directory, kind="llama", model="bpe"):
    (directory / "tokenizer.model").write_bytes(sentencepiece_model(model))
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "chat_template": CHATML}
    write_configs(directory, kind, {"tokenizer_class": "LlamaTokenizer", **names})


def tiktoken(directory, kind="deepseek_v3", code=True):
    """As Moonlight and Kimi K2 come."""
    pairs = [bytes([number]) for number in range(256)] + [b"he", b"th", b" th", b"the", b" the"]
    lines = [f"{base64.b64encode(each).decode()} {rank}" for rank, each in enumerate(pairs)]
    (directory / "tiktoken.model").write_text("\n".join(lines) + "\n")
    config = {"tokenizer_class": "TikTokenTokenizer", "eos_token": "[EOS]", "bos_token": "[BOS]"}
    flags = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": True}
    names = {"261": "[BOS]", "262": "[EOS]", "263": "<|im_start|>", "264": "<|im_end|>"}
    config["added_tokens_decoder"] = {n: {"content": name, **flags} for n, name in names.items()}
    config["chat_template"] = CHATML
    if code:
        (directory / "tokenization_tiny.py").write_text(REMOTE_CODE)
        config["auto_map"] = {"AutoTokenizer": ["tokenization_tiny.TinyTokenizer", None]}
    write_configs(directory, kind, config)
