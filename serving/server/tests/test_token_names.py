"""The words of log-probs, beside vLLM's own functions in this process."""

import random
import warnings
from types import SimpleNamespace

import numpy
import pytest
from seer_server.answers import Answer, Part
from seer_server.parsing import Reading
from seer_server.protocol import ChatRequest, CompletionRequest
from seer_server.token_names import NamesInText, names_of
from seer_worker.tokenizer import ModelTokenizer

from seer_core.model.arrays import PromptLogprobs, TopLogprobs

TOPS = 3


@pytest.fixture
def tokenizers(random_tokenizer, tmp_path):
    """Return a function: the tokenizer of a seed as Seer reads it, and as transformers does for vLLM."""

    def make(seed):
        folder = tmp_path / str(seed)
        folder.mkdir()
        random_tokenizer(seed).save(str(folder / "tokenizer.json"))
        from transformers import PreTrainedTokenizerFast

        settings = {"eos_token": "</s>", "clean_up_tokenization_spaces": False}
        theirs = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), **settings)
        theirs.save_pretrained(folder)
        return ModelTokenizer(folder), theirs

    return make


def some_tokens(made, draw, count):
    """Return random tokens, many of them parts of characters."""
    text = "".join(draw.choices(["a", "é", "😀", "❤", "한", " ka", "<|mark|>"], k=count))
    written = made(text, add_special_tokens=False).input_ids
    return [token if draw.random() < 0.8 else draw.choice(named(made)) for token in written]


def named(made):
    """Return the tokens that both name alike; to vLLM the byte of a space is empty, and here a space."""
    return [token for token in range(len(made)) if made.convert_ids_to_tokens(token) != "<0x20>"]


class Theirs:
    """vLLM's answers to a completion and to a chat."""

    def __init__(self, tokenizer, ids=False):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
            from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
            from vllm.logprobs import create_prompt_logprobs, create_sample_logprobs
            from vllm.v1.engine.logprobs import LogprobsProcessor
            from vllm.v1.outputs import LogprobsLists
        self.tokenizer, self.ids, self.lists = tokenizer, ids, LogprobsLists
        self.processor = LogprobsProcessor(
            tokenizer, create_sample_logprobs(False), create_prompt_logprobs(False), 0.0, TOPS, TOPS
        )
        self.server = SimpleNamespace(
            return_tokens_as_token_ids=ids,
            _get_decoded_token=OpenAIServingChat._get_decoded_token,
        )
        self.server._get_top_logprobs = lambda *given, **more: OpenAIServingChat._get_top_logprobs(
            self.server, *given, **more
        )
        self.completion, self.chat = OpenAIServingCompletion, OpenAIServingChat

    def sample(self, tokens, tops):
        rows = [[token, *[each for each, _ in top]] for token, top in zip(tokens, tops, strict=True)]
        scores = [[-0.5, *[score for _, score in top]] for top in tops]
        lists = self.lists(numpy.array(rows), numpy.array(scores), numpy.ones(len(rows), int))
        self.processor._update_sample_logprobs(lists)
        return self.processor.logprobs

    def of_prompt(self, prompt, tops):
        import torch

        rows = [[token, *[each for each, _ in top]] for token, top in zip(prompt[1:], tops, strict=True)]
        scores = [[-0.5, *[score for _, score in top]] for top in tops]
        ranks = torch.ones(len(rows))
        self.processor._update_prompt_logprobs((torch.tensor(rows), torch.tensor(scores), ranks))
        return self.processor.prompt_logprobs

    def as_completion(self, tokens, logprobs):
        found = self.completion._create_completion_logprobs(
            self.server, tokens, logprobs, TOPS, self.tokenizer, return_as_token_id=self.ids
        )
        return found.model_dump()

    def as_chat(self, tokens, logprobs):
        found = self.chat._create_chat_logprobs(
            self.server, tokens, logprobs, self.tokenizer, TOPS + 1, return_as_token_id=self.ids
        )
        return found.model_dump()["content"]


def part_of(tokens, tops, prompt=None, prompt_logprobs=None):
    flat = [each for top in tops for each in top]
    arrays = TopLogprobs(TOPS, [token for token, _ in flat], [score for _, score in flat])
    return Part(0, "", tokens, [-0.5] * len(tokens), None, prompt, None, arrays, prompt_logprobs)


def tops_of(made, draw, tokens):
    """Return the most probable tokens in each place, which is another than the sampled one."""
    scores, others = [-1.5, -2.5, -3.5], named(made)
    return [
        list(zip(draw.sample([each for each in others if each != token], TOPS), scores, strict=True))
        for token in tokens
    ]


def cut(tokens, tops, draw):
    places = sorted(draw.randrange(len(tokens) + 1) for _ in range(4))
    for start, stop in zip([0, *places], [*places, len(tokens)], strict=True):
        yield part_of(tokens[start:stop], tops[start:stop])


@pytest.mark.parametrize("ids", [False, True], ids=["words", "ids"])
def test_words_bytes_and_offsets_are_vllm_s(tokenizers, ids):
    pytest.importorskip("vllm", reason="vLLM is not installed: `make setup` installs it")
    compared = 0
    for seed in range(3):
        draw, (ours, theirs) = random.Random(seed), tokenizers(seed)
        for _ in range(10):
            tokens = some_tokens(theirs, draw, 12)
            tops = tops_of(theirs, draw, tokens)
            own = Theirs(theirs, ids)
            logprobs = own.sample(tokens, tops)
            whole, content = own.as_completion(tokens, logprobs), own.as_chat(tokens, logprobs)
            fields = {"return_tokens_as_token_ids": ids}
            completion = Answer(CompletionRequest(prompt="a", logprobs=TOPS, **fields), "seer", ours)
            chat = Answer(ChatRequest(messages=[], logprobs=True, **fields), "seer", ours)
            found = [completion._logprobs(part) for part in cut(tokens, tops, draw)]
            for name in ("tokens", "token_logprobs", "text_offset"):
                assert [each for part in found for each in part[name]] == whole[name], name
                compared += len(whole[name])
            mine = [top for part in found for top in part["top_logprobs"]]
            assert [set(each) for each in mine] == [set(each) for each in whole["top_logprobs"]]
            mine = [each for part in cut(tokens, tops, draw) for each in chat.chat_logprobs(part)["content"]]
            for one, other in zip(mine, content, strict=True):
                assert {name: one[name] for name in ("token", "logprob", "bytes")} == {
                    name: other[name] for name in ("token", "logprob", "bytes")
                }
                assert one["top_logprobs"] == other["top_logprobs"][1:]  # vLLM's begin with the sampled one
                compared += 3 * (1 + TOPS)
    assert compared > 1000


def test_words_of_prompts_are_vllm_s(tokenizers):
    pytest.importorskip("vllm", reason="vLLM is not installed: `make setup` installs it")
    for seed in range(3):
        draw, (ours, theirs) = random.Random(seed), tokenizers(seed)
        prompt, tokens = some_tokens(theirs, draw, 12), some_tokens(theirs, draw, 6)
        tops, prompt_tops = tops_of(theirs, draw, tokens), tops_of(theirs, draw, prompt[1:])
        own = Theirs(theirs)
        logprobs = [*own.of_prompt(prompt, prompt_tops), *own.sample(tokens, tops)]
        whole = own.as_completion([*prompt, *tokens], logprobs)
        flat = [each for top in prompt_tops for each in top]
        found = PromptLogprobs(
            [-0.5] * len(prompt_tops),
            TopLogprobs(TOPS, [token for token, _ in flat], [score for _, score in flat]),
        )
        part = part_of(tokens, tops, prompt=prompt, prompt_logprobs=found)
        asked = CompletionRequest(prompt=prompt, echo=True, logprobs=TOPS, prompt_logprobs=TOPS)
        answer = Answer(asked, "seer", ours)
        mine = answer._logprobs(part)
        for name in ("tokens", "token_logprobs", "text_offset"):
            assert mine[name] == whole[name], name
        words = [
            each and [found["decoded_token"] for found in each.values()]
            for each in answer.prompt_logprobs(part)
        ]
        assert words == [
            each and [found.decoded_token for found in each.values()]
            for each in own.processor.prompt_logprobs
        ]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a😀b", ["a", "", "", "", "😀", "b", "<|im_end|>"]),
        ("é", ["", "é", "<|im_end|>"]),
        ("❤한", ["", "", "❤", "", "", "한", "<|im_end|>"]),
        ("👍🏽", ["", "", "", "👍", "", "", "", "🏽", "<|im_end|>"]),
        ("<think>é", ["<think>", "", "é", "<|im_end|>"]),
    ],
)
def test_the_parts_of_a_character_are_empty_and_its_last_token_is_the_whole(byte_model, text, words):
    tokenizer = ModelTokenizer(byte_model)
    tokens = [*tokenizer.encode_part(text), 257]
    part = Part(0, text, tokens, [-0.5] * len(tokens), "stop", None)
    found = Answer(CompletionRequest(prompt="x", logprobs=0), "seer", tokenizer)._logprobs(part)
    assert found["tokens"] == words
    assert found["text_offset"] == [len("".join(words[:place])) for place in range(len(words))]
    for word, start in zip(words[:-1], found["text_offset"], strict=False):
        assert text[start:].startswith(word)
    content = Answer(ChatRequest(messages=[], logprobs=True), "seer", tokenizer).chat_logprobs(part)[
        "content"
    ]
    assert [(each["token"], each["bytes"]) for each in content] == [
        (word, [*word.encode()]) for word in words
    ]


def test_words_go_on_behind_tokens_that_the_client_has(byte_model):
    tokenizer = ModelTokenizer(byte_model)
    tokens = tokenizer.encode_part("a😀b")
    for had in range(len(tokens)):
        answer = Answer(CompletionRequest(prompt="x", logprobs=0), "seer", tokenizer)
        answer.skip(0, tokens[:had], Reading())
        left = tokens[had:]
        found = answer._logprobs(Part(0, "", left, [-0.5] * len(left), None, None))
        assert found["tokens"] == ["a", "", "", "", "😀", "b"][had:]
        assert found["text_offset"] == [0, 1, 1, 1, 1, 2][had:]


def test_without_a_tokenizer_tokens_are_named_by_their_ids():
    words = NamesInText(None)
    assert (words.word(5), words.text(5)) == ("token_id:5", None)


def test_a_tokenizer_without_special_tokens_of_its_own_names_all_by_their_text():
    class Letters:
        def decode(self, token_ids):
            return "".join(map(chr, token_ids))

    assert names_of(Letters()).after(97, [98]) == "a"
