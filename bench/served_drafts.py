"""What do Seer's drafts and shared KV save in vLLM servers that run already, beside the servers' own drafts?

Two stock ``vllm serve`` on CPUs serve the bundled model, keyed, and Seer divides and places responses over
them.  The arms differ in what drafts, and in whether the servers share a pool:

  none     no drafts: servers that could draft for Seer, and a run that asks for none
  Seer     from the other responses of the group, too, sent over the servers' routes
  Seer+KV  the same, and a response that moves finds its KV
  n-gram   vLLM's own, from each response alone

Steps, drafts and tokens prefilled are counts, which no load of the machine changes.  CPU time is that of all
of the servers' processes, from the first prompt to the last response.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.harness import Row, cell, markdown, percent, prompts, spread_of
from bench.remote_real import ServerUsage, StockServer, session_on, stock_servers

DEPENDS_ON = ("backends/remote", "backends/vllm/seer_vllm", "plugins/grouped_spec")
ROUNDS = 1
SEER = {"method": "custom_class", "model": "seer_vllm.served_drafts.ServedProposer"}
NGRAM = {"method": "ngram", "prompt_lookup_min": 2, "prompt_lookup_max": 5}
ARMS: dict[str, tuple[dict[str, Any], str, tuple[str, ...]]] = {
    "none": (SEER, "none", ()),
    "Seer": (SEER, "none", ("grouped_spec",)),
    "Seer+KV": (SEER, "local", ("grouped_spec",)),
    "n-gram": (NGRAM, "none", ()),
}
"""What drafts in the servers, the run's pool, and the plug-in that drafts for the run."""
COUNTS = {
    "drafted": "vllm:spec_decode_num_draft_tokens_total",
    "accepted": "vllm:spec_decode_num_accepted_tokens_total",
}


def options(parser: argparse.ArgumentParser) -> None:
    """Add the part's own options."""
    parser.add_argument("--groups", type=int, default=3, help="of eight responses each (default 3)")
    parser.add_argument("--most", type=int, default=256, help="tokens of a response (default 256)")
    parser.add_argument("--chunk", type=int, default=64, help="tokens of a chunk (default 64)")


def run(options: argparse.Namespace) -> list[Row]:
    """Roll the same prompts out in each arm, the arms of one kind of servers after each other."""
    found: dict[str, list[Row]] = {arm: [] for arm in ARMS}
    texts: dict[str, dict[str, list[int]]] = {}
    with tempfile.TemporaryDirectory() as place:
        for drafts in (SEER, NGRAM):
            flags = ["--speculative-config", json.dumps(drafts | {"num_speculative_tokens": 8})]
            with stock_servers(Path(place), *flags) as both:
                for _ in range(options.rounds):
                    for arm in [arm for arm, (its, *_) in ARMS.items() if its is drafts]:
                        row, texts[arm] = roll_out(Path(place), both, arm, options)
                        found[arm].append(row)
                        print(f"{arm}: {row['cpu_s']:.0f} s of CPU", file=sys.stderr, flush=True)
    return [
        {"arm": arm, "same": texts[arm] == texts["none"]}
        | {key: spread_of(each[key] for each in rows) for key in rows[0]}
        for arm, rows in found.items()
    ]


def roll_out(
    folder: Path, both: Sequence[StockServer], arm: str, options: argparse.Namespace
) -> tuple[Row, dict[str, list[int]]]:
    """Return what a rollout has cost, and its responses."""
    _, pool, drafters = ARMS[arm]
    with session_on(both, folder, pool, options.chunk, *drafters) as session:
        usage = ServerUsage(both, COUNTS)
        asked = [each | {"max_tokens": options.most} for each in prompts(options.groups)]
        result = session.rollout(asked, 0)
        spent = usage.spent()
    summary = result.summary
    counts = {
        "tokens": summary.tokens,
        "moves": summary.migrations,
        "prefilled": summary.prefilled_tokens,
        "pool": summary.pool_tokens,
    }
    return counts | spent, {each.request_id: list(each.token_ids) for each in result.completions}


def table(rows: Sequence[Row]) -> str:
    """Return the rows as Markdown."""
    columns = ("drafts", "same tokens", "tokens", "moves", "prefilled", "of the pool", "drafted", "accepted")
    columns += ("steps of a response saved", "CPU of the servers, s")
    shown = []
    for row in rows:
        saved = row["accepted"]["median"] / row["tokens"]["median"]
        counts = [
            cell(row[key], ",.0f") for key in ("tokens", "moves", "prefilled", "pool", "drafted", "accepted")
        ]
        shown.append(
            [row["arm"], "yes" if row["same"] else "NO", *counts, f"{saved:.0%}", cell(row["cpu_s"])]
        )
    return markdown(columns, shown)


def answer(rows: Sequence[Row]) -> str:
    """Return the answer in a sentence."""
    share = {row["arm"]: row["accepted"]["median"] / row["tokens"]["median"] for row in rows}
    rest = {row["arm"]: row["prefilled"]["median"] for row in rows}
    same = "the same" if all(row["same"] for row in rows) else "not the same"
    return (
        f"Seer's drafts save {percent(share['Seer'])} of the steps in vLLM's servers, and vLLM's own n-gram"
        f" drafts {percent(share['n-gram'])}. With shared KV {rest['Seer+KV']:,.0f} tokens are prefilled in"
        f" place of {rest['Seer']:,.0f}. The tokens are {same} in all arms."
    )
