"""Do deaths of a run's processes on vLLM engines lose a response, change a token, or leave a process behind?

`seer run` rolls out prompts of the bundled example on two vLLM engines with a local KV pool and drafts.  Once
its journal has grown by a random number of bytes, or at random within its first three seconds, the driver or
one of its children (a worker, the fork server, the reader of the tokenizer) is killed with SIGKILL, sometimes
two at once.  The same command with --resume goes on until the run is done.  Its tokens and finish reasons are
compared with those of a run that nothing disturbed.  Within a minute of a death of the driver no process of
the run may be left, and after the run no shared memory and no journal.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.harness import EXAMPLE, Row, markdown

DEPENDS_ON = ("seer_core", "plugins/journal", "backends/vllm", "backends/worker", "tests/soak/campaign.py")
ROUNDS = 1
VICTIMS = {"SIGKILL": "the driver", "child": "a child"}
LIFE_BYTES = 15_000
TOTAL = "total"


def options(parser: argparse.ArgumentParser) -> None:
    """Add the case's own options."""
    parser.add_argument(
        "--deaths", type=int, default=60, help="at least so many, if there is time (default 60)"
    )
    parser.add_argument("--minutes", type=float, default=60, help="no further run after so long (default 60)")
    parser.add_argument("--groups", type=int, default=6, help="prompts of each run (default 6)")
    parser.add_argument("--seed", type=int, default=1, help="(default 1)")


def run(options: argparse.Namespace) -> list[Row]:
    """Let runs die until there have been enough deaths; return a row for each victim, and one for all."""
    from tests.soak.campaign import Campaign

    chance = random.Random(options.seed)
    deaths: Counter[str] = Counter()
    found: Counter[str] = Counter()
    complaints: list[str] = []
    end_s = time.monotonic() + 60 * options.minutes
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        lines = (EXAMPLE / "prompts.jsonl").read_text().splitlines(keepends=True)[: options.groups]
        (folder / "prompts.jsonl").write_text("".join(lines))
        arguments = ["run", str(EXAMPLE / "demo.toml"), "--prompts", str(folder / "prompts.jsonl")]
        arguments += [word for each in options.set for word in ("--set", each)]
        expected = _undisturbed(arguments, folder / "undisturbed")
        while deaths.total() < options.deaths and time.monotonic() < end_s and not complaints:
            place = folder / f"run-{found['runs']}"
            campaign = Campaign(arguments, place, chance, _responses, [*VICTIMS], LIFE_BYTES)
            written = campaign.finish()
            complaints += campaign.complaints
            deaths += campaign.deaths
            ids = Counter(each["request_id"] for each in written)
            found.update(runs=1, lives=campaign.lives, responses=len(expected))
            found.update(lost=len(expected.keys() - ids.keys()), doubled=ids.total() - len(ids))
            found.update(wrong=sum(expected[each["request_id"]] != _facts(each) for each in written))
            print(f"{deaths.total()} deaths: {dict(found)}", file=sys.stderr, flush=True)
    rows: list[Row] = [{"victim": VICTIMS[kind], "deaths": deaths[kind]} for kind in VICTIMS]
    counts = {each: found[each] for each in ("runs", "lives", "responses", "lost", "doubled", "wrong")}
    return [*rows, {"victim": TOTAL, "deaths": deaths.total(), **counts, "complaints": complaints}]


def _undisturbed(arguments: Sequence[str], out: Path) -> dict[str, Any]:
    command = [sys.executable, "-c", "from seer_main import main; main()", *arguments, "--out", str(out)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return {each["request_id"]: _facts(each) for each in _responses(out)}


def _responses(out: Path) -> list[dict[str, Any]]:
    return [*map(json.loads, (out / "completions.jsonl").read_bytes().splitlines())]


def _facts(response: dict[str, Any]) -> tuple[Any, Any]:
    return response["token_ids"], response["finish_reason"]


def table(rows: Sequence[Row]) -> str:
    """Return the deaths by victim, and what came of the responses."""
    lines = [[row["victim"], f"{row['deaths']}"] for row in rows if row["victim"] != TOTAL]
    *_, found = rows
    words = (
        f"{found['runs']} rollouts of {found['responses']:,} responses in {found['lives']} lives of the"
        f" command: {found['lost']} lost, {found['doubled']} twice, {found['wrong']} with a wrong token."
    )
    return "\n\n".join([words, *found["complaints"], markdown(["killed", "deaths"], lines)])


def answer(rows: Sequence[Row]) -> str:
    """Return what the deaths have cost."""
    *_, found = rows
    deaths = f"{found['deaths']} deaths of processes of runs on vLLM"
    if not (found["lost"] or found["doubled"] or found["wrong"] or found["complaints"]):
        return f"{deaths} cost none of {found['responses']:,} responses."
    return (
        f"{deaths}, {found['responses']:,} responses: {found['lost']} lost, {found['doubled']} twice,"
        f" {found['wrong']} wrong; complaints: {len(found['complaints'])}."
    )
