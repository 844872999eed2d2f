"""TRL's tools and environments through Seer's rollouts, against TRL's own loop on the same turns."""

import copy
from itertools import cycle

import pytest
import torch
from seer_session import Session, load_config
from seer_trl import SeerRollout

from seer_core.errors import ConfigError, EngineError, PromptError
from tests.support.raising import ERRORS, class_of, raise_one

pytestmark = pytest.mark.filterwarnings("ignore")  # TRL imports what it finds, vLLM too, which warns of much

TEMPLATE = """
{%- for message in messages %}
{%- if message.role == 'tool' %} 9 {{ message.name }} {{ message.content }}
{%- elif message.tool_calls %} 10 {{ message.content }}
{%- for call in message.tool_calls %} {{ call.function.name }} {{ call.function.arguments }}
{%- endfor %}
{%- else %} 7 {{ message.content }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %} 8{% endif %}"""

EXACT = {"vllm_importance_sampling_correction": False, "max_completion_length": 40}


class Register:
    """An environment of TRL's, which keeps a sum."""

    def reset(self, **_):
        self.total = 0

    def add(self, a: int, b: int) -> str:
        """Add two numbers to the sum.

        Args:
            a: The one.
            b: The other.
        """
        self.total += a + b
        return str(self.total % 500)

    def get_reward(self):
        return float(self.total % 2)


def add(a: int, b: int) -> str:
    """Add two numbers, of which the second is even.

    Args:
        a: The one.
        b: The other.
    """
    if b % 2:
        raise ValueError("11 12")
    return str((a + b) % 500)


async def subtract(a: int, b: int) -> str:
    """Subtract a number from another, which is even.

    Args:
        a: The other.
        b: The one.
    """
    if a % 2:
        raise ValueError("13")
    return str(abs(a - b))


@pytest.fixture
def calling_tokenizer(tokenizer):
    """Return a tokenizer that finds tool calls in turns: what is called follows from the first number."""

    class Calling(type(tokenizer)):
        def parse_response(self, response, schema=None, *, prefix=None, tools=None):
            assert prefix
            first, last = response[0], response[-1]
            message = {"role": "assistant", "content": self.decode(response)}
            name = ("add", "add", "subtract", "divide", None)[first % 5]
            if name is not None:
                function = {"name": name, "arguments": {"a": first, "b": last}}
                message["tool_calls"] = [{"type": "function", "function": function}] * (1 + last % 2)
            return message

    made = copy.deepcopy(tokenizer)
    made.__class__ = Calling
    made.chat_template, made.response_template = TEMPLATE, {}
    return made


@pytest.fixture
def make_tool_trainer(calling_tokenizer, make_args, make_model):
    """Return a function that makes a trainer with tools or environments."""
    from datasets import Dataset
    from trl import GRPOTrainer

    def make(rollout, tools, **settings):
        def reward(completions, **_):
            return [float(len(messages)) for messages in completions]

        prompts = [[{"role": "user", "content": f"{number} 5"}] for number in range(3, 27)]
        return GRPOTrainer(
            model=make_model(),
            processing_class=calling_tokenizer,
            train_dataset=Dataset.from_dict({"prompt": prompts}),
            reward_funcs=reward,
            rollout_func=rollout,
            args=make_args(**{**EXACT, **settings}),
            **tools,
        )

    return make


def recording(trainer):
    """Keep what each generation of a trainer gives it."""
    generate, outputs = trainer._generate, []

    def recorded(prompts):
        outputs.append(generate(prompts))
        return outputs[-1]

    trainer._generate = recorded
    return outputs


def turns_of(outputs):
    """Return the turns in what a trainer generated: the first ones by row, and others by what is before."""
    first, others = [], {}
    for prompts, completions, masks, *_ in outputs:
        found = []
        for prompt, tokens, mask in zip(prompts, completions, masks, strict=True):
            begin = 0
            while begin < len(tokens):
                end = begin + [*mask[begin:], 0].index(0)
                if begin == 0:
                    found.append(tokens[:end])
                elif end > begin:
                    others[tuple(prompt + tokens[:begin])] = tokens[begin:end]
                begin = end + [*mask[end:], 1].index(1)
        first.append(found)
    return first, others


def trained(trainer):
    """Return the figures and the weights that must be the same, bit for bit."""
    logs = [
        {key: value for key, value in log.items() if "time" not in key and not key.startswith("train_")}
        for log in trainer.state.log_history
    ]
    weights = {name: tensor.tolist() for name, tensor in trainer.model.state_dict().items()}
    return logs, weights


@pytest.mark.parametrize(
    ("tools", "settings"),
    [
        ({"environment_factory": Register}, {}),
        ({"tools": [add, subtract]}, {}),
        ({"environment_factory": Register}, {"max_tool_calling_iterations": 1}),
        ({"environment_factory": Register}, {"max_completion_length": 14}),
    ],
)
def test_on_the_same_turns_trl_s_own_loop_trains_the_same_weights(config, make_tool_trainer, tools, settings):
    with Session(config) as session:
        seer = make_tool_trainer(SeerRollout(session), tools, **settings)
        outputs = recording(seer)
        seer.train()
        summary = session.result.summary
    own = make_tool_trainer(None, tools, **settings)
    first, others = turns_of(outputs)
    batches = iter(first)

    def scripted(prompt_ids, images, fields, num_generations, **_):
        if num_generations > 1:
            return [list(turn) for turn in next(batches)], None
        return [list(others.get(tuple(ids), ())) for ids in prompt_ids], None

    own._generate_single_turn = scripted
    expected = recording(own)
    own.train()
    assert len(outputs) == len(expected) == 2
    for output, other in zip(outputs, expected, strict=True):
        prompts, completions, masks, messages = output[:4]
        assert (prompts, completions, masks, messages) == other[:4]
        assert any(0 in mask for mask in masks)
    assert trained(seer) == trained(own)
    assert summary.turns > 12
    assert summary.environment_tokens > 0


def test_scheduling_does_not_change_what_is_learnt_with_tools(config, other_config, make_tool_trainer):
    text = other_config.read_text("utf-8")
    other_config.write_text(text.replace("[engine.sim]", "[engine.sim]\nvocab_size = 512", 1), "utf-8")
    found = []
    for path in (config, other_config):
        with Session(path) as session:
            trainer = make_tool_trainer(SeerRollout(session), {"environment_factory": Register})
            trainer.train()
            found.append((trained(trainer), session.result.summary.chunks))
    assert found[0][0] == found[1][0]
    assert found[0][1] > found[1][1]


def test_the_engines_logprobs_weigh_the_model_s_tokens_alone(config, make_tool_trainer):
    with Session(config) as session:
        rollout = SeerRollout(session)
        trainer = make_tool_trainer(
            rollout, {"environment_factory": Register}, vllm_importance_sampling_correction=True, max_steps=1
        )
        outputs = recording(trainer)
        trainer.train()
    [(_, completions, masks, _, logprobs, *_)] = outputs
    for tokens, mask, values in zip(completions, masks, logprobs, strict=True):
        assert len(tokens) == len(mask) == len(values)
        assert {value for value, bit in zip(values, mask, strict=True) if not bit} <= {0.0}
        assert all(value < 0 for value, bit in zip(values, mask, strict=True) if bit)


def test_a_tool_that_returns_parts_of_a_message_ends_training_by_name(config, make_tool_trainer):
    class Painter(Register):
        def add(self, a: int, b: int) -> list:
            """Return a picture of two numbers, in parts.

            Args:
                a: The one.
                b: The other.
            """
            return [{"type": "text", "text": "5"}]

    with Session(config) as session:
        trainer = make_tool_trainer(SeerRollout(session), {"environment_factory": Painter})
        with pytest.raises(EngineError, match=r"ended with 'error'.*the tool add returned a list"):
            trainer.train()


def kind_of(name):
    try:
        raise_one(name)
    except BaseException as error:
        return type(error)


def raising(next_name, kind):
    """Return a tool that raises errors by their names, as a plain function or as a coroutine."""

    def add(a: int, b: int) -> str:
        """Add two numbers.

        Args:
            a: The one.
            b: The other.
        """
        raise_one(next_name())

    async def subtract(a: int, b: int) -> str:
        """Subtract a number from another.

        Args:
            a: The other.
            b: The one.
        """
        raise_one(next_name())

    return {"plain": add, "coroutine": subtract}[kind]


OF_PROGRAMS = [
    ("KeyboardInterrupt", "plain"),
    ("KeyboardInterrupt", "coroutine"),
    ("SystemExit", "coroutine"),
    ("CancelledError", "coroutine"),
    ("a base of its own", "plain"),
]
OTHERS = [name for name in ERRORS if issubclass(kind_of(name), Exception)]


@pytest.mark.parametrize(("name", "kind"), OF_PROGRAMS)
def test_a_tool_that_raises_what_ends_programs_ends_training_by_name(config, make_tool_trainer, name, kind):
    tool = raising(lambda: name, kind)
    with Session(config) as session:
        trainer = make_tool_trainer(SeerRollout(session), {"tools": [tool]})
        what = rf"the tool {tool.__name__} raised {class_of(name)}\b.* at .*test_trl_tools.py"
        with pytest.raises(EngineError, match=rf"ended with 'error'.*{what}"):
            trainer.train()


def test_such_a_tool_is_named_too_where_the_limit_of_a_response_has_cut_its_turn(config, make_tool_trainer):
    tool = raising(lambda: "KeyboardInterrupt", "plain")
    with Session(config) as session:
        settings = {"max_tool_calling_iterations": 1, "max_completion_length": 1}
        trainer = make_tool_trainer(SeerRollout(session), {"tools": [tool]}, **settings)
        with pytest.raises(PromptError, match="the tool add raised KeyboardInterrupt"):
            trainer.train()


@pytest.mark.parametrize("kind", ["plain", "coroutine"])
def test_any_exception_of_a_tool_is_its_result(config, make_tool_trainer, kind):
    names = cycle(OTHERS)
    tool = raising(lambda: next(names), kind)
    with Session(config) as session:
        trainer = make_tool_trainer(SeerRollout(session), {"tools": [tool]}, max_completion_length=200)
        outputs = recording(trainer)
        trainer.train()
    found = {}
    for _, _, _, messages, *_ in outputs:
        for each in (each for row in messages for each in row if each["role"] == "tool"):
            found[each["content"]] = each["content"].encode()
    assert found


SUMS = """
from seer_core.plugins.hookspecs import hookimpl
from seer_session.environment import EnvironmentAnswer


class Sums:
    async def step(self, trajectory, turn):
        total = sum(turn.token_ids)
        if turn.number == 2:
            return EnvironmentAnswer(done=True, reward=float(total % 3))
        return EnvironmentAnswer(token_ids=[3 + total % 500])


@hookimpl
def seer_make_environment():
    return Sums()
"""


@pytest.fixture
def with_sums(config, distribution):
    """Return the config of a session whose environment is a plug-in's."""
    distribution("sums", SUMS)
    return load_config(config, ["seer.plugins=['divided_rollout','sums']"])


def test_an_environment_of_the_session_s_config_is_masked_and_gives_rewards(with_sums, make_trainer):
    seen = []

    def reward(completion_ids, environment_reward, **_):
        seen.append((completion_ids, environment_reward))
        return environment_reward

    with Session(with_sums) as session:
        trainer = make_trainer(SeerRollout(session), max_steps=1, max_completion_length=60)
        trainer.reward_funcs[0] = reward
        outputs = recording(trainer)
        trainer.train()
        completions = {each.request_id: each for each in session.result.completions}
    [(_, tokens, masks, *_)] = outputs
    assert {mask.count(0) for mask in masks} == {2}
    assert trainer.state.log_history[0]["completions/mean_length"] == pytest.approx(
        torch.tensor([sum(mask) for mask in masks]).float().mean().item()
    )
    assert seen == [(tokens, [completions[f"train-0-0-{row // 4}/{row % 4}"].reward for row in range(12)])]


def test_an_environment_beside_trl_s_tools_is_refused(with_sums, make_tool_trainer):
    with Session(with_sums) as session:
        trainer = make_tool_trainer(SeerRollout(session), {"environment_factory": Register})
        with pytest.raises(ConfigError, match=r"a trainer of TRL's with tools takes no environment"):
            trainer.train()
