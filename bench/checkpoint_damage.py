"""How does a training go on from a damaged checkpoint?

A small model is trained for two iterations on simulated engines.  Each file of the last checkpoint is damaged
in each way: nine flipped bits, five cuts, gone, a byte too many, zeros in the middle, seven other contents.
Refused is what `--resume` refuses in one sentence that names the file and the checkpoint before.  Then the
damaged checkpoint is deleted, as that sentence says, and the training goes on from the one before; its
metrics are compared with those of a training that nothing disturbed.  Checkpoints of old versions have no
digests: what the trainer takes of those goes on with a warning that damage would not be found.
"""

from __future__ import annotations

import argparse
import importlib
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from seer_rl.checkpoints import Checkpoints
from seer_rl.config import first_model, load_training
from seer_rl.torch_trainer import TorchTrainer

from bench.harness import ROOT, Row, markdown
from seer_core.errors import SeerError

DEPENDS_ON = ("training/rl/seer_rl/checkpoints.py", "training/rl/seer_rl/checkpoint_digests.py")
ROUNDS = 1
ENDS = ("refused", "taken", "another error")


def options(parser: argparse.ArgumentParser) -> None:
    """Add nothing: the damage is that of ``tests/support/damage.py``."""


def run(options: argparse.Namespace) -> list[Row]:
    """Damage each file of a checkpoint with digests, and of one without."""
    sys.path.insert(0, str(ROOT / "training/rl/tests"))
    runs: Any = importlib.import_module("training_runs")
    rows = []
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        config = runs.write_training_on(runs.make_model(folder / "a model", 32_000), folder)
        undisturbed = runs.reproducible(runs.run(config, folder / "whole"))
        runs.run(config, folder / "out", "train.iterations=2")
        for digests in (True, False):
            out = shutil.copytree(folder / "out", folder / f"digests-{digests}")
            if not digests:
                _without_digests(out / "checkpoints" / "000002")
            for file in sorted((out / "checkpoints" / "000002").iterdir()):
                row = {"digests": digests, "file": file.name, **_ends(config, file)}
                if digests:
                    row["same_after"] = _go_on(runs, config, out, file, undisturbed)
                rows.append(row)
                print(row, file=sys.stderr, flush=True)
    return rows


def _without_digests(checkpoint: Path) -> None:
    """Make a checkpoint one of a version that wrote no digests."""
    (checkpoint / "digests.json").unlink()
    state = msgspec.json.decode((checkpoint / "training.json").read_bytes())
    del state["digests"]
    (checkpoint / "training.json").write_bytes(msgspec.json.encode(state))


def _ends(config: Path, file: Path) -> Row:
    """Return how often a checkpoint with a damaged file ended in each way."""
    from tests.support.damage import damage, unlike

    table, settings = load_training(config)
    trainer = TorchTrainer(table, first_model(table, settings), settings.seer.seed)
    content, ends = file.read_bytes(), Counter[str]()
    for _, damaged in unlike(content):
        damage(file, damaged)
        ends[_end(file, trainer)] += 1
        ends["tried"] += 1
    file.write_bytes(content)
    return {"tried": ends["tried"], **{end: ends[end] for end in ENDS}}


def _end(file: Path, trainer: TorchTrainer) -> str:
    root = file.parents[1]
    checkpoints = Checkpoints(root, 2)
    try:
        checkpoint = checkpoints.latest()
        assert checkpoint is not None
        with checkpoints.loading(checkpoint):
            trainer.load(checkpoint.path)
    except SeerError as error:
        sentence = str(error)
        named = "\n" not in sentence and str(root / "000001") in sentence and str(file.parent) in sentence
        return "refused" if named else "another error"
    except Exception:
        return "another error"
    return "taken"


def _go_on(runs: Any, config: Path, out: Path, file: Path, undisturbed: Sequence[Row]) -> bool:
    """Flip a bit, be refused, delete the checkpoint, and go on; return whether the metrics are the same."""
    again = shutil.copytree(out, out.parent / "again")
    damaged = again / "checkpoints" / "000002" / file.name
    content = bytearray(damaged.read_bytes())
    content[len(content) // 2] ^= 4
    damaged.write_bytes(content)
    try:
        runs.run(config, again, resume=True)
    except SeerError:
        shutil.rmtree(damaged.parent)
        runs.run(config, again, resume=True)
        return bool(runs.reproducible(runs.read_metrics(again)) == undisturbed)
    finally:
        shutil.rmtree(again)
    return False


def table(rows: Sequence[Row]) -> str:
    """Return a line for each file, with digests and without."""
    columns = ["checkpoint", "file", "damaged", *ENDS, "same metrics from the one before"]
    lines = [
        [
            "with digests" if row["digests"] else "of an old version",
            f"`{row['file']}`",
            *(str(row[key]) for key in ("tried", *ENDS)),
            {True: "yes", False: "no", None: ""}[row.get("same_after")],
        ]
        for row in rows
    ]
    return markdown(columns, lines, 2)


def answer(rows: Sequence[Row]) -> str:
    """Return how many damaged checkpoints were refused."""

    def count(digests: bool, key: str) -> int:
        return sum(row[key] for row in rows if row["digests"] is digests)

    same = sum(row["same_after"] for row in rows if row["digests"])
    files = sum(row["digests"] for row in rows)
    return (
        f"Of {count(True, 'tried')} damaged checkpoints {count(True, 'refused')} were refused in one sentence"
        f" with the one before, and {same} of {files} trainings went on from that with the same metrics. Of"
        f" {count(False, 'tried')} without digests, {count(False, 'refused')} were refused likewise,"
        f" {count(False, 'taken')} taken with a warning, and {count(False, 'another error')} ended otherwise."
    )
