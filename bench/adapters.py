"""What does an update by an adapter cost beside whole weights, and are the tokens those of merged weights?

The bundled model gets random LoRA adapters of rank 16 on every matrix of a layer.
``beside``: an instance with `lora_rank = 16` keeps the adapter beside the model.  ``merged``: one without
loads the model's weights once more, with the adapter added to them.  ``whole``: the sums are saved as whole
weights, and loaded as such.  The bytes are those of the files that a trainer writes, the seconds those of
`update_weights`, with copy, checks, load and proof.

All ways write the same responses with the same seeds, in one batch; ``batch`` writes those of ``whole`` in
chunks on two instances, which is the engine's own difference, if it has any.  A response counts as different
if one token is.  The differences of log-probs are over the tokens before the first that differs.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean
from time import perf_counter
from typing import Any

from seer_host.config_files import make_config
from seer_session import Session

from bench.harness import EXAMPLE, ROOT, Row, cell, markdown, prompts, spread_of
from bench.models import write_adapter
from seer_core.model import Completion

DEPENDS_ON = ("backends/vllm", "backends/worker", "host/seer_host/weight_copies.py", "seer_core")
ROUNDS = 5
MODEL = EXAMPLE / "weights"
RANK, GAIN = 16, 0.02
GROUPS, RESPONSES, TOKENS, CHUNK_TOKENS = 16, 4, 256, 24
MATRICES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
WAYS = {
    "beside": "adapter beside the model",
    "merged": "adapter, merged on load",
    "whole": "whole weights",
    "batch": "whole weights, in chunks",
}

Texts = Mapping[str, Completion]


def options(parser: argparse.ArgumentParser) -> None:
    """Add none."""


def run(options: argparse.Namespace) -> list[Row]:
    """Update and roll out in each way; the last round's responses are compared."""
    found: dict[str, Texts] = {}
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    with tempfile.TemporaryDirectory() as folder:
        places = [
            write_adapter(Path(folder) / f"{number}", MODEL, number, RANK, GAIN, MATRICES)
            for number in range(options.rounds + 1)  # the first warms up
        ]
        with _session(RANK, options.set) as session:
            for adapter, _ in places:
                seconds["beside"].append(_update(session, adapter))
            found["beside"] = _written(session)
        with _session(0, options.set) as session:
            for adapter, _ in places:
                seconds["merged"].append(_update(session, adapter))
            found["merged"] = _written(session)
            for _, whole in places:
                seconds["whole"].append(_update(session, whole))
            found["whole"] = _written(session)
        with _session(0, [*options.set, f"plugin.divided_rollout.chunk_tokens={CHUNK_TOKENS}"], 2) as session:
            session.update_weights(places[-1][1])
            found["batch"] = _written(session)
        sizes = {way: _bytes(places[-1][way == "whole"]) for way in ("beside", "merged", "whole")}
    return [
        {
            "way": way,
            **({"update_s": spread_of(seconds[way][1:]), "bytes": sizes[way]} if way in sizes else {}),
            **_compared(found["whole"], found[way]),
        }
        for way in WAYS
    ]


def _bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


@contextmanager
def _session(lora_rank: int, overrides: Sequence[str], instances: int = 1) -> Iterator[Session]:
    table = {
        "model": str(MODEL),
        "dtype": "float32",
        "instances": instances,
        "lora_rank": lora_rank,
        "kv_cache_bytes": 64 << 20,
        "max_model_tokens": 1024,
        "max_running": GROUPS * RESPONSES,
        "start_timeout_s": 600.0,
    }
    plugins = ["divided_rollout"] if instances > 1 else []
    tree = {"seer": {"engine": "vllm", "plugins": plugins}, "engine": {"vllm": table}}
    with Session(make_config(tree, overrides, base_dir=ROOT, origin="bench")) as session:
        yield session


def _update(session: Session, folder: Path) -> float:
    begun = perf_counter()
    session.update_weights(folder)
    return perf_counter() - begun


def _written(session: Session) -> Texts:
    records = [
        {**each, "n": RESPONSES, "max_tokens": TOKENS, "temperature": 1.0, "seed": number}
        for number, each in enumerate(prompts(GROUPS))
    ]
    return {each.request_id: each for each in session.stream(records, iteration=0)}


def _compared(expected: Texts, found: Texts) -> Row:
    """Return how many responses differ, and by how much log-probs do while the tokens are the same."""
    different, gaps = 0, []
    for name, each in expected.items():
        other = found[name]
        same = next(
            (at for at, (a, b) in enumerate(zip(each.token_ids, other.token_ids, strict=False)) if a != b),
            min(len(each.token_ids), len(other.token_ids)),
        )
        different += [*each.token_ids] != [*other.token_ids]
        pairs = zip(each.logprobs[:same], other.logprobs[:same], strict=True)
        gaps += [abs(a - b) for a, b in pairs]
    return {
        "responses": len(expected),
        "tokens": sum(len(each.token_ids) for each in expected.values()),
        "different": different,
        "dlogp_mean": fmean(gaps),
        "dlogp_max": max(gaps),
    }


def table(rows: Sequence[Row]) -> str:
    """Return the rows as Markdown."""
    return markdown(
        ("update", "bytes", "seconds", "responses that differ", "log-probs, mean", "most"),
        [
            (
                WAYS[row["way"]],
                f"{row['bytes']:,}" if "bytes" in row else "",
                cell(row["update_s"], ",.2f") if "update_s" in row else "",
                f"{row['different']} of {row['responses']}",
                f"{row['dlogp_mean']:.1e}",
                f"{row['dlogp_max']:.1e}",
            )
            for row in rows
        ],
    )


def answer(rows: Sequence[Row]) -> str:
    """Return the bytes and seconds of each way, and whether the tokens are the same."""
    by_way: dict[str, Any] = {row["way"]: row for row in rows}
    sizes = {way: f"{row['bytes'] / 1e6:.1f} MB" for way, row in by_way.items() if "bytes" in row}
    seconds = {way: f"{row['update_s']['median']:.2f} s" for way, row in by_way.items() if "update_s" in row}
    different = sum(row["different"] for row in rows)
    return (
        f"Whole weights of {sizes['whole']} take {seconds['whole']}. An adapter of {sizes['beside']} takes"
        f" {seconds['beside']} beside the model, and {seconds['merged']} merged. Of {rows[0]['responses']}"
        f" responses, {different or 'none'} differ between them."
    )
