"""Sampling in prompts: by whose value, in which range, on which engines."""

import json
import math

import msgspec
import pytest
from seer_host.config_files import RolloutTable
from seer_host.sampling_fields import SamplingChoice
from seer_session.group_checks import problem_of
from seer_session.prompts import make_groups

from seer_core.errors import PromptError
from seer_core.model import PromptGroup, Sampling, StructuredOutputs
from seer_core.model.sampling import CONTROLS
from seer_core.ports.engine import ModelInfo

MODEL = ModelInfo(300, 64, controls=CONTROLS)


class Joining:
    """A tokenizer of one id per character, whose ids of words within a text begin with that of the space."""

    def encode(self, text):
        return [1, *self.encode_part(text)]

    def encode_part(self, text):
        return [ord(character) for character in text.replace(" w", "W")]


def sampling(record, defaults=RolloutTable(), model=MODEL, tokenizer=Joining()):  # noqa: B008, all immutable
    record = {"prompt_token_ids": [5], "n": 1, "max_tokens": 16, **record}
    (group,) = make_groups([record], defaults, model, tokenizer)
    return group.sampling


def test_a_prompt_s_choice_has_the_fields_of_sampling():
    fields = Sampling.__struct_fields__
    assert SamplingChoice.__struct_fields__ == fields
    assert {"temperature", "top_p", "top_k", *CONTROLS} == set(fields)
    assert msgspec.structs.asdict(SamplingChoice()) == dict.fromkeys(fields)


def test_a_prompt_s_own_fields_go_before_those_of_the_config():
    defaults = RolloutTable(stop="a", min_p=0.1, temperature=0.5, logit_bias={3: 1.0})
    assert sampling({}, defaults) == Sampling(0.5, min_p=0.1, stop=("a",), logit_bias={3: 1.0})
    own = {"stop": [], "min_p": 0.0, "logit_bias": {}, "temperature": 1}
    assert sampling(own, defaults) == Sampling()
    assert sampling({"stop": ["b", "c"], "top_k": 4}, defaults).stop == ("b", "c")
    assert sampling({"stop": ""}, defaults).stop == ()


def test_a_bias_may_have_its_tokens_as_json_has_them():
    assert sampling({"logit_bias": {"7": 2}}) == sampling({"logit_bias": {7: 2.0}})
    assert sampling(json.loads(json.dumps({"logit_bias": {7: 2.0}}))).logit_bias == {7: 2.0}


def test_bad_words_are_tokens_at_the_beginning_of_a_text_and_within_it():
    plain, within = (ord("w"), ord("e")), (ord("W"), ord("e"))
    assert sampling({"bad_words": ["we", [9, 8]]}).bad_words == (plain, within, (9, 8))
    assert sampling({"bad_words": ["on"]}).bad_words == ((111, 110),)  # a space would make it longer
    with pytest.raises(PromptError, match="this engine has no tokenizer; give bad_words as token ids"):
        sampling({"bad_words": ["we"]}, tokenizer=None)
    assert sampling({"bad_words": [[9, 8]]}, tokenizer=None).bad_words == ((9, 8),)


@pytest.mark.parametrize(
    ("fields", "fact"),
    [
        ({"min_p": 1.5}, "min_p is 1.5; it must be 0 to 1"),
        ({"repetition_penalty": 0.0}, "repetition_penalty is 0.0; it must be a number above 0"),
        ({"repetition_penalty": math.inf}, "repetition_penalty is inf"),
        ({"presence_penalty": -3.0}, "presence_penalty is -3.0; it must be -2 to 2"),
        ({"frequency_penalty": math.nan}, "frequency_penalty is nan; it must be -2 to 2"),
        ({"logit_bias": {5: 101.0}}, "logit_bias goes beyond -100 to 100"),
        ({"logit_bias": {5: math.nan}}, "logit_bias goes beyond -100 to 100"),
        ({"logit_bias": {300: 1.0}}, "logit_bias names token 300; the vocabulary is 0 to 299"),
        ({"allowed_token_ids": (-1,)}, "allowed_token_ids names token -1"),
        ({"bad_words": ((5, 300),)}, "bad_words names token 300"),
        ({"bad_words": ((),)}, "bad_words has a word without tokens"),
        ({"bad_words": ((5,),) * 1001}, "bad_words are 1,001 token sequences; they may be 1,000"),
        ({"stop_token_ids": (10**30,)}, "stop_token_ids names token 1000000000000000"),
        ({"stop_token_ids": tuple(range(65))}, "stop_token_ids has 65 entries; it may have 64"),
        ({"stop": ("a",) * 65}, "stop has 65 entries; it may have 64"),
        ({"stop": ("",)}, "stop has an empty string"),
        ({"stop": ("a" * 1001,)}, "a stop string has 1,001 characters; it may have 1,000"),
        ({"stop": ("\ud800",)}, "a stop string has half of a character"),
        ({"structured_outputs": StructuredOutputs()}, "structured_outputs has nothing; give one of json"),
        (
            {"structured_outputs": StructuredOutputs(json={}, regex="a")},
            "structured_outputs has json and regex; give one of json",
        ),
        (
            {"structured_outputs": StructuredOutputs(choice=())},
            "structured_outputs has an empty choice",
        ),
        (
            {"structured_outputs": StructuredOutputs(choice=("a", ""))},
            "structured_outputs has an empty choice",
        ),
        ({"min_tokens": -1}, "min_tokens is -1; it must be at least 0"),
        ({"top_logprobs": 21}, "top_logprobs is 21; it must be 0 to 20"),
        ({"prompt_logprobs": -1}, "prompt_logprobs is -1; it must be 0 to 20"),
        ({"min_tokens": 9}, "min_tokens is 9, max_tokens 8; lower min_tokens"),
    ],
)
def test_a_group_made_by_hand_is_held_to_the_ranges(fields, fact):
    group = PromptGroup("a", (1, 2), 2, 8)
    assert problem_of(group, MODEL) is None
    assert problem_of(msgspec.structs.replace(group, sampling=Sampling(**fields)), MODEL).startswith(fact)


@pytest.mark.parametrize("name", [name for name in CONTROLS if name != "include_stop_str_in_output"])
def test_a_control_that_the_engines_do_not_have_is_refused_by_its_name(name):
    values = {"logit_bias": {5: 1.0}, "allowed_token_ids": [5], "bad_words": ["a"], "stop": "a"}
    values |= {"stop_token_ids": [5], "ignore_eos": True, "min_tokens": 3, "top_logprobs": 3}
    values["prompt_logprobs"] = 3
    values |= {"structured_outputs": {"json": {"type": "object"}}}
    record, others = {name: values.get(name, 0.5)}, tuple(each for each in CONTROLS if each != name)
    assert getattr(sampling(record), name)
    with pytest.raises(PromptError, match=f"{name} is not supported by this engine; leave it out"):
        sampling(record, model=msgspec.structs.replace(MODEL, controls=others))


def test_only_fields_that_shape_tokens_set_a_sampling_apart_from_the_model_s_distribution():
    ends = Sampling(
        stop=("a",),
        stop_token_ids=(5,),
        ignore_eos=True,
        include_stop_str_in_output=True,
        top_logprobs=5,
        prompt_logprobs=0,
    )
    assert ends.raw
    assert not ends.changes_logits
    for fields in ({"min_p": 0.1}, {"min_tokens": 1}, {"allowed_token_ids": (5,)}, {"bad_words": ((5,),)}):
        shaped = Sampling(**fields)
        assert shaped.changes_logits
        assert not shaped.raw
    assert (
        Sampling(0.5, min_p=0.1, stop=("a",), top_logprobs=2).described
        == "temperature 0.5, top_p 1.0, top_k 0, min_p 0.1"
    )
    assert Sampling(include_stop_str_in_output=True).controls == ()
    assert sampling(ends.fields) == ends


def test_messages_have_only_what_is_not_usual():
    assert msgspec.json.encode(Sampling()) == b"{}"
    form = StructuredOutputs(json={"type": "object"})
    every = Sampling(
        0.5, structured_outputs=form, logit_bias={5: 1.0}, bad_words=((5, 6),), stop=("a",), ignore_eos=True
    )
    assert msgspec.json.decode(msgspec.json.encode(every), type=Sampling) == every
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(every), type=Sampling) == every
