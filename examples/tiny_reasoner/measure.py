"""Roll the tiny reasoner out in vLLM and measure what a rollout scheduler would meet."""

import argparse
import json
import math
import os
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

import task

HERE = Path(__file__).parent
NGRAM = 8

Tokens = Sequence[int]


def ngrams(tokens: Tokens) -> list[tuple[int, ...]]:
    """Return every run of eight tokens."""
    return [tuple(tokens[i : i + NGRAM]) for i in range(len(tokens) - NGRAM + 1)]


def shared_share(response: Tokens, others: Sequence[Tokens]) -> float:
    """Return the share of a response's 8-grams that occur in any of the other responses."""
    known = {gram for other in others for gram in ngrams(other)}
    grams = ngrams(response)
    return sum(gram in known for gram in grams) / max(1, len(grams))


def shared_wording(groups: Sequence[Sequence[Tokens]]) -> tuple[float, float]:
    """Return the mean shared share against the siblings, and against as many of the next group."""
    siblings, strangers = [], []
    for group, stranger_group in zip(groups, [*groups[1:], groups[0]], strict=True):
        for i, response in enumerate(group):
            others = [*group[:i], *group[i + 1 :]]
            siblings.append(shared_share(response, others))
            strangers.append(shared_share(response, stranger_group[: len(others)]))
    return statistics.fmean(siblings), statistics.fmean(strangers)


def roll_out(rows: Sequence[dict], args: argparse.Namespace) -> list[list[dict]]:
    """Sample every group; return tokens, text, nats and reward of each response."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM, SamplingParams

    llm = LLM(
        str(args.model),
        dtype=args.dtype,
        max_model_len=4096,
        max_num_seqs=64,
        kv_cache_memory_bytes=1 << 30,
        block_size=32,
        enforce_eager=True,
    )
    prompts, params = [], []
    for row in rows:
        for i in range(row["n"]):
            prompts.append(row["prompt"])
            params.append(
                SamplingParams(
                    temperature=row["temperature"],
                    top_k=0,
                    top_p=1.0,
                    max_tokens=row["max_tokens"],
                    seed=row["seed"] + i,
                    logprobs=0,
                )
            )
    results = iter(llm.generate(prompts, params))
    groups = []
    for row in rows:
        group = []
        for _ in range(row["n"]):
            [output] = next(results).outputs
            group.append(
                {
                    "tokens": list(output.token_ids),
                    "text": output.text,
                    "nats": -output.cumulative_logprob,
                    "cut": output.finish_reason == "length",
                    "reward": task.reward(row["metadata"], output.text),
                }
            )
        groups.append(group)
    return groups


def summarize(groups: Sequence[Sequence[dict]]) -> dict[str, float]:
    """Return the numbers of the README's table."""
    responses = [response for group in groups for response in group]
    lengths = sorted(len(response["tokens"]) for response in responses)
    siblings, strangers = shared_wording([[response["tokens"] for response in group] for group in groups])
    rewards = [statistics.fmean(response["reward"] for response in group) for group in groups]

    def quantile(q: float) -> int:
        return lengths[min(len(lengths) - 1, math.floor(q * len(lengths)))]

    return {
        "groups": len(groups),
        "responses": len(responses),
        "mean_tokens": statistics.fmean(lengths),
        "median_tokens": quantile(0.5),
        "p90_tokens": quantile(0.9),
        "p99_tokens": quantile(0.99),
        "max_tokens": lengths[-1],
        "p99_over_median": quantile(0.99) / quantile(0.5),
        "cut_share": statistics.fmean(response["cut"] for response in responses),
        "group_share_of_length_variance": task.group_share(
            [[len(response["tokens"]) for response in group] for group in groups]
        ),
        "reward_mean": statistics.fmean(rewards),
        "groups_of_mixed_reward": statistics.fmean(0 < reward < 1 for reward in rewards),
        "shared_8grams_siblings": siblings,
        "shared_8grams_other_group": strangers,
        "nats_per_token": sum(response["nats"] for response in responses) / sum(lengths),
    }


def main() -> None:
    """Measure as the command line asks."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog="example: OMP_NUM_THREADS=1 python measure.py --groups 48 --seed 1 --json build/measured.json",
    )
    parser.add_argument("--groups", type=int, default=48)
    parser.add_argument("--n", type=int, default=8, help="responses per group (default 8)")
    parser.add_argument("--seed", type=int, default=1, help="1 gives the prompts of prompts.jsonl")
    parser.add_argument("--max-tokens", type=int, default=task.MAX_TOKENS)
    parser.add_argument("--model", type=Path, default=HERE / "weights")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--json", type=Path, help="write the numbers here")
    parser.add_argument("--samples", type=Path, help="write one JSON line per response here")
    args = parser.parse_args()

    rows = list(task.prompt_rows(args.groups, args.n, args.seed, args.max_tokens))
    started = time.monotonic()
    groups = roll_out(rows, args)
    print(f"rolled out in {time.monotonic() - started:.0f} s, loading included")
    numbers = summarize(groups)
    for name, value in numbers.items():
        print(f"{name:32} {value:10.3f}" if isinstance(value, float) else f"{name:32} {value:10d}")
    if args.json:
        args.json.write_text(json.dumps(numbers, indent=2) + "\n")
    if args.samples:
        lines = [
            {"group_id": row["group_id"], "index": i, "length": len(response["tokens"]), **response}
            for row, group in zip(rows, groups, strict=True)
            for i, response in enumerate(group)
        ]
        args.samples.write_text("".join(json.dumps(line) + "\n" for line in lines))


if __name__ == "__main__":
    main()
