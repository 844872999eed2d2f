"""What does the draft index cost, beside arctic-inference's suffix cache, on one thread?

A step appends two tokens to each of B live requests and drafts for all of them: 8 tokens on a path, or
trees of 8 and 32.  Live requests have written half of their response, the rest of their groups all of it.
Times are microseconds per request, Python included: medians over --steps, then over the rounds.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from seer_grouped_spec import DraftIndex, Voting
from seer_grouped_spec.replay import Recording, load

from bench.frame import DATA, Row, cell, markdown, spread_of

try:
    from arctic_inference.suffix_decoding import SuffixDecodingCache
except ImportError:
    SuffixDecodingCache = None

ROOMS = ("plugins/grouped_spec",)
ROUNDS = 5

KINDS = {"path of 8": (8, False), "tree of 8": (8, True), "tree of 32": (32, True)}
ARCTIC_DEPTH = 64


def synthetic(groups: int, size: int = 16, tokens: int = 8_000) -> list[Recording]:
    """Make groups whose responses are strung together from 1,500 phrases, some far more frequent."""
    random = np.random.default_rng(0)
    made = []
    for group in range(groups):
        phrases = [random.integers(0, 32_000, random.integers(3, 30)).astype(np.int32) for _ in range(1_500)]
        odds = 1 / np.arange(1, 1_501)
        responses = []
        for _ in range(size):
            parts, length = [], 0
            while length < tokens:
                parts.append(phrases[random.choice(1_500, p=odds / odds.sum())])
                if random.random() < 0.3:
                    parts.append(random.integers(0, 32_000, 3).astype(np.int32))
                length = sum(map(len, parts[-2:])) + length
            responses.append(np.concatenate(parts)[:tokens])
        made.append(Recording(f"synthetic {group}", responses[0][:50].copy(), tuple(responses)))
    return made


class Live:
    """B live requests, spread over the groups, and a buffer with their whole texts."""

    def __init__(self, recordings: Sequence[Recording], batch: int) -> None:
        size = len(recordings[0].responses)
        groups = min(len(recordings), max(1, -(-batch // size)))
        self.recordings = recordings[:groups]
        self.who = [(g, i) for i in range(size) for g in range(groups)][:batch]
        texts = [np.concatenate([recordings[g].prompt, recordings[g].responses[i]]) for g, i in self.who]
        self.buffer = np.zeros((len(texts), max(map(len, texts)) + 1), np.int32)
        for row, text in enumerate(texts):
            self.buffer[row, : len(text)] = text
        self.ends = np.array([len(text) - 2 for text in texts], np.int32)
        self.start = np.array(
            [len(recordings[g].prompt) + len(recordings[g].responses[i]) // 2 for g, i in self.who], np.int32
        )

    def history(self, group: int, number: int) -> np.ndarray[Any, Any]:
        """Return what this request has written before the first step."""
        response = self.recordings[group].responses[number]
        return response[: len(response) // 2] if (group, number) in self.who else response

    def steps(self, count: int) -> list[np.ndarray[Any, Any]]:
        """Return the rows' lengths at each step, two tokens further every time."""
        return [np.minimum(self.start + 2 * n, self.ends).astype(np.int32) for n in range(1, count + 1)]

    def written(self, count: int) -> list[tuple[np.ndarray[Any, Any], ...]]:
        """Return the rows' lengths at each step, how many tokens of each are new, and all new tokens."""
        before, steps = self.start, []
        for now in self.steps(count):
            fresh = [row[begin:end] for row, begin, end in zip(self.buffer, before, now, strict=True)]
            steps.append((now, (now - before).astype(np.int32), np.concatenate(fresh)))
            before = now
        return steps


def measure_ours(live: Live, steps: int, voting: Voting) -> dict[str, float]:
    """Time one fill and each kind of draft."""
    index = DraftIndex(1 << 36, voting=voting)
    figures: dict[str, float] = {}
    handles = {}
    spent = 0.0
    for g, recording in enumerate(live.recordings):
        group = index.open_group(recording.prompt, 0.0, float("inf"))
        for i in range(len(recording.responses)):
            handles[g, i] = request = index.open_request(group)
            text = live.history(g, i)
            start = time.perf_counter()
            index.append(request, 0, text)
            spent += time.perf_counter() - start
            if (g, i) not in live.who:
                index.close_request(request)
    stats = index.stats()
    figures["append bulk, us/token"] = spent / stats.tokens * 1e6
    figures["bytes/token"] = stats.bytes / stats.tokens
    size = len(live.who)
    requests = np.array([handles[who] for who in live.who], np.int64)
    written = iter(live.written(steps * (len(KINDS) + 1)))
    for name, (tokens, tree) in KINDS.items():
        limits = np.full(size, tokens, np.int32)
        out, parents = np.zeros((2, size, tokens), np.int32)
        counts, chances = np.zeros(size, np.int32), np.zeros((size, tokens), np.float32)
        times = []
        for _ in range(steps):
            asked = (requests, *next(written), limits)
            start = time.perf_counter()
            if tree:
                index.draft_trees(*asked, out, parents, counts, chances)
            else:
                index.draft(*asked, out, counts, chances)
            times.append((time.perf_counter() - start) / size * 1e6)
        figures[f"{name}, us"] = statistics.median(times)
    limits = np.zeros(size, np.int32)
    times = []
    for _ in range(steps):
        asked = (requests, *next(written), limits)
        start = time.perf_counter()
        index.draft(*asked, out, counts, chances)
        times.append((time.perf_counter() - start) / size / 2 * 1e6)
    figures["append interleaved, us/token"] = statistics.median(times)
    return figures


def measure_growth(tokens: int = 100_000) -> dict[str, float]:
    """Append random tokens one by one, the worst case for the tables; in CPU time."""
    index = DraftIndex(1 << 36)
    request = index.open_request(index.open_group(np.zeros(0, np.int32), 0.0, float("inf")))
    text = np.random.default_rng(0).integers(0, 32_000, tokens).astype(np.int32)
    times = np.zeros(tokens)
    for at in range(tokens):
        start = time.thread_time_ns()
        index.append(request, at, text[at : at + 1])
        times[at] = (time.thread_time_ns() - start) / 1e3
    return {
        "median": float(np.median(times)),
        "99.9 %": float(np.percentile(times, 99.9)),
        "worst": float(times.max()),
        "second worst": float(np.partition(times, -2)[-2]),
    }


def measure_arctic(live: Live, steps: int) -> dict[str, float]:
    """Time the same of arctic-inference: one cache per group, one call per request."""
    caches = []
    spent = tokens = 0.0
    for g, recording in enumerate(live.recordings):
        cache = SuffixDecodingCache(max_tree_depth=ARCTIC_DEPTH)
        caches.append(cache)
        for i in range(len(recording.responses)):
            cache.start_request(i, recording.prompt)
            text = live.history(g, i)
            start = time.perf_counter()
            cache.add_active_response(i, text)
            spent += time.perf_counter() - start
            tokens += len(text)
            if (g, i) not in live.who:
                cache.stop_request(i)
    held = sum(
        c._global_tree.estimate_memory() + sum(t.estimate_memory() for t in c._local_trees.values())
        for c in caches
    )
    figures = {"append bulk, us/token": spent / tokens * 1e6, "bytes/token": held / tokens}
    size = len(live.who)
    lengths = iter(live.steps(steps * len(KINDS)))
    before = live.start
    added = []
    for name, (count, tree) in KINDS.items():
        times = []
        for _ in range(steps):
            now = next(lengths)
            start, adding = time.perf_counter(), 0.0
            for b, (g, i) in enumerate(live.who):
                row, end, cache = live.buffer[b], int(now[b]), caches[g]
                begin = time.perf_counter()
                cache.add_active_response(i, row[before[b] : end])
                adding += time.perf_counter() - begin
                cache.speculate(
                    i,
                    row[max(0, end - ARCTIC_DEPTH) : end],
                    max_spec_tokens=count,
                    max_spec_factor=1.0,
                    max_spec_offset=64.0,
                    min_token_prob=0.0,
                    use_tree_spec=tree,
                )
            times.append((time.perf_counter() - start) / size * 1e6)
            added.append(adding / size / 2 * 1e6)
            before = now
        figures[f"{name}, us"] = statistics.median(times)
    figures["append interleaved, us/token"] = statistics.median(added)
    return figures


def repeated(measure: Callable[[], dict[str, float]], rounds: int) -> dict[str, Row]:
    """Return the spread of every figure."""
    runs = [measure() for _ in range(rounds)]
    return {name: spread_of(run[name] for run in runs) for name in runs[0]}


def options(parser: argparse.ArgumentParser) -> None:
    """Add the case's own options."""
    parser.add_argument(
        "--data", type=Path, default=DATA, help="recorded responses, .npz (default: the bundled ones)"
    )
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 32, 256], help="live requests")
    parser.add_argument("--steps", type=int, default=200, help="measured steps per kind (default 200)")
    parser.add_argument(
        "--arctic-rounds", type=int, default=1, help="of arctic, which fills slowly (default 1)"
    )


def run(options: argparse.Namespace) -> list[Row]:
    """Measure every data set and batch size."""
    if SuffixDecodingCache is None:
        print("arctic-inference is not installed: its columns are skipped", file=sys.stderr)
    rows: list[Row] = []
    sets = {
        options.data.stem: load(options.data),
        "synthetic": synthetic(max(1, -(-max(options.batches) // 16))),
    }
    for data, recordings in sets.items():
        for batch in options.batches:
            live = Live(recordings, batch)
            print(f"{data}, {len(live.who)} requests", file=sys.stderr, flush=True)
            row: Row = {"data": data, "requests": len(live.who)}
            row["ours"] = repeated(partial(measure_ours, live, options.steps, Voting()), options.rounds)
            if SuffixDecodingCache is not None:
                steps = max(5, options.steps // 10)
                row["arctic"] = repeated(partial(measure_arctic, live, steps), options.arctic_rounds)
            rows.append(row)
    return [*rows, {"data": "100,000 random tokens, one by one", "append_us": measure_growth()}]


def table(rows: Sequence[Row]) -> str:
    """Return one line for each figure, and a sentence about growth."""
    lines = []
    for row in rows:
        for name, ours in row.get("ours", {}).items():
            arctic = row.get("arctic", {}).get(name)
            cells = [row["data"], f"{row['requests']}", name, cell(ours, ",.3f")]
            lines.append([*cells, cell(arctic, ",.3f") if arctic else ""])
    found = markdown(["data", "requests", "figure", "ours", "arctic-inference"], lines, left=3)
    growth = ", ".join(f"{name} {value:.2f}" for name, value in rows[-1]["append_us"].items())
    return f"{found}\n\nAppending one of {rows[-1]['data']}, us: {growth}."
