"""A model's directory is read as transformers reads it, in every layout that tokenizers come in."""

import json
import os
import sys
import threading

import pytest

pytest.importorskip("transformers")
pytest.importorskip("sentencepiece")

from seer_worker.client.fleet import ProcessSettings
from seer_worker.client.tokenizer_reader import TokenizerReader
from seer_worker.tokenizer import ModelTokenizer, has_tokenizer
from seer_worker.tokenizer.library import read

from backends.tests import tokenizer_layouts as layouts
from seer_core.errors import ConfigError, PromptError

pytestmark = pytest.mark.engine  # imports transformers


def auto(directory, trust_remote_code=False):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(directory, trust_remote_code=trust_remote_code)


def readings(tokenizer):
    """All that Seer asks of a tokenizer, of texts and chats of many kinds."""
    for text in layouts.TEXTS:
        yield text, tokenizer.encode(text)
        yield text, tokenizer.encode_part(text)
    for chat in (layouts.CHAT, layouts.LONGER):
        yield chat, tokenizer.encode_chat(chat)
        yield chat, tokenizer.encode_chat(chat, layouts.TOOLS)


def expected(library):
    """Return the same by transformers."""
    for text in layouts.TEXTS:
        for special in (True, False):
            yield text, list(library(text, add_special_tokens=special).input_ids)
    options = {"add_generation_prompt": True, "tokenize": True, "return_dict": False}
    for chat in (layouts.CHAT, layouts.LONGER):
        for tools in ({}, layouts.TOOLS):
            yield chat, list(library.apply_chat_template(chat, **options, **tools))


def require_same(directory, trust_remote_code=False):
    tokenizer = ModelTokenizer(directory, trust_remote_code)
    assert has_tokenizer(directory)
    assert list(readings(tokenizer)) == list(expected(auto(directory, trust_remote_code)))
    return tokenizer.reading


@pytest.mark.parametrize("kind", layouts.MODELS)
@pytest.mark.parametrize("change", layouts.CHANGES)
def test_a_tokenizer_json_and_the_files_beside_it(tmp_path, kind, change):
    layouts.write_bpe(tmp_path, kind, layouts.CHANGES[change])
    assert require_same(tmp_path).backend is not None


@pytest.mark.parametrize("kind", ["qwen2", "qwen3", "gpt2"])
def test_a_vocabulary_with_merges(tmp_path, kind):
    layouts.vocabulary_and_merges(tmp_path, kind)
    require_same(tmp_path)


@pytest.mark.parametrize("kind", ["llama", "mistral", "gemma", "deepseek_v3", "phi3"])
@pytest.mark.parametrize("model", ["bpe", "unigram"])
def test_a_model_of_sentencepiece(tmp_path, kind, model):
    layouts.sentences(tmp_path, kind, model)
    require_same(tmp_path)


@pytest.mark.parametrize("kind", ["deepseek_v3", "kimi_k2", "llama"])
@pytest.mark.parametrize("code", [False, True])
def test_ranks_of_tiktoken(tmp_path, kind, code):
    """Code that comes with the model runs if the user allows it; then its tokenizer is used itself."""
    layouts.tiktoken(tmp_path, kind, code)
    reading = require_same(tmp_path, trust_remote_code=True)
    assert (reading.backend is None) == code


def test_code_of_a_model_does_not_run_unless_it_is_allowed(tmp_path):
    layouts.tiktoken(tmp_path, "kimi_k2")
    (tmp_path / "tokenization_tiny.py").write_text("raise RuntimeError('it runs')")
    with pytest.raises(ConfigError, match="is code that came with the model; to run it, set trust_remote_co"):
        read(tmp_path)
    with pytest.raises(ConfigError, match="it runs"):
        read(tmp_path, trust_remote_code=True)


def test_a_tokenizer_that_refuses_a_text_is_named(tmp_path):
    """Gemma's class needs an unknown token, which this vocabulary lacks: transformers fails as well."""
    layouts.write_bpe(tmp_path, "gemma", classes={"gemma": "GemmaTokenizerFast"})
    with pytest.raises(Exception, match="Unk token"):
        auto(tmp_path)(layouts.TEXTS[2])
    with pytest.raises(PromptError, match=r"refused the text: .*Unk token"):
        ModelTokenizer(tmp_path).encode(layouts.TEXTS[2])


@pytest.mark.parametrize(
    ("generation", "config", "tokenizer", "ends"),
    [
        ({"eos_token_id": 257}, {"eos_token_id": 9}, "<|im_end|>", ["<|im_end|>", 257]),
        ({"eos_token_id": [7, 8]}, {"eos_token_id": 9}, "<|endoftext|>", ["<|endoftext|>", 7, 8]),
        ({}, {"eos_token_id": 9}, "<|im_end|>", ["<|im_end|>"]),
        (None, {"eos_token_id": 9}, "<|im_end|>", ["<|im_end|>", 9]),
        (None, {"eos_token_id": [9, 10]}, None, ["<|endoftext|>", 9, 10]),
        (None, {"eos_token_id": None}, None, ["<|endoftext|>"]),
    ],
)
def test_responses_end_with_the_tokens_with_which_vllm_ends_them(
    tmp_path, generation, config, tokenizer, ends
):
    config_module = pytest.importorskip("vllm.transformers_utils.config")
    sampling = pytest.importorskip("vllm.sampling_params")
    layouts.write_bpe(tmp_path)
    names = json.loads((tmp_path / "tokenizer_config.json").read_text()) | {"eos_token": tokenizer}
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({name: value for name, value in names.items() if value is not None})
    )
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3", "vocab_size": 512} | config))
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    library = auto(tmp_path)
    params = sampling.SamplingParams()
    found = config_module.try_get_generation_config(str(tmp_path), trust_remote_code=False)
    params.update_from_generation_config(found.to_diff_dict(), library.eos_token_id)
    reading = read(tmp_path)
    assert set(reading.end_token_ids) == params.all_stop_token_ids
    assert list(reading.end_token_ids) == sorted(
        each if isinstance(each, int) else library.convert_tokens_to_ids(each) for each in ends
    )
    assert read(tmp_path, textual=False).end_token_ids == tuple(
        each for each in reading.end_token_ids if each in set(reading.end_token_ids) - {library.eos_token_id}
    )


def asked(tmp_path, directory, monkeypatch):
    """A reader in a process that has not imported transformers, as it seems."""
    monkeypatch.delitem(sys.modules, "transformers")
    how = ProcessSettings(log_dir=str(tmp_path / "logs")).launch("test", "", {}, dict(os.environ), None)
    return TokenizerReader(how, directory)


def test_a_process_reads_it_for_one_that_has_not_imported_transformers(tmp_path, monkeypatch):
    directory = tmp_path / "model"
    directory.mkdir()
    layouts.write_bpe(directory, change=layouts.additional_templates)
    here = read(directory)
    reader = asked(tmp_path, directory, monkeypatch)
    found = []
    threads = [threading.Thread(target=lambda: found.append(reader())) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [here, here]
    assert "transformers" not in sys.modules
    (directory / "chat_template.jinja").write_text("{{ 'another' }}")
    assert reader().templates["default"] == "{{ 'another' }}"


def test_a_process_reports_a_tokenizer_that_it_cannot_read(tmp_path, monkeypatch):
    directory = tmp_path / "model"
    directory.mkdir()
    layouts.tiktoken(directory, "kimi_k2")
    with pytest.raises(ConfigError, match="is code that came with the model"):
        asked(tmp_path, directory, monkeypatch)()
