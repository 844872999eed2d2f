"""What drafting costs an engine's step: one call of ``GroupedSource`` per step, and vLLM's side of it.

B requests play recorded responses: drafts are verified against what really follows, half of each response is
written already, its siblings have finished.  Between two calls the step itself is made up: memory is read for
as long as a small model takes in vLLM on one CPU thread, so that the next call finds cold caches, as it does
there.  Microseconds per call: medians over --steps, then over --repeat [least, most].  Parts are timed in
rounds of their own, for timing them takes time.

  python benchmarks/draft_step.py --json out/draft_step.json
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import msgspec
import numpy as np
from draft_index import DATA, synthetic
from seer_grouped_spec.plugin import GroupedDrafter, Settings
from seer_grouped_spec.replay import Recording, load
from seer_grouped_spec.source import GroupedSource
from seer_grouped_spec.testing import MEASURED
from seer_host.drafts import SourceProposer

from seer_core.drafting import DraftHost
from seer_core.figures import spread
from seer_core.model import Sampling
from seer_core.ports import ChunkJob

DRAFT_TOKENS = 8
WARM_STEPS = 64
PARTS = {"index": ("draft",), "choice": ("choose",), "learning": ("learn",)}
"""Methods, of the source's index and policy, by the part they are counted as."""


class Timed:
    """An object whose methods of ``PARTS`` are timed."""

    def __init__(self, of: Any, seconds: dict[str, float]) -> None:
        self._of, self._seconds = of, seconds
        for part, names in PARTS.items():
            for name in names:
                if hasattr(of, name):
                    setattr(self, name, self._timed(getattr(of, name), part))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._of, name)

    def _timed(self, method: Callable[..., Any], part: str) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            begun = perf_counter()
            try:
                return method(*arguments)
            finally:
                self._seconds[part] += perf_counter() - begun

        return call


class Play:
    """An engine without a model: B requests that write what was recorded, some drafted, token by token."""

    def __init__(self, recordings: Sequence[Recording], batch: int) -> None:
        every = [(g, i) for g, recording in enumerate(recordings) for i in range(len(recording.responses))]
        every.sort(key=lambda one: -len(recordings[one[0]].responses[one[1]]))
        live = every[:batch]
        texts = [np.concatenate([recordings[g].prompt, recordings[g].responses[i]]) for g, i in live]
        self.ends = np.array(list(map(len, texts)), np.int32)
        self.lengths = np.array(
            [len(recordings[g].prompt) + len(recordings[g].responses[i]) // 2 for g, i in live], np.int32
        )
        self.tokens = np.zeros((batch, int(self.ends.max()) + DRAFT_TOKENS + 1), np.int32)
        for row, text in enumerate(texts):
            self.tokens[row, : len(text)] = text
        drafter = GroupedDrafter(Settings(draft_tokens=DRAFT_TOKENS), None)
        host = DraftHost("a", batch, self.tokens.shape[1], 1 << 17, DRAFT_TOKENS, MEASURED)
        self.source: Any = GroupedSource(msgspec.to_builtins(drafter.source().settings), host)
        self.proposer = SourceProposer(DRAFT_TOKENS, 1 << 17, batch)
        self.ids = [f"{g}/{i}" for g, i in live]
        self.proposer.attach(self.source, lambda: self.ids)
        for g, i in every:
            if any(g == group for group, _ in live) and (g, i) not in live:
                self.source.close(self.source.open(self._job(recordings[g], g, i, None)))
        for row, (g, i) in enumerate(live):
            self.proposer.open(self.ids[row], self._job(recordings[g], g, i, int(self.lengths[row])))
        self.drafts: list[list[int]] = [[] for _ in live]
        self.memory = np.ones(8 << 20)
        self.read = 0

    def _job(self, recording: Recording, group: int, number: int, tokens: int | None) -> ChunkJob:
        text = np.concatenate([recording.prompt, recording.responses[number]])[:tokens].tolist()
        return ChunkJob(
            f"{group}/{number}#0",
            f"{group}/{number}",
            str(group),
            text,
            len(recording.prompt),
            1 << 20,
            Sampling(),
            7,
            0,
            probe=number == 0,
        )

    def step(self) -> tuple[list[list[int]], float]:
        """Verify the drafts, take as long as that would, and return the sampled tokens and the seconds."""
        begun = perf_counter()
        seconds = MEASURED.at(len(self.ids), sum(map(len, self.drafts)) / len(self.ids))
        sampled = []
        for row, draft in enumerate(self.drafts):
            at = int(self.lengths[row])
            follows = self.tokens[row, at : at + len(draft) + 1].tolist()
            agreed = next((n for n, token in enumerate(draft) if token != follows[n]), len(draft))
            sampled.append(follows[: agreed + 1])
            self.lengths[row] += agreed + 1
        while perf_counter() - begun < seconds:
            self.memory[self.read : self.read + (1 << 16)].sum()
            self.read = (self.read + (1 << 16)) % len(self.memory)
        return sampled, seconds

    def ask(self, sampled: list[list[int]]) -> list[list[int]]:
        """Ask for drafts, as vLLM's proposer does."""
        return self.proposer.propose_for(sampled, self.lengths[: len(sampled)].tolist(), self._text)

    def _text(self, row: int, start: int, stop: int) -> list[int]:
        tokens: list[int] = self.tokens[row, start:stop].tolist()
        return tokens

    def play(self, steps: int, parts: dict[str, float] | None) -> dict[str, float]:
        """Play so many steps; return medians of microseconds per call, and what came of it."""
        times: dict[str, list[float]] = {"all": [], "source": [], **{name: [] for name in parts or {}}}
        asked = self.source.propose
        spent = 0.0

        def propose(batch: Any) -> None:
            nonlocal spent
            begun = perf_counter()
            asked(batch)
            spent = perf_counter() - begun

        self.source.propose = propose
        written = accepted = drafted = 0
        shares = []
        for number in range(steps + WARM_STEPS):
            if (self.lengths + DRAFT_TOKENS + 1 >= self.ends).any():
                raise SystemExit(f"the recorded responses are too short for {steps} steps; take fewer")
            given = sum(map(len, self.drafts))
            sampled, seconds = self.step()
            for name in parts or {}:
                parts[name] = 0.0  # type: ignore[index]
            begun = perf_counter()
            self.drafts = self.ask(sampled)
            took = perf_counter() - begun
            if self.proposer.drafting.failed:
                raise SystemExit("drafting failed")
            if number < WARM_STEPS:
                continue
            shares.append(took / (took + seconds))
            written += sum(map(len, sampled))
            accepted += sum(map(len, sampled)) - len(sampled)
            drafted += given
            times["all"].append(took)
            times["source"].append(spent)
            for name, value in (parts or {}).items():
                times[name].append(value)
        return {
            **{f"{name}, us": statistics.median(values) * 1e6 for name, values in times.items()},
            "share of step": statistics.median(shares),
            "tokens a step": written / steps / len(self.ids),
            "accepted of drafted": accepted / max(1, drafted),
        }


def measure(recordings: Sequence[Recording], batch: int, steps: int) -> dict[str, float]:
    """Play twice, whole and by parts."""
    whole = Play(recordings, batch)
    figures = whole.play(steps, None)
    whole.proposer.stop()
    parts = dict.fromkeys(PARTS, 0.0)
    split = Play(recordings, batch)
    split.source._index = Timed(split.source._index, parts)
    split.source._choice = Timed(split.source._choice, parts)
    timed = split.play(steps, parts)
    split.proposer.stop()
    for name in parts:
        figures[f"{name}, us"] = timed[f"{name}, us"]
    figures["rest, us"] = timed["source, us"] - sum(timed[f"{name}, us"] for name in parts)
    figures["vLLM's side, us"] = figures["all, us"] - figures["source, us"]
    return figures


def main(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure every batch size."""
    recordings = load(options.data) if options.data.exists() else synthetic(4)
    rows = []
    for batch in options.batches:
        runs = []
        for number in range(options.repeat):
            runs.append(measure(recordings, batch, options.steps))
            print(f"B={batch}: {number + 1} of {options.repeat}", file=sys.stderr, flush=True)
        figures = {name: spread(run[name] for run in runs)._asdict() for name in runs[0]}
        rows.append({"batch": batch, "repeats": options.repeat, "steps": options.steps, **figures})
    return rows


def show(rows: Sequence[dict[str, Any]]) -> None:
    """Print a column per batch size."""
    names = [name for name in rows[0] if name not in ("batch", "repeats", "steps")]
    print(f"{'':22}" + "".join(f"{'B=' + str(row['batch']):>28}" for row in rows))
    for name in names:
        digits = 1 if name.endswith("us") else 4
        cells = (
            f"{row[name]['median']:.{digits}f}"
            f" [{row[name]['least']:.{digits}f}, {row[name]['most']:.{digits}f}]"
            for row in rows
        )
        print(f"{name:22}" + "".join(f"{cell:>28}" for cell in cells))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--data", type=Path, default=DATA, help="recorded responses, as seer replay reads them"
    )
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32], help="live requests")
    parser.add_argument("--steps", type=int, default=300, help="measured steps (default 300)")
    parser.add_argument("--repeat", type=int, default=5, help="rounds (default 5)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows as JSON")
    arguments = parser.parse_args()
    result = main(arguments)
    show(result)
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_bytes(msgspec.json.format(msgspec.json.encode(result)) + b"\n")
