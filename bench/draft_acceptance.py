"""How many tokens does a step give: drafts replayed on recorded responses, ours beside arctic-inference's?

Tokens per step, the bonus token included, for 0 to 9 finished siblings, live (all responses of a group
advance together) and a control with other prompts' responses as siblings; beside it accepted / drafted.
"common" adds two responses of each other group to the common index, as in a run that has gone on for a
while.  Arctic has one cache per group, and no filter, which is its best.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from seer_grouped_spec.replay import Recording, load, replay

from bench.frame import DATA, Row, markdown

try:
    from arctic_inference.suffix_decoding import SuffixDecodingCache
except ImportError:
    SuffixDecodingCache = None

ROOMS = ("plugins/grouped_spec",)
ROUNDS = 1

SIBLINGS = (0, 1, 3, 7, 9)
FILTERS = (0.02, 0.05, 0.1, 0.2)
ARCTIC_DEPTH = 64


class ArcticReplay:
    """Plays responses against arctic's cache as ``replay`` does against ours, one by one."""

    def __init__(self, tokens: int, tree: bool) -> None:
        self.tokens, self.tree = tokens, tree
        self.steps = self.written = self.drafted = 0

    def step(self, cache: Any, key: Any, text: np.ndarray[Any, Any], at: int) -> int:
        """Draft at ``at``, count, append what is accepted and one token more; return the new end."""
        draft = cache.speculate(
            key,
            text[max(0, at - ARCTIC_DEPTH) : at],
            max_spec_tokens=self.tokens,
            max_spec_factor=1.0,
            max_spec_offset=64.0,
            min_token_prob=0.0,
            use_tree_spec=self.tree,
        )
        accepted, node = 0, -1
        children = {(p, t): n for n, (p, t) in enumerate(zip(draft.parents, draft.token_ids, strict=True))}
        while at + accepted < len(text) and (node, int(text[at + accepted])) in children:
            node = children[node, int(text[at + accepted])]
            accepted += 1
        end = min(at + accepted + 1, len(text))
        cache.add_active_response(key, text[at:end])
        self.steps += 1
        self.written += end - at
        self.drafted += len(draft.token_ids)
        return end

    def finished(self, group: Recording, siblings: Sequence[np.ndarray[Any, Any]], target: int) -> None:
        """Play one response beside finished siblings."""
        cache = SuffixDecodingCache(max_tree_depth=ARCTIC_DEPTH)
        for number, sibling in enumerate(siblings):
            cache.start_request(number, group.prompt)
            cache.add_active_response(number, sibling)
            cache.stop_request(number)
        text = np.concatenate([group.prompt, group.responses[target]])
        cache.start_request("target", group.prompt)
        at = len(group.prompt)
        while at < len(text):
            at = self.step(cache, "target", text, at)

    def live(self, group: Recording) -> None:
        """Play all responses of a group together."""
        cache = SuffixDecodingCache(max_tree_depth=ARCTIC_DEPTH)
        texts = [np.concatenate([group.prompt, response]) for response in group.responses]
        ends = [len(group.prompt)] * len(texts)
        for number in range(len(texts)):
            cache.start_request(number, group.prompt)
        going = list(range(len(texts)))
        while going:
            for number in list(going):
                ends[number] = self.step(cache, number, texts[number], ends[number])
                if ends[number] >= len(texts[number]):
                    cache.stop_request(number)
                    going.remove(number)

    def row(self, **setting: Any) -> dict[str, Any]:
        """Return the figures as a row."""
        return {
            "who": "arctic",
            **setting,
            "acceptance_length": self.written / self.steps,
            "drafted_per_step": self.drafted / self.steps,
            "accepted_share": (self.written - self.steps) / max(1, self.drafted),
            "steps": self.steps,
        }


def arctic_rows(recordings: Sequence[Recording], targets: Sequence[int], live: bool) -> list[dict[str, Any]]:
    """Replay arctic under every setting."""
    rows = []
    for tokens, tree in ((8, False), (8, True), (32, True)):
        for control in (False, True) if len(recordings) > 9 else (False,):
            for count in (9,) if control else (*SIBLINGS, *(["live"] if live else [])):
                played = ArcticReplay(tokens, tree)
                for g, group in enumerate(recordings):
                    if count == "live":
                        played.live(group)
                        continue
                    for target in targets:
                        if control:
                            others = [recordings[(g + n) % len(recordings)] for n in range(1, count + 1)]
                            siblings = [other.responses[target] for other in others]
                        else:
                            size = len(group.responses)
                            siblings = [group.responses[(target + n) % size] for n in range(1, count + 1)]
                        played.finished(group, siblings, target)
                rows.append(played.row(draft=draft_name(tokens, tree), siblings=count, control=control))
                report(rows[-1])
    return rows


def our_rows(recordings: Sequence[Recording], targets: Sequence[int]) -> list[dict[str, Any]]:
    """Replay ours under every setting."""
    rows = []

    def add(siblings: Sequence[Any], nodes: int, who: str = "ours", **options: Any) -> None:
        for row in replay(recordings, siblings, 8, nodes, targets=targets, **options):
            rows.append({"who": who, "draft": draft_name(nodes or 8, nodes > 0), **msgspec.to_builtins(row)})
            report(rows[-1])

    for nodes in (0, 8, 32):
        add((*SIBLINGS, "live"), nodes)
        if len(recordings) > 9:
            add((9,), nodes, control=True)
        add((0, 9, "live"), nodes, who="ours, common", common=2)
        for floor in FILTERS:
            add((9,), nodes, who=f"ours, P >= {floor}", min_probability=floor)
    return rows


def draft_name(tokens: int, tree: bool) -> str:
    """Name a kind of draft."""
    return f"tree of {tokens}" if tree else f"path of {tokens}"


def report(row: dict[str, Any]) -> None:
    """Print a finished row to standard error."""
    siblings = f"{row['siblings']} other" if row["control"] else row["siblings"]
    print(
        f"{row['who']}, {row['draft']}, {siblings}: {row['acceptance_length']:.3f}",
        file=sys.stderr,
        flush=True,
    )


def options(parser: argparse.ArgumentParser) -> None:
    """Add the case's own options."""
    parser.add_argument(
        "--data", type=Path, default=DATA, help="as seer replay reads them (default: the bundled ones)"
    )
    parser.add_argument("--targets", type=int, default=10, help="responses played per group (default 10)")
    parser.add_argument("--groups", type=int, help="only the first so many groups")
    parser.add_argument("--arctic-live", action="store_true", help="play arctic live too (slow)")


def run(options: argparse.Namespace) -> list[Row]:
    """Replay under every setting; nothing is random, so one round is all."""
    recordings = load(options.data)[: options.groups]
    size = len(recordings[0].responses)  # targets are spread over the group: not all neighbours
    chosen = [n * size // options.targets for n in range(min(options.targets, size))]
    rows = our_rows(recordings, chosen)
    if SuffixDecodingCache is None:
        print("arctic-inference is not installed: its rows are skipped", file=sys.stderr)
    else:
        rows += arctic_rows(recordings, chosen, options.arctic_live)
    return [{"data": options.data.stem, **row} for row in rows]


def table(rows: Sequence[Row]) -> str:
    """Return one line for each kind of draft and way, and a column for each number of siblings."""
    columns = [*map(str, SIBLINGS), "live", "9 other"]
    cells: dict[tuple[str, str], dict[str, str]] = {}
    for row in rows:
        column = f"{row['siblings']} other" if row["control"] else str(row["siblings"])
        text = f"{row['acceptance_length']:.2f} ({row['accepted_share']:.2f})"
        cells.setdefault((row["draft"], row["who"]), {})[column] = text
    lines = [[*name, *(found.get(column, "") for column in columns)] for name, found in cells.items()]
    head = f"Responses of `{rows[0]['data']}`; tokens per step, (accepted of drafted), by finished siblings."
    return f"{head}\n\n" + markdown(["draft", "index", *columns], lines, left=2)
