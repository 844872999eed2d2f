"""Agreement of engines: with the same seeds, how many responses are token for token the same on each?

Rolls the same prompts out on the instances of one engine after the other, at temperature 0 and 1, and
compares every response with the first engine's.  For one that differs it reports the first place at which it
does, and how far the two tokens are apart there, by logits that transformers computes in float64 from the
text before:

  log-prob gap  between the two tokens
  choice gap    between what keyed sampling compares: log-prob / temperature + noise

The choice gap is how much rounding it took to choose the other token.

  python examples/tiny_reasoner/task.py --groups 320 --n 1 --seed 7 --out prompts.jsonl
  python benchmarks/engines_agree.py --prompts prompts.jsonl --json out/engines_agree.json
"""

from __future__ import annotations

import argparse
import asyncio
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import structlog
import torch
from equality import EXAMPLE
from seer_host.keyed import gumbel, noise_steps
from transformers import AutoModelForCausalLM

from seer_core.config import load_config
from seer_core.model import Completion, PromptGroup, Sampling
from seer_core.prompts import read_prompts
from seer_core.runtime import Runtime

Row = dict[str, Any]


async def roll_out(
    engine: str, options: argparse.Namespace
) -> tuple[dict[float, dict[str, Completion]], dict[str, PromptGroup]]:
    """Return an engine's completions by temperature and request, and the prompts by group."""
    config = load_config(EXAMPLE / "demo.toml", [*options.set, f"seer.engine={engine}"])
    found = {}
    async with Runtime.from_config(config.with_plugins(options.plugins)) as runtime:
        fleet = runtime.fleet
        read = read_prompts(options.prompts, config.rollout, fleet.model, fleet.tokenizer)
        groups = read.groups[options.first :][: options.groups]
        for temperature in options.temperatures:
            now = [msgspec.structs.replace(each, sampling=Sampling(temperature)) for each in groups]
            result = await runtime.rollout(now).wait()
            found[temperature] = {each.request_id: each for each in result.completions}
            print(
                f"{engine}, T={temperature:g}: {result.summary.tokens:,} tokens in"
                f" {result.summary.total_time_s:.0f} s",
                flush=True,
            )
    return found, {group.id: group for group in groups}


class Reference:
    """The model in float64, for one position at a time."""

    def __init__(self, model_dir: Path) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float64)

    @torch.no_grad()
    def difference(self, group: PromptGroup, ours: Completion, theirs: Completion, temperature: float) -> Row:
        """Describe the first place at which two responses differ."""
        place = next(
            i
            for i, (a, b) in enumerate(zip([*ours.token_ids, None], [*theirs.token_ids, None], strict=False))
            if a != b
        )
        text = [*group.prompt_token_ids, *ours.token_ids[:place]]
        logprobs = self._model(torch.tensor([text])).logits[0, -1].log_softmax(-1)
        scores = logprobs
        if temperature:
            seeds, positions = torch.tensor([ours.seed]), torch.tensor([len(text)])
            scores = logprobs / temperature + gumbel(seeds, positions, noise_steps(len(logprobs)))[0]
        tokens = [ours.token_ids[place], theirs.token_ids[place]]
        best = int(scores.argmax())
        return {
            "request": ours.request_id,
            "place": place,
            "tokens": tokens,
            "logprobs": [float(logprobs[token]) for token in tokens],
            "logprob_gap": abs(float(logprobs[tokens[0]] - logprobs[tokens[1]])),
            "choice_gap": abs(float(scores[tokens[0]] - scores[tokens[1]])),
            "chosen_in_float64": tokens.index(best) if best in tokens else None,
        }


def compare(
    engines: tuple[str, str],
    temperature: float,
    ours: Mapping[str, Completion],
    theirs: Mapping[str, Completion],
    groups: Mapping[str, PromptGroup],
    reference: Reference,
) -> Row:
    """Compare two engines' responses at one temperature."""
    pairs = [(ours[name], theirs[name]) for name in ours]
    differing = [(a, b) for a, b in pairs if a.token_ids != b.token_ids]
    apart = [
        abs(x - y)
        for a, b in pairs
        if a.token_ids == b.token_ids
        for x, y in zip(a.logprobs, b.logprobs, strict=True)
    ]
    return {
        "engines": engines,
        "temperature": temperature,
        "responses": len(pairs),
        "tokens": sum(len(each.token_ids) for each in ours.values()),
        "differing_responses": len(differing),
        "share_equal": 1 - len(differing) / len(pairs),
        "mean_logprob_difference": sum(apart) / max(1, len(apart)),
        "largest_logprob_difference": max(apart, default=0.0),
        "differences": [reference.difference(groups[a.group_id], a, b, temperature) for a, b in differing],
    }


async def main(options: argparse.Namespace) -> list[Row]:
    """Roll out on every engine, and compare each with the first."""
    found = {}
    for engine in options.engines:
        found[engine], groups = await roll_out(engine, options)
    reference = Reference(EXAMPLE / "weights")
    first, *others = options.engines
    return [
        compare(
            (first, other),
            temperature,
            found[first][temperature],
            found[other][temperature],
            groups,
            reference,
        )
        for other in others
        for temperature in options.temperatures
    ]


def report(row: Row) -> None:
    """Print what one comparison has found."""
    print(
        f"{' and '.join(row['engines'])}, T={row['temperature']:g}: {row['responses']} responses,"
        f" {row['tokens']:,} tokens; {row['share_equal']:.2%} of the responses are equal; log-probs of these"
        f" differ by {row['mean_logprob_difference']:.1e}, {row['largest_logprob_difference']:.1e} at most"
    )
    for each in row["differences"]:
        print(
            f"  {each['request']} from place {each['place']}: log-prob gap {each['logprob_gap']:.1e},"
            f" choice gap {each['choice_gap']:.1e}"
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--engines", nargs="+", default=["vllm", "sglang"], help="the first is compared with")
    parser.add_argument("--plugins", nargs="*", default=[], help="enabled plug-ins (default none)")
    parser.add_argument("--prompts", type=Path, default=EXAMPLE / "prompts.jsonl", help="as for seer run")
    parser.add_argument("--groups", type=int, help="prompt groups to roll out (default all)")
    parser.add_argument("--first", type=int, default=0, help="number of the first of them (default 0)")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0], help="(default 0 and 1)")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="as for seer run")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows as JSON")
    arguments = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    rows = asyncio.run(main(arguments))
    for row in rows:
        report(row)
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_bytes(msgspec.json.format(msgspec.json.encode(rows)) + b"\n")
