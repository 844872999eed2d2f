"""Are responses the same token for token, under each sampling control, however they are scheduled?

The bundled example's model on real engines writes the same prompts twice: whole, as the baseline does, and
in chunks that move between two instances, with drafts of the group and a KV pool.  All controls share each
rollout, so that batches mix them.  A control has done enough when it has written ``--tokens`` tokens.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Sequence
from itertools import islice, pairwise
from math import ceil
from typing import Any

from seer_host.config_files import Config, load_config
from seer_session.session import Session

from bench.harness import EXAMPLE, Row, markdown, prompts
from seer_core.model import Completion

DEPENDS_ON = (
    "seer_core",
    "backends/worker",
    "backends/vllm",
    "backends/sglang",
    "backends/kv_local",
    "plugins",
)
ROUNDS = 1

CHUNK_TOKENS = 96
MAX_TOKENS = 768
GROUPS = 14
"""Prompts of one control in one rollout at most, eight responses each."""
GROUP_TOKENS = 2000
"""What the responses to one prompt have at the least, by experience."""

WORDS = ["so", "step", "plus", "gives", "makes", "past", "miss", "yet", "hmm", "far", "ready", "think"]
"""Words of the example's vocabulary, none of which begins with another one."""
CONTROLS: dict[str, dict[str, Any]] = {
    "temperature 1": {},
    "temperature 0.7": {"temperature": 0.7},
    "greedy": {"temperature": 0.0},
    "top_k, top_p": {"top_k": 12, "top_p": 0.9},
    "min_p": {"min_p": 0.05},
    "repetition_penalty": {"repetition_penalty": 1.05},
    "presence_penalty, frequency_penalty": {"presence_penalty": 0.4, "frequency_penalty": 0.01},
    "logit_bias": {"logit_bias": {"4": 1.0, "20": -2.0, "2": -4.0}},
    "allowed_token_ids": {"allowed_token_ids": [2, *range(4, 60, 2), *range(5, 40, 4)]},
    "bad_words": {"bad_words": ["wait", "step 1", "so and"]},
    "min_tokens": {"min_tokens": 500},
    "ignore_eos": {"ignore_eos": True},
    "stop": {"stop": ["verify be", "9 9", "enough stop"], "include_stop_str_in_output": True},
    "stop_token_ids": {"stop_token_ids": [64, 67]},
    "top_logprobs": {"top_logprobs": 20},
    "prompt_logprobs": {"prompt_logprobs": 5},
    "structured_outputs: regex": {"structured_outputs": {"regex": "(step[0-9]{1,3}(gives|makes|is)){20,60}"}},
    "structured_outputs: choice": {
        "structured_outputs": {
            "choice": ["".join(random.Random(number).choices(WORDS, k=300)) for number in range(40)]
        }
    },
    "structured_outputs: grammar": {
        "structured_outputs": {
            "grammar": 'root ::= sum sum sum sum | sum sum root\nsum ::= n "plus" n "=" n\nn ::= [0-9] [0-9]'
        }
    },
}
"""Fields of a prompt, by the name of their row."""
TOGETHER = "several together, drawn for each prompt"


def options(parser: argparse.ArgumentParser) -> None:
    """Add the case's own options."""
    parser.add_argument("--engine", default="vllm", help="vllm or sglang (default vllm)")
    parser.add_argument("--tokens", type=int, default=100_000, help="of each control (default 100,000)")
    parser.add_argument("--only", nargs="+", choices=[*CONTROLS, TOGETHER], help="some controls alone")


def configs(options: argparse.Namespace) -> tuple[Config, Config]:
    """Return the configs of whole responses, and of responses in chunks with drafts and a pool."""
    settings = [
        f"seer.engine={options.engine}",
        f"plugin.divided_rollout.chunk_tokens={CHUNK_TOKENS}",
        *options.set,
    ]
    config = load_config(EXAMPLE / "demo.toml", settings)
    return config.with_plugins(()), config


def records(control: str, number: int, groups: int) -> list[dict[str, Any]]:
    """Return the prompts of one control in rollout ``number``; each rollout has other seeds."""
    found = []
    for place, prompt in enumerate(islice(prompts(), groups)):
        random_ = random.Random(f"{control}/{number}/{place}")
        found.append(
            {
                "prompt": prompt["prompt"],
                "n": prompt["n"],
                "group_id": f"{control}/{number}/{place}",
                "seed": random_.randrange(1 << 31),
                "max_tokens": MAX_TOKENS,
                "temperature": 1.0,
                "metadata": {"control": control},
                **(CONTROLS[control] if control in CONTROLS else _drawn(random_)),
            }
        )
    return found


def _drawn(random_: random.Random) -> dict[str, Any]:
    """Return the fields of two to five controls; of two with the same field the later one holds."""
    chosen = random_.sample(list(CONTROLS), random_.randint(2, 5))
    return {field: value for name in chosen for field, value in CONTROLS[name].items()}


def run(options: argparse.Namespace) -> list[Row]:
    """Roll out until every control has its tokens; return a row for each."""
    controls = options.only or [*CONTROLS, TOGETHER]
    rows: dict[str, Row] = {
        control: {
            "engine": options.engine,
            "control": control,
            "responses": 0,
            "tokens": 0,
            "differing_responses": 0,
            "chunks": 0,
            "moves": 0,
            "drafted_tokens": 0,
            "largest_logprob_difference": 0.0,
        }
        for control in controls
    }
    whole, divided = configs(options)
    with Session(whole) as one, Session(divided) as other:
        number, groups = 0, min(GROUPS, ceil(options.tokens / GROUP_TOKENS))
        while short := [control for control in controls if rows[control]["tokens"] < options.tokens]:
            asked = [record for control in short for record in records(control, number, groups)]
            random.Random(number).shuffle(asked)
            written = [sorted(each.rollout(asked).completions, key=_order) for each in (one, other)]
            for expected, found in zip(*written, strict=True):
                count(rows[expected.metadata["control"]], expected, found)
            number += 1
            done = min(row["tokens"] for row in rows.values())
            differing = sum(row["differing_responses"] for row in rows.values())
            print(
                f"rollout {number}: {len(short)} controls, each has {done:,} of {options.tokens:,} tokens"
                f" or more; {differing} responses differ",
                file=sys.stderr,
                flush=True,
            )
    return list(rows.values())


def count(row: Row, expected: Completion, found: Completion) -> None:
    """Add a response that was written twice to the row of its control."""
    row["responses"] += 1
    row["tokens"] += len(expected.token_ids)
    row["chunks"] += len(found.chunks)
    row["moves"] += sum(one.instance != other.instance for one, other in pairwise(found.chunks))
    row["drafted_tokens"] += sum(sum(chunk.accepted_at) for chunk in found.chunks)
    if _outcome(expected) != _outcome(found):
        row["differing_responses"] += 1
        return
    pairs = zip(expected.logprobs, found.logprobs, strict=True)
    most = max((abs(float(one) - float(other)) for one, other in pairs), default=0.0)
    row["largest_logprob_difference"] = max(row["largest_logprob_difference"], most)


def _order(completion: Completion) -> str:
    return completion.request_id


def _outcome(completion: Completion) -> tuple[Any, ...]:
    """Return what has to be the same of a response."""
    return (
        completion.request_id,
        [int(token) for token in completion.token_ids],
        completion.text,
        completion.finish_reason,
        completion.stop_reason,
    )


def table(rows: Sequence[Row]) -> str:
    """Return one line for each control."""
    columns = ["engine", "control", "responses", "tokens", "chunks", "moves", "tokens from drafts"]
    columns += ["log-probs differ by at most", "responses that differ"]
    lines = [
        [
            row["engine"],
            row["control"],
            *(f"{row[name]:,}" for name in ("responses", "tokens", "chunks", "moves", "drafted_tokens")),
            f"{row['largest_logprob_difference']:.1e}",
            f"{row['differing_responses']:,}",
        ]
        for row in rows
    ]
    return markdown(columns, lines, left=2)


def answer(rows: Sequence[Row]) -> str:
    """Return how many responses differ of how many."""
    differing = sum(row["differing_responses"] for row in rows)
    return (
        f"Of {sum(row['responses'] for row in rows):,} responses of {sum(row['tokens'] for row in rows):,}"
        f" tokens under {len(rows)} sampling controls, {differing or 'none'} differ between rollouts whole"
        " and in chunks that move and draft."
    )
