"""Results of arXiv 2511.14617 as plain numbers, by the names of the workloads in ``seer_lab.workloads``."""

from __future__ import annotations

from collections.abc import Mapping

__all__ = [
    "ABLATION",
    "ACCEPTANCE",
    "GROUP_SIZES",
    "LENGTH_CONTEXT",
    "PARTIAL",
    "SPECULATION",
    "TIMES",
    "VERL",
]

MOONLIGHT, QWEN, KIMI = "moonlight", "qwen2-vl-72b", "kimi-k2"

TIMES: Mapping[str, Mapping[str, tuple[float, float]]] = {
    MOONLIGHT: {"verl": (3910, 1817), "seer": (2181, 278)},
    QWEN: {"verl": (3957, 2301), "seer": (1922, 123)},
    KIMI: {"verl": (12202, 3144), "seer": (8267, 850)},
}
"""Total and tail time of an iteration, in seconds; means of five iterations."""

ABLATION: Mapping[str, Mapping[str, float]] = {
    MOONLIGHT: {"divided": 1.41, "context": 1.47, "seer": 1.90},
    QWEN: {"divided": 1.42, "context": 1.56, "seer": 2.04},
    KIMI: {"divided": 1.16, "context": 1.27, "seer": 1.53},
}
"""Throughput over veRL's, technique after technique; the fifth iteration."""

GROUP_SIZES: Mapping[int, Mapping[str, Mapping[str, float]]] = {
    8: {
        MOONLIGHT: {"verl+sd": 1.16, "streamrl-oracle": 1.21, "streamrl-oracle+sd": 1.62, "seer": 1.78},
        QWEN: {"verl+sd": 1.14, "streamrl-oracle": 1.33, "streamrl-oracle+sd": 1.46, "seer": 1.82},
        KIMI: {"verl+sd": 1.26, "streamrl-oracle": 0.99, "streamrl-oracle+sd": 1.09, "seer": 1.48},
    },
    16: {
        MOONLIGHT: {"verl+sd": 1.34, "streamrl-oracle": 1.30, "streamrl-oracle+sd": 1.56, "seer": 1.83},
        QWEN: {"verl+sd": 1.08, "streamrl-oracle": 1.43, "streamrl-oracle+sd": 1.57, "seer": 2.04},
        KIMI: {"verl+sd": 1.22, "streamrl-oracle": 0.94, "streamrl-oracle+sd": 1.02, "seer": 1.44},
    },
}
"""Throughput over veRL's, by group size; as many requests in all."""

SPECULATION: Mapping[str, Mapping[str, tuple[float, float]]] = {
    MOONLIGHT: {"verl+sd": (1.18, 1.67), "grouped-sd-on-verl": (1.26, 1.89)},
    QWEN: {"verl+sd": (1.06, 2.19), "grouped-sd-on-verl": (1.38, 2.15)},
    KIMI: {"verl+sd": (1.22, 1.74), "grouped-sd-on-verl": (1.25, 1.77)},
}
"""Throughput over veRL's with speculation alone, and the mean acceptance length."""

LENGTH_CONTEXT: Mapping[str, tuple[float, float]] = {
    "no-context": (1.42, 0.79),
    "context": (1.56, 0.11),
    "oracle": (1.63, 0.00),
}
"""Throughput and tail time over veRL's, Qwen2-VL-72B."""

PARTIAL = 1.43
"""Seer's throughput over that of partial rollout, which starts twice the requests."""

VERL: Mapping[str, float] = {"preemptions": 13686, "idle_share": 0.37, "late_start": 0.42}
"""veRL on Qwen2-VL-72B: preemptions of an iteration, the part of the time in which instances idle, and when
the last 5 % of the requests start, on average, as a part of the total time."""

ACCEPTANCE: Mapping[int, Mapping[int, float]] = {
    1: {0: 1.70, 1: 2.04, 5: 2.32, 15: 2.53},
    2: {0: 1.77, 1: 2.14, 5: 2.44, 15: 2.69},
    4: {0: 1.85, 1: 2.25, 5: 2.59, 15: 2.85},
}
"""Mean acceptance length of grouped drafts, by paths and by finished siblings."""
