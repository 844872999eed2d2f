"""Masks of structured outputs depend on the tokens alone, wherever a matcher has been before."""

import json
from threading import Event

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("xgrammar", reason="xgrammar comes with vLLM: `make setup` installs it")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from seer_worker.sampling.grammars import Grammars, grammars_of  # noqa: E402
from tokenizers import Tokenizer, decoders, models, pre_tokenizers  # noqa: E402

from seer_core.model import StructuredOutputs  # noqa: E402
from tests.support.patience import PATIENCE_S  # noqa: E402

VOCAB, EOS = 260, 256  # the model has some rows more than the tokenizer has tokens
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 4}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
FORMS = {
    "schema": StructuredOutputs(json=SCHEMA),
    "schema as text": StructuredOutputs(json=json.dumps(SCHEMA)),
    "object": StructuredOutputs(json_object=True),
    "regex": StructuredOutputs(regex="[a-c]{2,5}(-[0-9]+)?"),
    "choice": StructuredOutputs(choice=('say "no"', "a\\b", "yes\n")),
    "grammar": StructuredOutputs(grammar='root ::= "<" word ">"\nword ::= [a-z]+'),
}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    """A tokenizer whose tokens are bytes, and one that ends."""
    folder = tmp_path_factory.mktemp("bytes")
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({letter: number for number, letter in enumerate(letters)}, []))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    made.add_special_tokens(["<eos>"])
    made.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


@pytest.fixture(scope="module")
def grammars(model_dir):
    return grammars_of(str(model_dir), VOCAB)


def allowed(grammars, form, tokens, request="r"):
    logits = torch.zeros(VOCAB)
    grammars.mask(logits, form, request, tokens, [EOS])
    return (logits == 0).nonzero().flatten().tolist()


GOOD = {
    "schema": ['{"name": "ab", "age": 17}', '{"name":"","age":-3}', '{"name": "abc", "age": 17}'],
    "schema as text": ['{"name": "ab", "age": 17}'],
    "object": ['{"a": [1, {"b": null}]}', "{}", '{"a": [1, 2.5e3, true]}'],
    "regex": ["ab", "abcab-17", "abc"],
    "choice": ['say "no"', "a\\b", "yes\n"],
    "grammar": ["<a>", "<ab>", "<zzzz>"],
}
BAD = {
    "schema": ['{"age": 17, "name": "ab"}', '{"name": "abcde", "age": 1}', '{"name": 1}'],
    "schema as text": ["[]"],
    "object": ["[1]", "1", '{"a": }'],
    "regex": ["a-1", "abcabc", "ab17", "abd"],
    "choice": ["say no", "yes"],
    "grammar": ["<>", "<a", "<A>"],
}


@pytest.fixture(scope="module")
def tokens_of(model_dir):
    tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    return lambda text: tokenizer.encode(text, add_special_tokens=False).ids


def is_allowed(grammars, form, tokens, request):
    """Whether a whole response may be written."""
    return all(
        token in allowed(grammars, form, tokens[:place], request)
        for place, token in enumerate([*tokens, EOS])
    )


@pytest.mark.parametrize("name", FORMS)
def test_texts_of_the_form_can_be_written_and_no_others(grammars, tokens_of, name):
    for text in GOOD[name]:
        assert is_allowed(grammars, FORMS[name], tokens_of(text), "good"), text
    for text in BAD[name]:
        assert not is_allowed(grammars, FORMS[name], tokens_of(text), "bad"), text


@pytest.mark.parametrize("name", FORMS)
@given(places=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 30)), min_size=1, max_size=12))
@settings(max_examples=40, deadline=None)
def test_a_matcher_that_went_elsewhere_gives_the_mask_of_a_new_one(grammars, tokens_of, name, places):
    texts = [tokens_of(text) for text in GOOD[name]]
    for number, place in places:
        prefix = texts[number % len(texts)][:place]
        fresh = f"fresh {number} {place}"
        assert allowed(grammars, FORMS[name], prefix) == allowed(grammars, FORMS[name], prefix, fresh)


def test_a_response_that_is_over_has_no_mask(grammars, tokens_of):
    over = [*tokens_of("ab"), EOS]
    assert allowed(grammars, FORMS["regex"], over) == list(range(VOCAB))


def test_no_more_matchers_are_kept_than_there_is_room_for(model_dir, tokens_of, monkeypatch):
    monkeypatch.setattr("seer_worker.sampling.grammars.MOST_MATCHERS", 2)
    grammars, form, tokens = Grammars(model_dir, VOCAB), FORMS["regex"], tokens_of("ab")
    expected = allowed(grammars, form, tokens)
    for request in ("a", "b", "c", "a"):
        assert allowed(grammars, form, tokens, request) == expected
    assert len(grammars._followed) == 2


@pytest.mark.parametrize(
    "form",
    [
        StructuredOutputs(regex="(a"),
        StructuredOutputs(json="{"),
        StructuredOutputs(json={"type": "nonsense"}),
        StructuredOutputs(grammar="no rule"),
    ],
)
def test_what_is_no_grammar_is_one_sentence(grammars, form):
    with pytest.raises(ValueError, match=r"^structured_outputs is no grammar: [A-Z][^/]*[^.]; correct it$"):
        grammars.compile(form)


def test_a_grammar_that_takes_too_long_is_given_up_once(model_dir, monkeypatch):
    monkeypatch.setattr("seer_worker.sampling.grammars.COMPILE_S", 0.05)
    grammars, compiled, goes_on = Grammars(model_dir, VOCAB), [], Event()

    def compile(wanted, compiler):
        compiled.append(wanted)
        goes_on.wait(PATIENCE_S)

    monkeypatch.setattr("seer_worker.sampling.grammars.compile_grammar", compile)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"takes more than 0\.05 s to compile; simplify it"):
            grammars.compile(FORMS["regex"])
    goes_on.set()
    assert compiled == [FORMS["regex"]]


def test_a_model_s_grammars_are_shared(model_dir, grammars):
    assert grammars_of(str(model_dir), VOCAB) is grammars
    assert isinstance(grammars, Grammars)
    assert grammars.compile(FORMS["regex"]) is grammars.compile(StructuredOutputs(regex=FORMS["regex"].regex))


def test_a_request_with_other_end_tokens_has_a_matcher_of_its_own(grammars):
    form, written = StructuredOutputs(choice=("a",)), [tokens_of_a()]
    for ends in ([EOS], [EOS + 1], [EOS]):
        logits = torch.zeros(VOCAB)
        grammars.mask(logits, form, "one name", written, ends)
        assert (logits == 0).nonzero().flatten().tolist() == ends


def tokens_of_a():
    """Return the token of the letter a: its place among the letters that stand for bytes."""
    return sorted(pre_tokenizers.ByteLevel.alphabet()).index("a")
