"""The responses of part 10 of ``scripts/gpu-check``: recorded ones, as many as its budget has time for."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

from bench.gpu.check import ROOT, GpuMachine
from bench.gpu.sessions import MODEL, Row, dtype_of

LARGE = {
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 152_064,
    "max_position_embeddings": 32_768,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}
"""Qwen2.5-7B's, as a model of Qwen3."""
SMALL = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "vocab_size": 96,
}
TEXT = ROOT / "bench" / "data" / "tiny_reasoner.npz"
JOINED = 2
"""Recorded responses that make one, where no other text is given: 835 tokens on average, 4,300 at most."""
PRESSURE = 4.0
"""All text over what KV holds, as in the paper's run of Qwen2-VL-72B."""
INSTANCES = 2
BLOCK_TOKENS = 32
DRAFT_TOKENS = 4
START_S = 40.0
"""Of two instances or engines, graphs recorded; the first ones take as long again (assumed, not measured)."""
STARTS = 6
GROUP_S = 23.0
"""Of a group of 16 in all arms together, as simulated for half an H100 each (tests/test_gpu_recorded.py)."""
LEAST_GROUPS = 4


Group = tuple[str, tuple[int, ...], list[tuple[int, ...]]]
"""A name, a prompt, and responses."""


class RecordedPart(NamedTuple):
    """Prompts by group, responses by request, and the tokens of an instance's KV."""

    prompts: Mapping[str, tuple[int, ...]]
    responses: Mapping[str, tuple[int, ...]]
    kv_tokens: int

    @property
    def longest(self) -> int:
        """Return the tokens of the longest response."""
        return max(map(len, self.responses.values()))

    @property
    def context_tokens(self) -> int:
        """Return the tokens of the longest prompt and the longest response, in whole blocks, with room."""
        most = max(map(len, self.prompts.values())) + self.longest
        return (most // BLOCK_TOKENS + 4) * BLOCK_TOKENS

    def of(self, group: str) -> list[tuple[int, ...]]:
        """Return the responses of a group."""
        return [text for name, text in self.responses.items() if name.rpartition("/")[0] == group]


def groups_in(budget_s: float) -> int:
    """Return how many groups all arms roll out in so many seconds, engine starts included."""
    return max(LEAST_GROUPS, int((budget_s - STARTS * START_S) / GROUP_S))


def part_of(machine: GpuMachine) -> RecordedPart:
    """Return groups of the file, drawn once, that the budget has time for; a dry run cuts their text."""
    from bench.paced import END_ID, recorded_text

    text = recorded_text(machine.data or TEXT, "recorded", 1, 1, INSTANCES).text
    assert text is not None
    groups: list[Group] = [(name, prompt, []) for name, prompt in text.prompts.items()]
    by_name = {name: responses for name, _, responses in groups}
    for name, response in text.responses.items():
        by_name[name.rpartition("/")[0]].append(response)
    if machine.data is None:
        groups = joined(groups, JOINED)
    random.Random(0).shuffle(groups)
    groups = groups[: 3 if machine.small else groups_in(machine.budget_s)]
    if machine.small:
        groups = [
            (name, prompt[:24], [(*each[: 12 + len(each) % 29], END_ID) for each in responses[:4]])
            for name, prompt, responses in groups
        ]
    part = RecordedPart(
        {name: prompt for name, prompt, _ in groups},
        {f"{name}/{index}": each for name, _, texts in groups for index, each in enumerate(texts)},
        0,
    )
    tokens = sum(len(prompt) * len(texts) + sum(map(len, texts)) for _, prompt, texts in groups)
    kv = max(tokens / PRESSURE / INSTANCES, part.context_tokens)
    return part._replace(kv_tokens=-(-int(kv) // BLOCK_TOKENS) * BLOCK_TOKENS)


def joined(groups: Sequence[Group], count: int) -> list[Group]:
    """Return groups each of whose responses is made of ``count``, one behind the other, ends left out.

    Groups of like lengths make one, and its longest response has the longest of each, so that lengths
    spread as before.  Siblings still resemble each other, each part another's.
    """
    made = []
    ordered = sorted(groups, key=lambda each: sum(map(len, each[2])))
    for start in range(0, len(ordered) - count + 1, count):
        parts = ordered[start : start + count]
        ranked = [sorted(texts, key=len) for _, _, texts in parts]
        texts = [
            tuple(chain(*(text[:-1] for text in each[:-1]), each[-1])) for each in zip(*ranked, strict=True)
        ]
        made.append((parts[0][0], tuple(chain(*(prompt for _, prompt, _ in parts))), texts))
    return made


def shape_of(machine: GpuMachine) -> Row:
    """Return the ``config.json`` of the model."""
    base = json.loads((MODEL / "config.json").read_text())
    shape = SMALL if machine.small else LARGE
    return {**base, **shape, "layer_types": ["full_attention"] * shape["num_hidden_layers"]}


def kv_bytes(machine: GpuMachine, tokens: int) -> int:
    """Return the bytes of so many tokens' KV, with vLLM's null block."""
    shape = SMALL if machine.small else LARGE
    size = 4 if dtype_of(machine) == "float32" else 2
    per_token = 2 * shape["num_hidden_layers"] * shape["num_key_value_heads"] * shape["head_dim"] * size  # type: ignore[operator]
    return max(1 << 20, (tokens + BLOCK_TOKENS) * per_token)


def workload_of(part: RecordedPart, sim: Row, drafting: Row, policy: str) -> Any:
    """Return the workload of a part on simulated instances with these settings; for drafts with its texts."""
    import numpy as np
    from seer_grouped_spec.replay import Recording
    from seer_lab.lengths import GroupLengths
    from seer_lab.replayed import replayed_drafts, with_replayed
    from seer_lab.texts import RecordedText
    from seer_lab.workloads import Workload

    groups = [
        GroupLengths(name, len(prompt), tuple(map(len, part.of(name))), part.longest)
        for name, prompt in part.prompts.items()
    ]
    vocabulary = 1 + max(map(max, chain(part.prompts.values(), part.responses.values())))
    tables: Row = {
        "seer": {"engine": "sim", "kv_pool": "sim_pool"},
        "kv_pool": {"sim_pool": {"dram_bytes": 10**15, "bandwidth_bytes_per_s": 50e9}},
        "engine": {
            "sim": {
                "instances": INSTANCES,
                "vocab_size": max(512, vocabulary),
                "max_batched_tokens": 8192,
                "report_interval_s": 1.0,
                **sim,
                "acceptance": dict(drafting),
            }
        },
        "plugin": {"grouped_spec": {"draft_tokens": DRAFT_TOKENS}} if policy.endswith("+sd") else {},
    }
    text = RecordedText(dict(part.prompts), dict(part.responses))
    load = Workload("recorded on a GPU", [groups], tables, text)
    if not policy.endswith("+sd"):
        return load
    recordings = [
        Recording(name, np.array(prompt, np.int32), tuple(np.array(each, np.int32) for each in part.of(name)))
        for name, prompt in part.prompts.items()
    ]
    return with_replayed(load, replayed_drafts(recordings))
