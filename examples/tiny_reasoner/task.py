"""Ring hops: a task with checkable answers, heavy-tailed lengths and shared wording.

A ring has m places.  Hop a places at a time from a start until you stand on the goal, and say
how many hops that took; give up after 64.  The scratchpad walks the ring one hop a line:

    then # 0 2 8 1 + 2 3 = 1 0 4 over - 9 7 = 0 7 vs 5 5 no

The number of hops is log-normal and belongs to the prompt, so lengths are heavy-tailed and
siblings of a group share them.  The mood, re-checks and verification passes are drawn per
response, so siblings still differ.  All siblings write the same numbers in partly other words.
"""

import argparse
import json
import math
import random
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import NormalDist
from typing import NamedTuple

HOP_LIMIT = 64
HOPS_MEDIAN, HOPS_SIGMA, HOPS_MAX = 11.5, 0.9, 85
MAX_TOKENS = 3072

PAD, BOS, EOS, UNK = "<pad>", "<bos>", "<eos>", "<unk>"

# What the teacher may write in each role, with weights that sum to one.
PHRASES: Mapping[str, Mapping[str, float]] = {
    "lead": {"then": 0.40, "next": 0.22, "now": 0.14, "so": 0.12, "and": 0.08, "step": 0.04},
    "plus": {"+": 0.66, "plus": 0.24, "add": 0.10},
    "is": {"=": 0.56, "is": 0.22, "gives": 0.14, "makes": 0.08},
    "over": {"over": 0.50, "wrap": 0.28, "past": 0.14, "beyond": 0.08},
    "versus": {"vs": 0.54, "want": 0.30, "goal": 0.16},
    "miss": {
        "no": 0.42,
        "nope": 0.16,
        "miss": 0.12,
        "not yet": 0.12,
        "hmm": 0.07,
        "far off": 0.06,
        "go on": 0.05,
    },
    "doubt": {"wait": 0.5, "check": 0.3, "hmm wait": 0.2},
    "settled": {"ok": 0.5, "right": 0.3, "good": 0.2},
    "found": {"yes": 0.50, "found": 0.25, "hit": 0.15, "there": 0.10},
    "give up": {"enough": 0.6, "stop": 0.4},
    "verify": {"verify": 0.5, "be sure": 0.3, "recount": 0.2},
}


class Mood(NamedTuple):
    """How a response is written: its opening and how often it doubts itself."""

    weight: float
    openings: tuple[str, ...]
    recheck: float
    verify: float


MOODS = (
    Mood(0.42, ("quick", "easy", "let me be quick", "go"), recheck=0.02, verify=0.02),
    Mood(0.42, ("try", "start", "let me try", "ready"), recheck=0.08, verify=0.08),
    Mood(0.16, ("careful", "slow", "let me think", "let me be careful"), recheck=0.22, verify=0.25),
)


def _vocabulary() -> tuple[str, ...]:
    """List every word of prompts and responses, special tokens first."""
    texts = [phrase for phrases in PHRASES.values() for phrase in phrases]
    texts += [opening for mood in MOODS for opening in mood.openings]
    words = [word for text in texts for word in text.split()]
    fixed = [PAD, BOS, EOS, UNK, *"0123456789", "ring", "hop", "from", "to", "?", "#", "-", "answer", "none"]
    return tuple(dict.fromkeys([*fixed, *words]))


VOCABULARY = _vocabulary()
TOKEN_IDS = {word: i for i, word in enumerate(VOCABULARY)}


@dataclass(frozen=True)
class Problem:
    """One ring-hop question."""

    ring: int
    hop: int
    start: int
    goal: int

    @property
    def prompt(self) -> str:
        """Ask the question in the words the model was trained on."""
        return f"ring {self.ring} hop {self.hop:02d} from {self.start:02d} to {self.goal:02d} ?"

    @property
    def answer(self) -> str:
        """Count the hops to the goal; 'none' when it takes more than the limit."""
        for hops in range(1, HOP_LIMIT + 1):
            if (self.start + hops * self.hop) % self.ring == self.goal:
                return f"{hops:02d}"
        return "none"

    def metadata(self) -> dict[str, object]:
        """Return what `reward` needs, ready for JSON."""
        return {**asdict(self), "answer": self.answer}


def make_problem(rng: random.Random, difficulty: float | None = None) -> Problem:
    """Draw a problem whose number of hops is log-normal, or its quantile at a difficulty in (0, 1)."""
    z = NormalDist().inv_cdf(rng.random() if difficulty is None else difficulty)
    hops = min(max(2, round(HOPS_MEDIAN * math.exp(HOPS_SIGMA * z))), HOPS_MAX)
    while True:
        ring, hop = rng.randint(60, 99), rng.randint(7, 49)
        if hops < ring // math.gcd(ring, hop):
            start = rng.randrange(ring)
            return Problem(ring, hop, start, (start + hops * hop) % ring)


class Scratchpad:
    """The teacher's pen: collects the words of one response."""

    def __init__(self, problem: Problem, rng: random.Random) -> None:
        self.problem, self.rng, self.words = problem, rng, list[str]()

    def write(self, role: str) -> None:
        """Write one phrase of a role."""
        phrases = PHRASES[role]
        [phrase] = self.rng.choices(list(phrases), list(phrases.values()))
        self.words += phrase.split()

    def number(self, value: int) -> None:
        """Write a number digit by digit, at least two digits."""
        self.words += f"{value:02d}"

    def add(self, place: int) -> int:
        """Write one addition, with the wrap if there is one, and return the new place."""
        ring, hop = self.problem.ring, self.problem.hop
        self.number(place)
        self.write("plus")
        self.number(hop)
        self.write("is")
        self.number(place + hop)
        if place + hop >= ring:
            self.write("over")
            self.words.append("-")
            self.number(ring)
            self.write("is")
            self.number(place + hop - ring)
        return (place + hop) % ring

    def walk(self, recheck: float) -> None:
        """Walk from the start to the goal or to the limit, one hop a line."""
        place = self.problem.start
        for hops in range(1, HOP_LIMIT + 1):
            self.write("lead")
            self.words.append("#")
            self.number(hops)
            landed = self.add(place)
            while self.rng.random() < recheck:
                self.write("doubt")
                self.add(place)
                self.write("settled")
            place = landed
            self.write("versus")
            self.number(self.problem.goal)
            if place == self.problem.goal:
                return self.write("found")
            self.write("miss")
        self.write("give up")


def write_response(problem: Problem, rng: random.Random) -> str:
    """Write one correct scratchpad, ending in the answer."""
    pad = Scratchpad(problem, rng)
    [mood] = rng.choices(MOODS, [mood.weight for mood in MOODS])
    pad.words += rng.choice(mood.openings).split()
    pad.walk(mood.recheck)
    verify = mood.verify
    while rng.random() < verify:
        pad.write("verify")
        pad.walk(mood.recheck)
        verify /= 2
    answer = problem.answer
    pad.words += ["answer", *([answer] if answer == "none" else answer)]
    return " ".join(pad.words)


def reward(metadata: Mapping[str, object], text: str) -> float:
    """Return 1 if the response ends in the right answer, else 0.

    Spaces between digits and a trailing ``<eos>`` do not matter; a response cut before its
    answer earns nothing.
    """
    ending = re.search(r"\banswer ((?:\d ?)+|none)$", text.replace(EOS, "").strip())
    return float(ending is not None and ending[1].replace(" ", "") == metadata["answer"])


def encode(text: str) -> list[int]:
    """Return the token ids of a text, without <bos> and <eos>; the tokenizer in weights/ agrees."""
    return [TOKEN_IDS.get(word, TOKEN_IDS[UNK]) for word in re.findall(r"\d|[^\d\s]+", text)]


def prompt_rows(groups: int, n: int, seed: int, max_tokens: int = MAX_TOKENS) -> Iterator[dict[str, object]]:
    """Yield one row per group: a prompt and how to sample it.

    Difficulties are stratified, so that even a few dozen prompts have the task's heavy tail.
    """
    rng = random.Random(f"prompts-{seed}")
    strata = rng.sample(range(groups), groups)
    for index, stratum in enumerate(strata):
        problem = make_problem(rng, (stratum + rng.random()) / groups)
        yield {
            "group_id": f"ring-{seed}-{index:04d}",
            "prompt": problem.prompt,
            "n": n,
            "max_tokens": max_tokens,
            "temperature": 1.0,
            "seed": rng.getrandbits(31),
            "metadata": problem.metadata(),
        }


def group_share(groups: Iterable[Sequence[float]]) -> float:
    """Return the share of the variance that lies between groups of equal size."""
    groups = [list(group) for group in groups]
    values = [value for group in groups for value in group]
    mean = sum(values) / len(values)
    total = sum((value - mean) ** 2 for value in values)
    between = sum(len(group) * (sum(group) / len(group) - mean) ** 2 for group in groups)
    return between / total if total else 0.0


def main() -> None:
    """Write a file of prompts."""
    parser = argparse.ArgumentParser(
        description="Write prompts as JSON lines.",
        epilog="example: python task.py --groups 48 --n 8 --seed 1 --out prompts.jsonl",
    )
    parser.add_argument("--groups", type=int, default=48)
    parser.add_argument("--n", type=int, default=8, help="responses per prompt (default 8)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--max-tokens", type=int, default=MAX_TOKENS)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    rows = prompt_rows(args.groups, args.n, args.seed, args.max_tokens)
    args.out.write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main()
