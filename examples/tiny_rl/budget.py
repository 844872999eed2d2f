"""The task of ``examples/tiny_reasoner`` under a token budget: be right, and be brief.

A response may have a few tokens more than the shortest right one.  Then it is cut, and earns nothing.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from seer_rl import Response

sys.path.insert(0, str(Path(__file__).parents[1] / "tiny_reasoner"))

import task

HOPS = range(6, 11)
RESPONSES = 8
SLACK_TOKENS = 8
EPOCH_ITERATIONS = 3


class Terse(task.Scratchpad):
    """Writes one word for each phrase."""

    def write(self, role: str) -> None:
        """Write the first phrase of a role that is one word."""
        self.words.append(next(phrase for phrase in task.PHRASES[role] if " " not in phrase))


def shortest_tokens(problem: task.Problem) -> int:
    """Return the length of the shortest right response, with its opening word and its end."""
    pad = Terse(problem, random.Random(0))
    pad.walk(recheck=0.0)
    answer = len(problem.answer) if problem.answer.isdecimal() else 1
    return 1 + len(task.encode(" ".join(pad.words))) + 1 + answer + 1


def prompts(iteration: int, groups: int, seed: int) -> Iterator[Mapping[str, object]]:
    """Yield fresh prompts for each iteration, of 6 to 10 hops."""
    rng = random.Random(f"tiny-rl {seed} {iteration}")
    for index in range(groups):
        problem = make_problem(rng)
        yield {
            "group_id": f"{iteration}-{index}",
            "prompt": problem.prompt,
            "n": RESPONSES,
            "max_tokens": shortest_tokens(problem) + SLACK_TOKENS,
            "metadata": problem.metadata(),
        }


def epochs(iteration: int, groups: int, seed: int) -> Iterator[Mapping[str, object]]:
    """Yield the prompts of the first iterations over and over, as a training over several epochs does."""
    return prompts(iteration % EPOCH_ITERATIONS, groups, seed)


def held_out(iteration: int, groups: int, seed: int) -> Iterator[Mapping[str, object]]:
    """Yield prompts that are the same in every run; training meets none of them but by chance."""
    return prompts(-1, groups, 0)


def make_problem(rng: random.Random) -> task.Problem:
    """Draw a problem that so many hops solve."""
    while True:
        problem = task.make_problem(rng)
        answer = problem.answer
        if answer.isdecimal() and int(answer) in HOPS:
            return problem


def reward(response: Response) -> float:
    """Return 1 for a right answer within the budget, else 0."""
    return task.reward(response.metadata, response.text or "")
