"""Reading prompts: every bad line is named with its file, number and what is wrong with it."""

import math
import re

import pytest
from msgspec.structs import replace
from seer_host.config_files import RolloutTable
from seer_session.group_checks import problem_of
from seer_session.prompts import make_groups, read_prompts

from seer_core.errors import ConfigError, PromptError
from seer_core.model import PromptGroup, Sampling, request_seed
from seer_core.ports.engine import ModelInfo

MODEL = ModelInfo(vocab_size=300, max_model_tokens=64)
DEFAULTS = RolloutTable(n=2, max_tokens=16)


class Letters:
    """A tokenizer of one id per character."""

    def encode(self, text):
        return [ord(character) for character in text]

    def encode_chat(self, messages, template_kwargs=None):
        text = "".join(f"{message['role']}:{message['content']}" for message in messages)
        return self.encode(text + (template_kwargs or {}).get("sign", ">"))

    def decode(self, token_ids):
        return "".join(map(chr, token_ids))


def read(path, *, tokenizer=None, defaults=DEFAULTS, **options):
    return read_prompts(path, defaults, MODEL, tokenizer or Letters(), **options)


def complaint(path, **options):
    with pytest.raises(PromptError) as caught:
        read(path, **options)
    return str(caught.value)


def test_each_way_to_give_a_prompt_is_read(write_prompts):
    path = write_prompts(
        {"prompt": "ab"},
        {"prompt_token_ids": [1, 2, 3]},
        {"messages": [{"role": "user", "content": "hi"}]},
        {"messages": [{"role": "user", "content": "hi"}], "chat_template_kwargs": {"sign": "!"}},
    )
    groups = read(path).groups
    assert [group.prompt_token_ids for group in groups] == [
        (97, 98),
        (1, 2, 3),
        tuple(map(ord, "user:hi>")),
        tuple(map(ord, "user:hi!")),
    ]


def test_a_line_s_own_values_win_over_the_defaults(write_prompts):
    given = {
        "prompt": "a",
        "group_id": "mine",
        "n": 5,
        "max_tokens": 7,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 4,
        "seed": 11,
        "metadata": {"answer": [42]},
    }
    path = write_prompts({"prompt": "a"}, given)
    first, second = read(path).groups
    assert (first.n, first.max_tokens, first.sampling) == (2, 16, Sampling())
    assert second == PromptGroup("mine", (97,), 5, 7, Sampling(0.5, 0.9, 4), 11, {"answer": [42]})


def test_seeds_follow_from_the_run_s_seed_and_the_group_id(write_prompts):
    path = write_prompts({"prompt": "a", "group_id": "x"}, {"prompt": "a", "group_id": "y"})
    seeds = [group.seed for group in read(path, seed=1).groups]
    assert len(set(seeds)) == 2
    assert [group.seed for group in read(path, seed=1).groups] == seeds
    assert not set(seeds) & {group.seed for group in read(path, seed=2).groups}


def test_another_iteration_has_other_seeds_but_for_those_that_lines_give(write_prompts):
    path = write_prompts({"prompt": "a"}, {"prompt": "b", "group_id": "mine"}, {"prompt": "c", "seed": 9})
    rounds = [read(path, iteration=number).groups for number in (0, 1, 11)]
    assert len({tuple(group.id for group in groups) for groups in rounds}) == 1
    assert len({group.seed for groups in rounds for group in groups[:2]}) == 6
    assert {groups[2].seed for groups in rounds} == {9}
    assert read(path).groups == rounds[0]


def test_a_line_may_give_the_seed_of_each_response(write_prompts):
    path = write_prompts({"prompt": "a", "seeds": [5, 5, 9], "n": 3}, {"prompt": "a"})
    first, second = read(path, iteration=4).groups
    assert [first.seed_of(index) for index in range(3)] == [5, 5, 9]
    assert first == read(path, seed=1).groups[0]
    assert [second.seed_of(index) for index in range(2)] == [request_seed(second.seed, i) for i in range(2)]


def test_the_prompt_itself_names_a_group_wherever_its_line_stands(write_prompts):
    lines = [{"prompt": "a"}, {"prompt": "b"}, {"prompt": "c", "n": 3, "metadata": {"answer": 1}}]
    first = read(write_prompts(*lines)).groups
    for group in first:
        assert re.fullmatch("[0-9a-f]{12}", group.id)
    assert len({group.id for group in first}) == 3
    # What has finished is left out, the rest stands in another order, in other words for the same tokens.
    rest = read(write_prompts({"n": 3, "prompt_token_ids": [99]}, lines[1], name="rest.jsonl")).groups
    assert [(group.id, group.seed) for group in rest] == [
        (first[2].id, first[2].seed),
        (first[1].id, first[1].seed),
    ]


def test_equal_prompts_are_numbered(write_prompts):
    same = {"prompt": "a"}
    groups = read(write_prompts(same, {"prompt": "b"}, same, {**same, "group_id": "mine"}, same)).groups
    name = groups[0].id
    assert [group.id for group in groups] == [name, groups[1].id, f"{name}-2", "mine", f"{name}-3"]
    assert len({group.seed for group in groups}) == 5
    copied = read(write_prompts(same, {"prompt": "c", "group_id": name}), skip_bad=True)
    assert copied.skipped[0].reason == f"group_id '{name}' is already used in line 1"


def test_blank_lines_and_windows_line_ends_are_no_matter(write_prompts):
    path = write_prompts('{"prompt": "a"}\r', "", "  ", '{"prompt": "b"}')
    assert [group.prompt_token_ids for group in read(path).groups] == [(97,), (98,)]


def test_a_byte_order_mark_is_no_matter(write_prompts):
    with_mark = read(write_prompts(b'\xef\xbb\xbf{"prompt": "a"}'))
    assert with_mark.groups == read(write_prompts({"prompt": "a"})).groups


@pytest.mark.parametrize(
    ("line", "fact"),
    [
        ('{"prompt": "a"', "not valid JSON"),
        ("prompt", "not valid JSON"),
        ('{"prompt": "\\ud800"}', "not valid JSON"),
        ('{"metadata": {"a": ' + "[" * 5000, "not valid JSON"),
        ('["a"]', "expected `object`, got `array`"),
        (b'{"prompt": "\xff"}', "not UTF-8 at byte 12"),
        ({"prompt": ""}, "the prompt is empty"),
        ({"prompt": " \n"}, "the prompt is empty"),
        ({"prompt_token_ids": []}, "the prompt is empty"),
        ({"prompt": "a", "chat_template_kwargs": {"sign": "!"}}, "goes with messages; leave it out"),
        ({"messages": []}, "the prompt is empty"),
        ({"messages": [{"content": "hi"}]}, "the chat template refused the messages: 'role'"),
        ({}, "exactly one of prompt, prompt_token_ids and messages; got none"),
        (
            {"prompt": "a", "messages": []},
            "exactly one of prompt, prompt_token_ids and messages; got prompt and messages",
        ),
        ({"prompt": "a" * 64}, "the prompt has 64 tokens, the model takes 64 with the response"),
        (
            {"prompt": "a" * 60},
            "prompt (60) and max_tokens (16) exceed the model's 64 tokens; lower max_tokens to 4",
        ),
        ({"prompt": "a", "max_tokens": 64}, "lower max_tokens to 63"),
        ({"prompt_token_ids": [1, 300]}, "token id 300 is outside the vocabulary, 0 to 299"),
        ({"prompt_token_ids": [-1]}, "token id -1 is outside the vocabulary"),
        ({"prompt_token_ids": [10**30]}, "token id"),
        ({"prompt_token_ids": ["1"]}, "prompt_token_ids[0]: expected `int`, got `str`"),
        ({"prompt": "a", "n": 0}, "n: expected `int` >= 1"),
        ({"prompt": "a", "n": "2"}, "n: expected `int | null`, got `str`"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens: expected `int` >= 1"),
        ({"prompt": "a", "temperature": -0.1}, "temperature: expected `float` >= 0.0"),
        ({"prompt": "a", "top_p": 0}, "top_p: expected `float` > 0.0"),
        ({"prompt": "a", "seed": -1}, "seed: expected `int` >= 0"),
        ({"prompt": "a", "seeds": []}, "seeds: expected `array` of length >= 1"),
        ({"prompt": "a", "seeds": [1]}, "it gives 1 seeds; give one for each of 2 responses"),
        ({"prompt": "a", "seeds": [1, 2], "seed": 1}, "give seed or seeds, and not both"),
        ({"prompt": "a", "n": 2**64}, "n: expected `int` <= 65536"),
        ({"prompt": "a", "top_k": 2**64}, "top_k: expected `int` <= 2147483647"),
        ({"prompt": "a", "top_k": -1}, "top_k: expected `int` >= 0"),
        ('{"prompt": "a", "temperature": 1e999}', "number out of range"),
        ({"prompt": "a", "max_tokens": 10**4000}, "and max_tokens (1000"),
        ({"prompt": "a", "group_id": ""}, "group_id is empty; leave it out, or name the group"),
        (
            {"prompt": "a", "group_id": "\x1b[2J"},
            r"group_id '\x1b[2J' holds a character that cannot be printed",
        ),
        ({"prompt": "a", "group_id": "two\nlines"}, r"group_id 'two\nlines' holds a character"),
        ({"prompt": "a", "group_id": "x" * 20_000}, "group_id has 20,000 characters; it may have 200"),
        ({"prompt": "a", "\x1b[31mred": 1}, r"unknown field `\x1b[31mred`"),
        ({"prompt": "a", "\n".join("xy" * 100_000): 1}, r"unknown field `x\ny\nx"),
        ({"promt": "a"}, "unknown field `promt`; did you mean 'prompt'?"),
        ({"prompt": "a", "max_new_tokens": 4}, "unknown field `max_new_tokens`; did you mean 'max_tokens'?"),
        ({"prompt": "a", "group_id": "first"}, "group_id 'first' is already used in line 1"),
    ],
)
def test_a_bad_line_is_named_with_its_file_number_and_fault(write_prompts, line, fact):
    path = write_prompts({"prompt": "a", "group_id": "first"}, line, {"prompt": "b"})
    message = complaint(path)
    assert message.startswith(f"{path}:2: ")
    assert fact in message
    assert message.endswith("Mend them, or leave them out with --skip-bad")
    assert message.replace("\n", " ").isprintable()
    assert len(message) < 1000

    rest = read(path, skip_bad=True)
    assert [group.prompt_token_ids for group in rest.groups] == [(97,), (98,)]
    assert [bad.line for bad in rest.skipped] == [2]
    assert fact in rest.skipped[0].reason


def test_all_bad_lines_are_named_the_first_ten_in_full(write_prompts):
    message = complaint(write_prompts(*[{"n": number} for number in range(1, 13)]))
    assert [f":{number}: " in message for number in (1, 10, 11)] == [True, True, False]
    assert "... and 2 more" in message


def test_a_text_that_the_tokenizer_cannot_take_is_the_error_of_its_prompt():
    class Utf8(Letters):
        def encode(self, text):
            return list(text.encode())

    match = r"prompt 2: the tokenizer refused the prompt: 'utf-8' codec can't encode character '\\ud800'"
    with pytest.raises(PromptError, match=match):
        make_groups([{"prompt": "a"}, {"prompt": "\ud800"}], DEFAULTS, MODEL, Utf8())


def test_text_prompts_need_a_tokenizer(write_prompts):
    path = write_prompts({"prompt": "a"}, {"messages": [{"role": "user", "content": "b"}]})
    with pytest.raises(PromptError, match="no tokenizer, so 'prompt' cannot be read; give prompt_token_ids"):
        read_prompts(path, DEFAULTS, MODEL, None)


@pytest.mark.parametrize("content", [(), ("",), ("", " ")])
def test_an_empty_file_is_named(write_prompts, content):
    path = write_prompts(*content)
    assert complaint(path) == f"{path}: nothing to roll out: it holds no line"


def test_a_file_of_bad_lines_only_has_nothing_to_roll_out(write_prompts):
    path = write_prompts({"n": 1}, {"prompt": ""})
    message = complaint(path, skip_bad=True)
    assert message.startswith(
        f"{path}: nothing to roll out: all 2 lines are bad, the first: give exactly one"
    )


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    for path in (tmp_path / "none.jsonl", tmp_path):
        assert complaint(path).startswith(f"cannot read {path}: ")


def test_a_file_in_another_encoding_is_named(write_prompts):
    path = write_prompts('{"prompt": "a"}'.encode("utf-16"))
    assert f"{path}:1: not UTF-8 at byte 0" in complaint(path)


def test_a_default_beyond_the_model_s_length_is_the_config_s_fault(write_prompts):
    path = write_prompts({"prompt": "a"}, {"prompt": "b"})
    with pytest.raises(ConfigError) as caught:
        read(path, defaults=RolloutTable(max_tokens=64), skip_bad=True)
    assert str(caught.value) == (
        "[rollout].max_tokens is 64, but the model takes 64 tokens, prompt included; lower it"
    )
    assert read(write_prompts({"prompt": "a", "max_tokens": 4}), defaults=RolloutTable(max_tokens=64)).groups


def test_records_of_a_script_are_held_to_the_same(write_prompts):
    groups = make_groups([{"prompt": "a"}, {"prompt": "b", "n": 3}], DEFAULTS, MODEL, Letters())
    path = write_prompts({"prompt": "a"}, {"prompt": "b", "n": 3})
    assert groups == read(path).groups
    for record, fact in [
        ({"prompt": "a", "n": 0}, "prompt 2: n: expected `int` >= 1"),
        ({"promt": "a"}, "prompt 2: object contains unknown field `promt`; did you mean 'prompt'?"),
        ({"prompt": ""}, "prompt 2: the prompt is empty"),
        ({"prompt": "a", "temperature": math.nan}, "prompt 2: temperature: expected `float` >= 0.0"),
        (
            {"prompt": "a", "temperature": math.inf},
            "prompt 2: temperature: expected `float` <= 1e+100",
        ),
    ]:
        with pytest.raises(PromptError) as caught:
            make_groups([{"prompt": "a"}, record], DEFAULTS, MODEL, Letters())
        assert str(caught.value) == fact


@pytest.mark.parametrize(
    ("change", "fact"),
    [
        ({"id": "\x07"}, "group_id"),
        ({"n": 10**5000}, "n is a value of type int that is too large to show; a group may have 65,536"),
        ({"sampling": Sampling(temperature=math.nan)}, "temperature is nan"),
        ({"sampling": Sampling(temperature=-1)}, "temperature is -1"),
        ({"sampling": Sampling(top_p=0)}, "top_p is 0"),
        ({"sampling": Sampling(top_k=2**64)}, "top_k is 18446744073709551616"),
        ({"seed": 2**63}, "seed is 9223372036854775808"),
        ({"seeds": (1, 2**63)}, "seed is 9223372036854775808"),
        ({"seeds": (1, 2, 3)}, "it gives 3 seeds; give one for each of 2 responses"),
        ({"attachments": {"image": "a"}}, "attachments are not supported by this engine"),
    ],
)
def test_a_group_made_by_hand_is_held_to_the_same_ranges(change, fact):
    group = PromptGroup("a", (1, 2), 2, 8)
    assert problem_of(group, MODEL) is None
    assert fact in problem_of(replace(group, **change), MODEL)


def test_a_temperature_that_the_engine_does_not_take_is_refused():
    limited = replace(MODEL, max_temperature=2.0)
    group = PromptGroup("a", (1, 2), 2, 8, Sampling(temperature=2.0))
    assert problem_of(group, limited) is None
    hotter = replace(group, sampling=Sampling(temperature=2.5))
    assert problem_of(hotter, limited) == "temperature is 2.5; this engine takes 2 at most"
    assert problem_of(hotter, MODEL) is None


def test_a_long_text_is_refused_before_all_of_it_is_encoded(tmp_path):
    encoded = []

    class Words:
        def encode(self, text):
            encoded.append(len(text))
            return [5] * len(text.split())

        def encode_chat(self, messages):
            return self.encode(" ".join(each["content"] for each in messages))

    text, small = "ab " * 1_000_000, RolloutTable(n=1, max_tokens=8)
    for record in ({"prompt": text}, {"messages": [{"role": "user", "content": text}]}):
        with pytest.raises(PromptError, match=r"3,000,000 characters, .* more than the 100 tokens"):
            make_groups([record], small, ModelInfo(1000, 100), Words())
    assert max(encoded) < 10_000
    spaces = " " * 100_000 + "a"  # few tokens, however long it is
    [group] = make_groups([{"prompt": spaces}], small, ModelInfo(1000, 100), Words())
    assert group.prompt_token_ids == (5,)
