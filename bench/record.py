"""Pack a finished ``seer run`` into a data file: ``python -m bench.record PROMPTS RUN FILE.npz``.

The arrays are those that `seer replay` reads: all token ids, where each text ends, its group's number, and
its number in the group, -1 for the prompt.  The token that ended a response is left out.
"""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
import numpy as np
from seer_worker.tokenizer import ModelTokenizer

from bench.harness import EXAMPLE


def pack(prompts: Path, run: Path, file: Path) -> None:
    """Write the prompts and the finished responses of a run of the bundled model."""
    tokenizer = ModelTokenizer(EXAMPLE / "weights")
    texts = {}
    lines = prompts.read_bytes().splitlines()
    numbers = {record["group_id"]: n for n, record in enumerate(map(msgspec.json.decode, lines))}
    for record in map(msgspec.json.decode, lines):
        texts[numbers[record["group_id"]], -1] = tokenizer.encode(record["prompt"])
    for record in map(msgspec.json.decode, (run / "completions.jsonl").read_bytes().splitlines()):
        if record["finish_reason"] != "stop":
            raise SystemExit(f"{record['request_id']} was cut: record with a larger max_tokens")
        texts[numbers[record["group_id"]], record["index"]] = record["token_ids"][:-1]
    keys = sorted(texts)
    np.savez_compressed(
        file,
        tokens=np.concatenate([np.asarray(texts[key], np.uint16) for key in keys]),
        offsets=np.cumsum([0, *(len(texts[key]) for key in keys)]),
        group=np.asarray([group for group, _ in keys], np.int32),
        response=np.asarray([response for _, response in keys], np.int32),
    )


if __name__ == "__main__":
    pack(*map(Path, sys.argv[1:]))
