"""Do deaths of a run's processes on vLLM engines lose a response, change a token, or leave a process behind?

`seer run` rolls out prompts of the bundled example on two vLLM engines with a local KV pool and drafts.  At a
random moment of its rollout, and now and then of its start, the driver, a worker or the fork server is killed
with SIGKILL, and again at another, until the run is over; after a death of the driver the same command with
--resume goes on.  Tokens and finish reasons are compared with those of a run that nothing disturbed.  A
process that has outlived its driver for a minute, and a journal that is left at the end, are complaints.
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

import psutil
from seer_cli.status import STATUS

from bench.harness import EXAMPLE, Row, markdown

DEPENDS_ON = ("seer_core", "plugins/journal", "backends/vllm", "backends/worker", "backends/kv_local")
ROUNDS = 1
VICTIMS = {"the driver": "seer_main", "a worker": "seer worker vllm", "the fork server": "seer fork server"}
"""With a part of the title of each."""
PAUSE_S, LOOK_S, GONE_WITHIN_S = (0.1, 4.0), 0.1, 60.0
OF_STARTS = 0.2
"""The share of deaths whose moment is counted from a start, and not from when responses are written."""
OFTEN = ("--set", "seer.restarts.attempts=1000", "--set", "seer.restarts.backoff_s=0")
TOTAL = "total"


def options(parser: argparse.ArgumentParser) -> None:
    """Add the case's own options."""
    parser.add_argument("--deaths", type=int, default=60, help="if there is time (default 60)")
    parser.add_argument("--minutes", type=float, default=60, help="no further run after so long (default 60)")
    parser.add_argument("--groups", type=int, default=16, help="prompts of each run (default 16)")
    parser.add_argument("--seed", type=int, default=1, help="(default 1)")


def run(options: argparse.Namespace) -> list[Row]:
    """Let runs die until there have been enough deaths; return a row for each victim, and one for all."""
    chance, end_s = random.Random(options.seed), time.monotonic() + 60 * options.minutes
    deaths: Counter[tuple[str, bool]] = Counter()
    """By victim, and whether responses were being written."""
    found: Counter[str] = Counter()
    complaints: list[str] = []
    with tempfile.TemporaryDirectory() as name:
        prompts = Path(name, "prompts.jsonl")
        lines = (EXAMPLE / "prompts.jsonl").read_text().splitlines(keepends=True)
        prompts.write_text("".join(lines[: options.groups]))
        command = [
            sys.executable,
            "-c",
            "from seer_main import main; main()",
            "run",
            str(EXAMPLE / "demo.toml"),
        ]
        command += ["--prompts", str(prompts), *OFTEN, "--resume", "--out"]
        subprocess.run([*command, str(Path(name, "whole"))], check=True, stdout=subprocess.DEVNULL)
        expected = {each["request_id"]: _facts(each) for each in _responses(Path(name, "whole"))}
        while deaths.total() < options.deaths and time.monotonic() < end_s and not complaints:
            out = Path(name, f"run-{found['runs']}")
            while not _live([*command, str(out)], out, chance, options.deaths, deaths, complaints):
                found["lives"] += 1
            written = _responses(out)
            ids = Counter(each["request_id"] for each in written)
            found.update(runs=1, lives=1, responses=len(expected), doubled=ids.total() - len(ids))
            found["lost"] += len(expected.keys() - ids.keys())
            found["wrong"] += sum(expected[each["request_id"]] != _facts(each) for each in written)
            complaints += [f"left behind: {each}" for each in out.rglob("*.journal")]
            print(f"{deaths.total()} deaths: {dict(found)}", file=sys.stderr, flush=True)
    rows: list[Row] = [
        {"victim": each, "deaths": deaths[each, True] + deaths[each, False], "in_rollout": deaths[each, True]}
        for each in VICTIMS
    ]
    counts = {each: found[each] for each in ("runs", "lives", "responses", "lost", "doubled", "wrong")}
    return [*rows, {"victim": TOTAL, "deaths": deaths.total(), **counts, "complaints": complaints}]


def _live(
    command: Sequence[str],
    out: Path,
    chance: random.Random,
    most: int,
    deaths: Counter[tuple[str, bool]],
    flaws: list[str],
) -> bool:
    """Live until the run or the driver ends; return whether it is not to be gone on with."""
    errors = out.with_suffix(".log")
    with errors.open("w") as log:
        driver = psutil.Popen(command, stdout=subprocess.DEVNULL, stderr=log)
    while deaths.total() < most:
        rolls_out = chance.random() < OF_STARTS
        while not rolls_out and not _over(driver, LOOK_S):
            rolls_out = _rolls_out(out, driver)
        if _over(driver, chance.uniform(*PAUSE_S)):
            break
        victim, rolls_out = chance.choice([*VICTIMS]), _rolls_out(out, driver)
        children = driver.children(recursive=True)
        of_kind = [each for each in (driver, *children) if _titled(each, VICTIMS[victim])]
        if of_kind:
            chance.choice(of_kind).kill()
            deaths[victim, rolls_out] += 1
        if of_kind == [driver]:
            driver.wait()
            _, alive = psutil.wait_procs(children, GONE_WITHIN_S)
            flaws += [f"outlived the driver: {each}" for each in alive]
            return bool(alive)
    if driver.wait():
        flaws.append(f"ended with {driver.returncode}: {errors.read_text()[-2000:]}")
    return True


def _over(process: psutil.Popen, within_s: float) -> bool:
    try:
        process.wait(within_s)
    except psutil.TimeoutExpired:
        return False
    return True


def _rolls_out(out: Path, driver: psutil.Popen) -> bool:
    try:
        status = json.loads((out / STATUS).read_bytes())
    except (OSError, ValueError):
        return False
    return bool(status["pid"] == driver.pid and status["doing"] == "rolling out")


def _titled(process: psutil.Process, words: str) -> bool:
    try:
        return words in " ".join(process.cmdline())
    except psutil.Error:
        return False


def _responses(out: Path) -> list[dict[str, Any]]:
    return [*map(json.loads, (out / "completions.jsonl").read_bytes().splitlines())]


def _facts(response: dict[str, Any]) -> tuple[Any, Any]:
    return response["token_ids"], response["finish_reason"]


def table(rows: Sequence[Row]) -> str:
    """Return the deaths by victim, and what came of the responses."""
    *kinds, found = rows
    words = (
        f"{found['runs']} rollouts of {found['responses']:,} responses in {found['lives']} lives of the"
        f" command: {found['lost']} lost, {found['doubled']} twice, {found['wrong']} with a wrong token."
    )
    lines = [[row["victim"], f"{row['deaths']}", f"{row['in_rollout']}"] for row in kinds]
    columns = ["killed", "deaths", "while responses were written"]
    return "\n\n".join([words, *found["complaints"], markdown(columns, lines)])


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
