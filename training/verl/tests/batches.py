"""Batches as verl's trainer makes them, and what should come back."""

import numpy as np
import pytest
import torch
from verl.protocol import DataProto


def column(values):
    """Return an array of objects, as verl's data sets hold what is no tensor."""
    found = np.empty(len(values), dtype=object)
    found[:] = values
    return found


def batch(groups, step, n=3, **meta):
    """Return a batch as verl's trainer makes it: rows of one prompt have one uid, drawn at random."""
    rng = np.random.default_rng()
    rows = [group for group in range(groups) for _ in range(n)]
    uids = rng.permutation(1000)
    return DataProto.from_dict(
        tensors={"row": torch.arange(len(rows))},
        non_tensors={
            "raw_prompt": column([[{"role": "user", "content": f"ring {each} ?"}] for each in rows]),
            "uid": column([f"uid-{uids[each]}" for each in rows]),
        },
        meta_info={"global_steps": step, **meta},
    )


def prompts(output):
    """Return the prompts of a batch without their padding."""
    width = output.batch["prompts"].shape[1]
    masks = output.batch["attention_mask"][:, :width].bool()
    return [ids[mask].tolist() for ids, mask in zip(output.batch["prompts"], masks, strict=True)]


def responses(output):
    """Return tokens and log-probs of a batch without their padding."""
    masks = output.batch["response_mask"].bool()
    scores = output.batch["rollout_log_probs"]
    return [
        (ids[mask].tolist(), pytest.approx(score[mask].tolist()))
        for ids, mask, score in zip(output.batch["responses"], masks, scores, strict=True)
    ]


def expected(server, output, names, iteration, **sampling):
    """Return the library's responses to the rows of a batch, which are named ``(group, index)``."""
    records = {}
    for (group, _), ids in zip(names, prompts(output), strict=True):
        record = {"group_id": group, "prompt_token_ids": ids, "n": 0, "max_tokens": 12, **sampling}
        records.setdefault(group, record)["n"] += 1
    found = server.library(records.values(), iteration)
    return [found[name] for name in names]
