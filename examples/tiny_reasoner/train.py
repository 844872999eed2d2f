"""Train the tiny reasoner on the teacher's scratchpads and export it."""

import argparse
import math
import random
import statistics
import time
from collections.abc import Iterator
from pathlib import Path

import task
import torch
from model import build_model, build_tokenizer, export
from torch.nn.functional import cross_entropy
from transformers import Qwen3ForCausalLM

HERE = Path(__file__).parent
IGNORED = -100
POOL_DOCUMENTS = 256
BATCH_TOKENS = 4096
WARMUP_TOKENS = 300_000
# Once sums are half learned, mostly short walks: they end, and so show the goal, more often.
SHORT_POOLS, SHORT_SHARE, SHORT_DIFFICULTY = range(32, 80), 0.7, 0.3

# Training sees none of these prompts, nor those bundled as prompts.jsonl.
EVALUATION = list(task.prompt_rows(64, n=1, seed=0))
RESERVED = {row["prompt"] for row in [*EVALUATION, *task.prompt_rows(48, n=8, seed=1)]}

Document = tuple[list[int], int]  # token ids and how many of them are the prompt


def documents(seed: int, pool: int) -> list[Document]:
    """Write one pool of training documents."""
    rng = random.Random(f"train-{seed}-{pool}")
    out: list[Document] = []
    while len(out) < POOL_DOCUMENTS:
        short = pool in SHORT_POOLS and rng.random() < SHORT_SHARE
        problem = task.make_problem(rng, rng.uniform(0, SHORT_DIFFICULTY) if short else None)
        prompt = [task.TOKEN_IDS[task.BOS], *task.encode(problem.prompt)]
        response = task.encode(task.write_response(problem, rng))
        if len(response) < task.MAX_TOKENS and problem.prompt not in RESERVED:
            out.append(([*prompt, *response, task.TOKEN_IDS[task.EOS]], len(prompt)))
    return out


def batches(pool: list[Document], rng: random.Random) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield (ids, labels) of documents of like length, so that little is padding."""
    groups: list[list[Document]] = [[]]
    for document in sorted(pool, key=lambda document: -len(document[0])):
        if groups[-1] and len(groups[-1][0][0]) * (len(groups[-1]) + 1) > BATCH_TOKENS:
            groups.append([])
        groups[-1].append(document)
    rng.shuffle(groups)
    for group in groups:
        ids = torch.full((len(group), len(group[0][0])), task.TOKEN_IDS[task.PAD])
        labels = torch.full_like(ids, IGNORED)
        for row, (tokens, prompt_length) in enumerate(group):
            ids[row, : len(tokens)] = torch.tensor(tokens)
            labels[row, prompt_length : len(tokens)] = ids[row, prompt_length : len(tokens)]
        yield ids, labels


def loss_of(model: Qwen3ForCausalLM, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the mean cross-entropy of the responses, in nats per token."""
    # Padding sits on the right, so the causal mask alone hides it.
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(input_ids=ids[:, :-1], use_cache=False).logits
    return cross_entropy(logits.float().flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED)


def learning_rate(peak: float, seen: int, budget: int) -> float:
    """Warm up linearly, then decay along a cosine to a twentieth."""
    progress = min(1.0, seen / budget)
    return (
        peak * min(1.0, (seen + 1) / WARMUP_TOKENS) * (0.05 + 0.95 * (1 + math.cos(math.pi * progress)) / 2)
    )


def train(args: argparse.Namespace) -> Qwen3ForCausalLM:
    """Run or resume the training; checkpoint and export every few pools."""
    model = build_model(args.seed)
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    decay = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(decay, lr=args.lr, betas=(0.9, 0.97))
    pool = seen = 0
    spent_s = 0.0
    if args.checkpoint.exists():
        state = torch.load(args.checkpoint)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        pool, seen, spent_s = state["pool"], state["seen"], state["spent_s"]
        print(f"resumed at {seen:,} tokens", flush=True)
    started = time.monotonic() - spent_s
    while seen < args.tokens:
        losses = []
        for ids, labels in batches(documents(args.seed, pool), random.Random(pool)):
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(args.lr, seen, args.tokens)
            loss = loss_of(model, ids, labels)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            seen += int((labels != IGNORED).sum())
        pool += 1
        spent_s = time.monotonic() - started
        mean_loss = statistics.fmean(losses)
        print(
            f"{seen:>10,} tokens  loss {mean_loss:.4f}  {spent_s:6.0f} s  {seen / spent_s:5.0f} tok/s",
            flush=True,
        )
        if pool % args.save_every == 0 or seen >= args.tokens:
            args.checkpoint.parent.mkdir(parents=True, exist_ok=True)
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save({**state, "pool": pool, "seen": seen, "spent_s": spent_s}, args.checkpoint)
            export(model, args.out)
    return model


@torch.inference_mode()
def evaluate(model: Qwen3ForCausalLM, seed: int) -> None:
    """Print the loss on held-out scratchpads and the reward of samples at temperature 1."""
    model.eval()
    losses = [loss_of(model, *batch).item() for batch in batches(documents(seed + 1, 0), random.Random(0))]
    tokenizer = build_tokenizer()
    torch.manual_seed(seed)
    rewards, lengths = [], []
    for row in EVALUATION:
        ids = torch.tensor([tokenizer.encode(row["prompt"])])
        tokens = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=True, top_k=0, max_new_tokens=task.MAX_TOKENS
        )
        response = tokens[0, ids.shape[1] :]
        rewards.append(task.reward(row["metadata"], tokenizer.decode(response)))
        lengths.append(len(response))
    reward = statistics.fmean(rewards)
    error = math.sqrt(reward * (1 - reward) / len(rewards))
    print(f"held-out loss {statistics.fmean(losses):.4f} nats per token")
    print(f"{len(rewards)} held-out prompts sampled at temperature 1:")
    print(f"reward {reward:.2f} +- {error:.2f}, mean length {statistics.fmean(lengths):.0f}")


def main() -> None:
    """Train, export and evaluate."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog="example: OMP_NUM_THREADS=1 python train.py --tokens 6600000 --checkpoint build/tiny.pt",
    )
    parser.add_argument("--tokens", type=int, default=6_600_000, help="response tokens to train on")
    parser.add_argument("--lr", type=float, default=2e-3, help="peak learning rate")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--checkpoint", type=Path, default=Path("build/tiny_reasoner.pt"), help="resumed from if present"
    )
    parser.add_argument(
        "--save-every", type=int, default=16, help="pools of 256 documents between checkpoints"
    )
    parser.add_argument("--out", type=Path, default=HERE / "weights")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    evaluate(train(args), args.seed)


if __name__ == "__main__":
    main()
