"""Does this engine sample by key?  Asked of every instance before it is ready, by recomputing what it chose.

Two short responses are run, and the instance returns the logits from which each token was chosen.  What
the key of the request chooses from these logits must be the token that came out, and the log-prob must be
theirs.  So an engine whose sampling hook was not called, or that takes other seeds or positions, is refused
before it has written a token that cannot be reproduced.

Then a response is written whole, and the same one in two chunks, of which the second finds the KV of the
first.  Where an engine keeps something wrong for the second, each response that goes on is wrong, though
every token follows from its logits.  So what differs is reported.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from msgspec import structs

from seer_core.errors import EngineError
from seer_core.model import Sampling
from seer_core.ports.engine import ChunkJob, ChunkOutput
from seer_worker.process.adapter import LogitRow
from seer_worker.process.worker import Worker
from seer_worker.sampling.keyed import keyed_scores
from seer_worker.sampling.noise import gumbel, noise_steps
from seer_worker.wire import Failed

__all__ = ["check_keyed", "continued_apart", "wrong_continuation"]

GROUP = "self-test"
TOKENS = 6
STEPS = 100
"""More than that, for two responses of six tokens, and the engine does nothing."""
NEAR = 1e-3
"""How far below the highest a chosen token's score may lie: another device rounds in another way."""
LOGPROB_NEAR = 0.05
"""How far a log-prob may be from that of the logits; engines may compute it in bfloat16."""

PROBED = 16
"""The most probable tokens at a place, whose log-probs are compared."""
CONTINUED_NEAR = 0.5
"""How far these may be apart: bfloat16 rounds a prefill otherwise than steps, and wrong KV is further off."""

JOBS = tuple(
    ChunkJob(
        id=f"{GROUP}-{number}",
        request_id=f"{GROUP}-{number}",
        group_id=f"{GROUP}-{number}",  # a group has one prompt
        token_ids=prompt,
        prompt_tokens=len(prompt),
        max_tokens=TOKENS,
        sampling=sampling,
        seed=seed,
        weight_version=0,
        last=True,
        rollout_id=GROUP,
    )
    for number, (prompt, seed, sampling) in enumerate(
        (
            ([1, 2, 3, 1], 0x0123_4567_89AB_CDEF, Sampling()),
            ([3, 2, 1, 2, 3], 0x0FED_CBA9_8765_4321, Sampling(top_p=0.9, top_k=3)),
        )
    )
)


def check_keyed(worker: Worker) -> None:
    """Run the probes on an idle worker, and forget them.

    Raises:
        EngineError: its tokens are not those that their keys choose.
    """
    worker.adapter.watch(True)
    try:
        outputs = _run(worker)
    finally:
        rows = worker.adapter.watch(False)
    worker.reset_cache()
    for job in JOBS:
        _compare(job, outputs[job.id], rows)


def continued_apart(worker: Worker) -> float | None:
    """Return how far log-probs are apart where a response goes on in a second chunk, and where it is whole.

    Its prompt fills blocks of KV, which the second chunk finds; the tokens behind them are computed again.
    None of an instance that has no room for one.
    """
    info = worker.info
    prompt = [1 + place % 3 for place in range(2 * info.block_tokens + 2)]
    if len(prompt) + TOKENS > min(info.max_model_tokens, info.kv_capacity_tokens):
        return None
    sampling = Sampling(ignore_eos=True)
    whole = structs.replace(
        JOBS[0], id=f"{GROUP}-whole", prompt_tokens=len(prompt), sampling=sampling, last=False
    )
    half = TOKENS // 2
    found: list[dict[int, LogitRow]] = []
    written: list[list[int]] = []
    tokens = list(prompt)
    for job in (whole, structs.replace(whole, id=f"{GROUP}-continued", max_tokens=TOKENS - half)):
        worker.adapter.watch(True)
        try:
            output = _run(worker, [structs.replace(job, token_ids=tokens)])[job.id]
        finally:
            rows = worker.adapter.watch(False)
        found.append({row.position: row for row in rows})
        written.append(list(output.token_ids))
        tokens = [*prompt, *output.token_ids[:half]]
    worker.reset_cache()
    first, second = written
    apart = 0.0
    for place, token in enumerate(second, half):
        one, other = (
            torch.from_numpy(rows[len(prompt) + place].logits).to(torch.float32).log_softmax(-1)
            for rows in found
        )
        probable = one.topk(min(PROBED, len(one))).indices
        apart = max(apart, float((one - other)[probable].abs().max()))
        if token != first[place]:  # what follows is of another response
            break
    return apart


def wrong_continuation(apart: float) -> str | None:
    """Return what ``continued_apart`` says of an engine, if it says more than that numbers are rounded."""
    if apart <= CONTINUED_NEAR:
        return None
    return (
        "a response that goes on in a second chunk has other log-probs than a whole one, by up to"
        f" {apart:.2f}: this engine keeps wrong KV of this model, or its answers depend on the batch"
    )


def _run(worker: Worker, jobs: Sequence[ChunkJob] = JOBS) -> dict[str, ChunkOutput]:
    for job in jobs:
        worker.submit(job)
    outputs: dict[str, ChunkOutput] = {}
    for _ in range(STEPS):
        for result in worker.advance():
            if isinstance(result, Failed):
                raise EngineError(f"the engine failed its self-test: {result.reason}")
            outputs[result.output.job_id] = result.output
        if len(outputs) == len(jobs):
            return outputs
    raise EngineError(f"the engine failed its self-test: {STEPS} steps did not write {TOKENS} tokens")


def _compare(job: ChunkJob, output: ChunkOutput, rows: Iterable[LogitRow]) -> None:
    given = {row.position: row.logits for row in rows if row.seed == job.seed}  # a later row counts
    for place, (token, logprob) in enumerate(zip(output.token_ids, output.logprobs, strict=True)):
        position = len(job.token_ids) + place
        if position not in given:
            raise EngineError(
                f"the engine does not sample by key: the token at position {position} of a response was not"
                " chosen where Seer chooses tokens"
            )
        logits = torch.from_numpy(given[position]).to(torch.float32)
        scores = _scores(job, position, logits[None])[0]
        if scores[token] < scores.max() - NEAR:
            raise EngineError(
                f"the engine does not sample by key: at position {position} of a response it chose token"
                f" {token}, and the key chooses {int(scores.argmax())}"
            )
        expected = float(logits.log_softmax(-1)[token])
        if abs(expected - logprob) > LOGPROB_NEAR:
            raise EngineError(
                f"the engine gives wrong log-probs: {logprob:.3f} at position {position} of a response, and"
                f" its logits give {expected:.3f}"
            )


def _scores(job: ChunkJob, position: int, logits: torch.Tensor) -> torch.Tensor:
    """Return what the chosen token has most of, [1, vocab]."""
    vocab = logits.shape[1]
    temperature, top_p = torch.tensor([[job.sampling.temperature], [job.sampling.top_p]])
    top_k = torch.tensor([min(job.sampling.top_k, vocab) or vocab])
    noise = gumbel(torch.tensor([job.seed]), torch.tensor([position]), noise_steps(vocab))
    return keyed_scores(logits, temperature, top_k, top_p, noise)
