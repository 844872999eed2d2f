"""The calculator, the budget, and prompts that are new each time."""

import asyncio
import importlib.util
import random
from pathlib import Path

import pytest
from seer_rl.config import load_training
from seer_session.environment import AnsweredTurn, ModelTurn, Trajectory
from seer_testing import EnvironmentContract

HERE = Path(__file__).parent


def load():
    spec = importlib.util.spec_from_file_location("tool_reasoner_calculator", HERE / "calculator.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def calculator():
    return load()


class TestCalculator(EnvironmentContract):
    metadata = {"answer": "05"}  # noqa: RUF012

    def make(self):
        return load().Calculator()


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("easy next # 0 1 1 7 plus 3 9", 56),
        ("vs 4 9 nope so # 1 3 1 0 + 3 9", 49),
        ("hmm wait 5 6 add 3 9", 95),
        ("over - 8 5", 3),
        ("then # 0 2 5 6 + 3 9 gives 9 5 wrap - 8 5", 10),
        ("past - 9 9", 0),
        ("answer 0 3", None),
        ("+ 3", None),
        ("", None),
    ],
)
def test_it_works_out_what_stands_before_the_stop(calculator, text, value):
    assert calculator.work_out(text, last=88) == value


def test_a_wrap_goes_on_from_the_value_before_also_in_another_process(calculator):
    trajectory = Trajectory("g/0", "g", 0, 7, (1,), {"answer": "03"}, {})
    turns = [
        ModelTurn(number, [5], text, "=", 100)
        for number, text in enumerate(["then # 0 2 5 6 + 3 9", "over - 8 5"])
    ]

    async def play(earlier):
        environment = calculator.Calculator()
        await environment.reset(trajectory, [AnsweredTurn(turn, [5]) for turn in turns[:earlier]])
        return [(await environment.step(trajectory, turn)).text for turn in turns[earlier:]]

    assert asyncio.run(play(0)) == [" 95", " 10"]
    assert asyncio.run(play(1)) == [" 10"]


def write_tersely(calculator, problem):
    """Return the turns of the shortest right response, whose sums the calculator works out."""
    from budget import Terse

    pad = Terse(problem, random.Random(0))
    pad.walk(0.0)
    text = " ".join(["go", *pad.words, "answer", *problem.answer])
    first, *rest = (part.strip() for part in text.split("="))
    return [first, *(part.split(" ", digits)[-1] for part, digits in zip(rest, values(problem), strict=True))]


def values(problem):
    """Return how many digits each value has that stands behind a ``=``."""
    place, found = problem.start, []
    while place != problem.goal or not found:
        place += problem.hop
        found.append(len(f"{place:02d}"))
        if place >= problem.ring:
            place -= problem.ring
            found.append(2)
    return found


@pytest.mark.parametrize(("more", "reward"), [(0, 1.0), (14, 1.0), (15, 0.0)])
def test_a_right_answer_is_rewarded_if_the_model_wrote_no_more_than_the_budget(calculator, more, reward):
    async def play(row):
        metadata = row["metadata"]
        problem = calculator.task.Problem(**{key: metadata[key] for key in ("ring", "hop", "start", "goal")})
        trajectory = Trajectory("g/0", "g", 0, 7, (1,), metadata, {})
        environment = calculator.Calculator()
        await environment.reset(trajectory, ())
        texts = write_tersely(calculator, problem)
        *sums, end = (calculator.task.encode(text) for text in texts)
        answers = []
        for number, (text, token_ids) in enumerate(zip(texts, sums, strict=False)):
            turn = ModelTurn(number, [*token_ids, 32], text, "=", 100)
            answers.append(await environment.step(trajectory, turn))
        last = ModelTurn(len(sums), [*end, *[5] * more, 2], texts[-1], None, 100)
        assert [len(each.text.replace(" ", "")) for each in answers] == values(problem)
        assert sum(values(problem)) + metadata["budget"] + 14 == row["max_tokens"]
        return await environment.step(trajectory, last)

    for row in calculator.prompts(0, 8, 0):
        answer = asyncio.run(play(row))
        assert (answer.done, answer.reward) == (True, reward)


def test_a_response_over_its_budget_ends_before_its_answer(calculator):
    async def play():
        trajectory = Trajectory("g/0", "g", 0, 7, (1,), {"answer": "13", "budget": 4}, {})
        environment = calculator.Calculator()
        await environment.reset(trajectory, ())
        turn = ModelTurn(0, [5] * 5, "2 3 + 4 5", "=", 100)
        return await environment.step(trajectory, turn)

    assert asyncio.run(play()).done


def test_a_wrong_answer_has_no_reward(calculator):
    async def end(text):
        trajectory = Trajectory("g/0", "g", 0, 7, (1,), {"answer": "13"}, {})
        environment = calculator.Calculator()
        await environment.reset(trajectory, ())
        return (await environment.step(trajectory, ModelTurn(0, [5], text, None, 100))).reward

    assert asyncio.run(end("4 9 yes answer 1 3")) == 1.0
    assert asyncio.run(end("4 9 yes answer 1 4")) == 0.0


def test_each_iteration_and_seed_has_other_prompts_of_6_to_10_hops(calculator):
    rows = [
        list(calculator.prompts(iteration, 8, seed)) for iteration, seed in ((0, 0), (1, 0), (0, 1), (0, 0))
    ]
    texts = [[row["prompt"] for row in each] for each in rows]
    assert texts[0] == texts[3]
    assert len({tuple(each) for each in texts}) == 3
    assert {int(row["metadata"]["answer"]) for each in rows for row in each} <= set(range(6, 11))


def test_the_example_can_be_loaded():
    table, config = load_training(HERE / "train.toml")
    assert (HERE / config.engine["vllm"]["model"] / "model.safetensors").exists()
    assert (table.reward, table.environment) == ("", "calculator.py:Calculator")
    assert config.rollout.stop == ("=",)
