"""SGLang's own ``Engine`` against the worker's loop around SGLang's scheduler: what a step costs in each.

Both make the same steps with the same model in float32: --batch requests with prompts of --prompt tokens,
each written greedily to --tokens tokens.  The loop chooses every token by key, notes its log-prob, and
counts; the ``Engine`` does neither.  They take turns, --repeat times.

  .venv-sglang/bin/python benchmarks/sglang_loop.py --batch 1 8 32 --json out/sglang_loop.json
"""

from __future__ import annotations

import argparse
import json
import logging
import multiprocessing
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

MODEL = Path(__file__).parents[1] / "examples" / "tiny_reasoner" / "weights"
VOCAB = 96
SETTINGS: dict[str, Any] = {
    "model_path": str(MODEL),
    "dtype": "float32",
    "context_length": 3200,
    "max_total_tokens": 65536,
    "max_running_requests": 32,
    "device": "cpu",
    "attention_backend": "torch_native",
    "disable_cuda_graph": True,
    "disable_overlap_schedule": True,
    "skip_tokenizer_init": True,
    "log_level": "error",
}

ENVIRONMENT = {
    "CUDA_VISIBLE_DEVICES": "",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "SGLANG_USE_CPU_ENGINE": "1",
}

Write = Callable[[list[list[int]], int], None]
"""Writes so many tokens after each prompt."""


def loop() -> Write:
    """Return the loop as a worker has it."""
    from seer_sglang import internals

    internals.check_kernels()
    internals.check_imports()
    import torch
    from seer_sglang.engine import SglangEngine, server_args

    from seer_core.model import Sampling
    from seer_core.ports import ChunkJob

    torch.set_num_threads(1)
    engine = SglangEngine(server_args(SETTINGS, None))

    def write(prompts: list[list[int]], tokens: int) -> None:
        for number, prompt in enumerate(prompts):
            job = ChunkJob(
                str(number), str(number), "group", prompt, len(prompt), tokens, Sampling(0.0), number, 0
            )
            engine.add(job, "salt", to_the_end=True)
        while engine.chunks:
            engine.step()
        engine.reset_cache()

    return write


def engine() -> Write:
    """Return SGLang's public ``Engine``, with its scheduler in a process of its own."""
    import sgl_kernel  # noqa: F401, before SGLang, as in the processes that this one starts
    import sglang

    made = sglang.Engine(**SETTINGS)

    def write(prompts: list[list[int]], tokens: int) -> None:
        sampling = {"temperature": 0.0, "max_new_tokens": tokens, "ignore_eos": True}
        answers = made.generate(input_ids=prompts, sampling_params=sampling)
        assert all(answer["meta_info"]["completion_tokens"] == tokens for answer in answers)
        made.flush_cache()

    return write


WAYS = {"engine": engine, "loop": loop}


def serve(way: str, pipe: Connection) -> None:
    """Start one of them, then write and time whatever comes."""
    with tempfile.TemporaryDirectory() as directory:
        # SGLang's own processes need the stand-in for its kernels before they import SGLang.
        Path(directory, "sitecustomize.py").write_text("import sgl_kernel\n")
        os.environ |= ENVIRONMENT | {"PYTHONPATH": directory}
        write = WAYS[way]()
        pipe.send("ready")
        while (job := pipe.recv()) is not None:
            begun = time.perf_counter()
            write(*job)
            pipe.send(time.perf_counter() - begun)
    from sglang.srt.utils import kill_process_tree

    kill_process_tree(os.getpid(), include_parent=True)


def main(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Let both write the same in turn."""
    dice = random.Random(0)
    context = multiprocessing.get_context("spawn")
    pipes: dict[str, Connection] = {}
    for way in WAYS:
        pipes[way], theirs = context.Pipe()
        context.Process(target=serve, args=(way, theirs)).start()
        assert pipes[way].recv() == "ready"
        print(f"started {way}", flush=True)
    rows = []
    for batch in options.batch:
        taken: dict[str, list[float]] = {way: [] for way in WAYS}
        for number in range(options.repeat + 1):
            prompts = [[dice.randrange(3, VOCAB) for _ in range(options.prompt)] for _ in range(batch)]
            for way, pipe in pipes.items():
                pipe.send((prompts, options.tokens))
                seconds = pipe.recv()
                if number:  # the first round warms up
                    taken[way].append(seconds)
        ratios = [ours / theirs for ours, theirs in zip(taken["loop"], taken["engine"], strict=True)]
        rows.append(
            {
                "batch": batch,
                "tokens": options.tokens,
                "tokens_per_s": {
                    way: batch * options.tokens / statistics.median(each) for way, each in taken.items()
                },
                "step_ms": {
                    way: statistics.median(each) / options.tokens * 1e3 for way, each in taken.items()
                },
                "time_ratio": statistics.median(ratios),
                "least": min(ratios),
                "most": max(ratios),
                "repeats": options.repeat,
            }
        )
        row = rows[-1]
        print(
            f"batch {batch:2}: Engine {row['step_ms']['engine']:.2f} ms a step, loop"
            f" {row['step_ms']['loop']:.2f} ms; time x{row['time_ratio']:.3f}"
            f" [{row['least']:.3f}, {row['most']:.3f}]",
            flush=True,
        )
    for pipe in pipes.values():
        pipe.send(None)
    return rows


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32], help="requests at once")
    parser.add_argument("--prompt", type=int, default=40, help="tokens of each prompt (default 40)")
    parser.add_argument("--tokens", type=int, default=200, help="tokens of each response (default 200)")
    parser.add_argument("--repeat", type=int, default=5, help="measured rounds (default 5)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows as JSON")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.ERROR)
    found = main(arguments)
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")
