"""What sharing text between instances buys in accepted draft tokens, and how fresh it has to be.

Recorded groups are played back on several instances, each with a draft index of its own.  A response stays
where it is, as most do.  Its siblings are shared out among the instances by chance.  Instances learn what
their siblings elsewhere have said in one of these ways:

  never      each instance knows its own responses alone
  chunks N   when a chunk of N tokens has ended, as the runtime learns it
  steps N    N steps later, as a draft server would tell, polled that often
  at once    as if all responses were on one instance

"together": all responses of a group are written at the same time.  "probe first": the first response is
finished before the others begin, which is how context-aware scheduling begins a group.  No model runs.

  python benchmarks/draft_sharing.py --json out/draft_sharing.json
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray
from seer_grouped_spec._index import DraftIndex
from seer_grouped_spec.replay import FOREVER_S, NO_TOKEN, Recording, load

DATA = Path(__file__).parents[2] / "shared" / "data" / "grouped_responses.npz"
ROOM_BYTES = 1 << 40
WAYS = ("never", "chunks 2048", "chunks 512", "chunks 128", "steps 64", "steps 16", "at once")

Tokens = NDArray[np.int32]
Known = Callable[[int, int], int]
"""How many tokens of a response an instance elsewhere knows, from its tokens now and those N steps ago."""


class Instance:
    """A draft index, the responses that are written here, and what is known of the others."""

    def __init__(
        self, recording: Recording, texts: Sequence[Tokens], mine: Sequence[int], width: int
    ) -> None:
        self.mine = list(mine)
        self._texts, self._width = texts, width
        self._prompt = len(recording.prompt)
        self._index = DraftIndex(ROOM_BYTES)
        group = self._index.open_group(recording.prompt, 0.0, FOREVER_S)
        self._requests = [self._index.open_request(group) for _ in texts]
        self._known = [0] * len(texts)
        self._told = [0] * len(texts)
        columns = self._prompt + max(map(len, texts)) + width + 1
        self._tokens = np.full((max(len(self.mine), 1), columns), NO_TOKEN, np.int32)
        for row, number in enumerate(self.mine):
            self._tokens[row, : self._prompt] = recording.prompt
            self._tokens[row, self._prompt : self._prompt + len(texts[number])] = texts[number]

    def learn(self, number: int, tokens: int) -> None:
        """Take in the first ``tokens`` tokens of a response that is written elsewhere."""
        known = self._known[number]
        if tokens > known:
            self._index.append(self._requests[number], known, self._texts[number][known:tokens])
            self._known[number] = tokens

    def step(self, written: dict[int, int]) -> dict[int, int]:
        """Draft for the responses here that have ``written`` so many tokens; return what they have next."""
        rows = [row for row, number in enumerate(self.mine) if number in written]
        if not rows:
            return {}
        numbers = [self.mine[row] for row in rows]
        size, width = len(rows), self._width
        fresh = [self._texts[number][self._told[number] : written[number]] for number in numbers]
        for number in numbers:
            self._told[number] = written[number]
        lengths = np.array([self._prompt + written[number] for number in numbers], np.int32)
        ends = np.array([self._prompt + len(self._texts[number]) for number in numbers], np.int32)
        out, counts = np.zeros((size, width), np.int32), np.zeros(size, np.int32)
        self._index.draft(
            np.array([self._requests[number] for number in numbers], np.int64),
            lengths,
            np.array(list(map(len, fresh)), np.int32),
            np.concatenate(fresh),
            np.where(lengths < ends, width, 0).astype(np.int32),
            out,
            counts,
            np.zeros((size, width), np.float32),
        )
        offsets = np.arange(width)
        said = self._tokens[np.array(rows)[:, None], lengths[:, None] + offsets]
        equal = (out == said) & (offsets < counts[:, None])
        accepted = np.logical_and.accumulate(equal, axis=1).sum(axis=1)
        after = np.minimum(lengths + accepted + 1, ends) - self._prompt
        return dict(zip(numbers, after.tolist(), strict=True))


def play(
    recording: Recording, instances: int, way: str, probe_first: bool, width: int, chance: random.Random
) -> tuple[int, int]:
    """Play a group; return the steps and the tokens of its responses, a probe's left out."""
    texts = recording.responses
    order = list(range(len(texts)))
    chance.shuffle(order)
    shares = [order[start::instances] for start in range(instances)]
    places = [Instance(recording, texts, share, width) for share in shares]
    kind, _, number = way.partition(" ")
    every = int(number) if number.isdigit() else 1
    steps = tokens = 0
    for batch in [[0], order] if probe_first else [order]:
        going = {each: 0 for each in batch if not (probe_first and len(batch) > 1 and each == 0)}
        history = [dict(going)]
        while going:
            after: dict[int, int] = {}
            for place in places:
                after |= place.step(going)
            if not probe_first or len(batch) > 1:
                steps += len(going)
                tokens += sum(after[each] - going[each] for each in going)
            history.append(after)
            past = history[-1 - every] if len(history) > every else {}
            for each, length in after.items():
                over = length == len(texts[each])
                known = {
                    "never": 0,
                    "chunks": length if over else length // every * every,
                    "steps": length if over else past.get(each, 0),
                    "at": length,
                }[kind]
                for place in places:
                    if known and each not in place.mine:
                        place.learn(each, known)
            if kind != "steps":
                del history[:-1]
            elif len(history) > every:
                del history[0]
            going = {each: length for each, length in after.items() if length < len(texts[each])}
            for place in places:  # the last tokens of those that are over go in at home as well
                place.step({each: length for each, length in after.items() if each not in going})
    return steps, tokens


def rows(
    recordings: Sequence[Recording], counts: Sequence[int], ways: Sequence[str], width: int
) -> Iterator[dict[str, Any]]:
    """Yield the mean acceptance length of each way on each number of instances."""
    for probe_first in (False, True):
        for instances in counts:
            for way in ways:
                if instances == 1 and way != "never":
                    continue
                chance = random.Random(0)
                played = [play(each, instances, way, probe_first, width, chance) for each in recordings]
                steps, tokens = (sum(column) for column in zip(*played, strict=True))
                yield {
                    "begin": "probe first" if probe_first else "together",
                    "instances": instances,
                    "way": way,
                    "acceptance_length": tokens / steps,
                    "steps": steps,
                    "tokens": tokens,
                }


def show(table: Sequence[dict[str, Any]]) -> None:
    """Print a line for each number of instances."""
    for begin in dict.fromkeys(row["begin"] for row in table):
        ways = dict.fromkeys(row["way"] for row in table)
        print(f"\n{begin:12}" + "".join(f"{way:>13}" for way in ways))
        for instances in dict.fromkeys(row["instances"] for row in table):
            found = {
                row["way"]: row["acceptance_length"]
                for row in table
                if row["begin"] == begin and row["instances"] == instances
            }
            cells = "".join(f"{found[way]:13.3f}" if way in found else " " * 13 for way in ways)
            print(f"{instances:<12}{cells}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, default=DATA, help="as seer replay reads them")
    parser.add_argument("--groups", type=int, help="only the first so many groups")
    parser.add_argument("--instances", type=int, nargs="+", default=[1, 2, 4, 8], help="how many there are")
    parser.add_argument("--ways", nargs="+", default=WAYS, help="how instances learn (default all above)")
    parser.add_argument("--draft-tokens", type=int, default=8, help="at most, per step (default 8)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows as JSON")
    arguments = parser.parse_args()
    if not arguments.data.exists():
        sys.exit(f"{arguments.data} is not there; name a file of recorded responses with --data")
    result = []
    recorded = load(arguments.data)[: arguments.groups]
    for line in rows(recorded, arguments.instances, arguments.ways, arguments.draft_tokens):
        result.append(line)
        print(
            "{begin}, {instances}, {way}: {acceptance_length:.3f}".format(**line), file=sys.stderr, flush=True
        )
    show(result)
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_bytes(msgspec.json.format(msgspec.json.encode(result)) + b"\n")
