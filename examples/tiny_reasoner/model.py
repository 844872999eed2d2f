"""The model and tokenizer of the ring-hop task, and how they are written to disk."""

import json
import shutil
from pathlib import Path

import task
import torch
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, processors
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

MAX_POSITIONS = 4096
VOCAB_SIZE = (len(task.VOCABULARY) + 31) // 32 * 32

# One turn or many: the contents, in order, after <bos>.  The task's prompts end in '?'.
CHAT_TEMPLATE = "{{ bos_token }}{% for message in messages %} {{ message['content'] }}{% endfor %}"


def build_model(seed: int) -> Qwen3ForCausalLM:
    """Return an untrained Qwen3 of 2.6 million parameters."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=256,
        intermediate_size=640,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=True,
        bos_token_id=task.TOKEN_IDS[task.BOS],
        eos_token_id=task.TOKEN_IDS[task.EOS],
        pad_token_id=task.TOKEN_IDS[task.PAD],
    )
    return Qwen3ForCausalLM(config)


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Return the word-level tokenizer; it splits numbers into digits and adds <bos> itself."""
    core = Tokenizer(models.WordLevel(dict(task.TOKEN_IDS), unk_token=task.UNK))
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Split(Regex(r"\d"), "isolated")]
    )
    core.post_processor = processors.TemplateProcessing(
        single=f"{task.BOS} $A", special_tokens=[(task.BOS, task.TOKEN_IDS[task.BOS])]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token=task.BOS,
        eos_token=task.EOS,
        pad_token=task.PAD,
        unk_token=task.UNK,
        chat_template=CHAT_TEMPLATE,
        model_max_length=MAX_POSITIONS,
        clean_up_tokenization_spaces=False,
    )


def export(model: Qwen3ForCausalLM, folder: Path) -> None:
    """Write weights, configs and tokenizer to a folder, replacing it in one move."""
    fresh, old = folder.with_name(folder.name + ".new"), folder.with_name(folder.name + ".old")
    shutil.rmtree(fresh, ignore_errors=True)
    shutil.rmtree(old, ignore_errors=True)
    model.save_pretrained(fresh)
    ids = task.TOKEN_IDS
    GenerationConfig(
        do_sample=True,
        temperature=1.0,
        bos_token_id=ids[task.BOS],
        eos_token_id=ids[task.EOS],
        pad_token_id=ids[task.PAD],
    ).save_pretrained(fresh)
    build_tokenizer().save_pretrained(fresh)
    # The class name and key that both transformers 4 and 5 read.
    _amend(
        fresh / "tokenizer_config.json",
        tokenizer_class="PreTrainedTokenizerFast",
        chat_template=CHAT_TEMPLATE,
    )
    _amend(fresh / "config.json", rope_theta=model.config.rope_parameters["rope_theta"])
    if folder.exists():
        folder.rename(old)
    fresh.rename(folder)
    shutil.rmtree(old, ignore_errors=True)


def _amend(path: Path, **entries: object) -> None:
    """Set top-level entries of a JSON file."""
    path.write_text(json.dumps(json.loads(path.read_text()) | entries, indent=2) + "\n")
