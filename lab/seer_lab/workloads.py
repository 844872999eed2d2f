"""Workloads: how long responses are, and the engines that generate them.

The paper's three (arXiv 2511.14617, evaluation) and those of a user's file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from seer_host.config_files import Config, make_config
from seer_host.tables import TurnsTable
from seer_sim.cost import CostModel
from seer_sim.machines import GPUS, TYPICAL, GpuPeaks, Reached, cost_on
from seer_sim.measured import MEASURED
from seer_sim.presets import PRESETS
from seer_sim.sizes import ModelSizes

from seer_core.errors import ConfigError
from seer_lab.lengths import DrawnLengths, GroupLengths
from seer_lab.texts import RecordedText

__all__ = [
    "CLUSTERS",
    "MEASURED_DRAFTING",
    "SYNTHETIC",
    "WORKLOADS",
    "Cluster",
    "Workload",
    "cluster_of",
    "context_tokens",
    "crowded",
    "scaled",
]

GPU_BYTES = 80e9
"""Memory of one H800, and of one H100."""

GPUS_PER_NODE = 8
NODE_DRAM_BYTES = 2e12
NODE_SSD_BYTES = 4e12
"""The paper's nodes; all of both are the KV pool's."""

GPU_WIRE_BYTES_PER_S = 25e9
"""What a GPU's share of its node's network moves: half of 400 Gbit/s (assumed)."""

MEMORY_SHARE = 0.8
"""Part of it that an engine uses for weights and KV, fitted to veRL on Qwen2-VL-72B."""

MAX_RUNNING = 192
"""Requests that a rank runs at a time, by the same fit."""

MEASURED_RUNNING = 256
"""Requests that an instance of a measured or described model runs: vLLM's default ``max_num_seqs``."""

BLOCK_TOKENS = 16
"""vLLM's default ``block_size``."""

LONGEST_PROMPT_TOKENS = 4096
"""Room for a prompt beside the longest response (assumed; the paper does not say)."""


DRAFTING_S = 10e-3
"""What a step that drafts takes longer: it waits on the host for the tokens of the last one, leaves CUDA
graphs, and samples again.  Assumed, see docs/results/reproduction.md.

Most of it is the graphs: with 10 requests of 128 tokens Qwen3-Coder-30B-A3B on an H100 answered 5.98 requests
per second with full graphs and 4.07 with piecewise ones (vllm#25444).  That is 6.1 ms a step for 48 layers,
which is 10 ms for the 80 of Qwen2-VL-72B.  So it was measured here, on an H100 with 80 layers, and 0.4 ms
with full graphs (docs/results/gpu.md)."""

MEASURED_DRAFTING: Mapping[str, float] = {"step_s": 0.4e-3, "request_s": 0.08e-3}
"""What drafting adds to a step, and to it for each request, as measured on an H100 with 80 layers and drafts
of 4 tokens under full CUDA graphs (docs/results/gpu.md, docs/results/paced-vllm.md)."""

LATER_SEEDS = 1 << 20
"""Added to a seed for an iteration to come; far from those that users repeat over."""

NOT_HERE = {
    "rollout": "prompts come with the workload",
    "compare": "name policies with --policy",
    "seer.plugins": "name policies with --policy",
    "engine.sim.lengths": "change them with --lengths",
}
"""Keys of a config that a workload settles itself, and how else to say it."""


class Cluster(msgspec.Struct, frozen=True):
    """Instances of one model: ``preset`` names the constants of ``seer_sim.cost``.

    ``weight_bytes`` count as often as they are replicated.
    ``request_bytes`` are those of a request's windows and states, however long it is.
    ``vanilla_sd`` is the way of speculation without group context that the paper compares with there.
    """

    preset: str
    instances: int
    gpus_per_instance: int
    weight_bytes: float
    kv_bytes_per_token: float
    max_running: int
    max_batched_tokens: int
    vanilla_sd: str
    memory_share: float = MEMORY_SHARE
    gpu_bytes: float = GPU_BYTES
    gpu: str = "H800"
    cost: CostModel | None = None
    """Constants in place of the preset's."""
    request_bytes: float = 0.0
    drafting: Mapping[str, float] = msgspec.field(default_factory=lambda: {"step_s": DRAFTING_S})
    """What drafting adds to a step."""

    @property
    def nodes(self) -> float:
        """Machines that the instances fill."""
        return self.instances * self.gpus_per_instance / GPUS_PER_NODE

    @property
    def kv_capacity_tokens(self) -> int:
        """KV tokens of one instance: what all else leaves of its memory, in whole blocks."""
        free = self.free_bytes - self.max_running * self.request_bytes
        return _whole_blocks(int(free / self.kv_bytes_per_token))

    @property
    def free_bytes(self) -> float:
        """The memory of one instance that weights leave."""
        return self.gpus_per_instance * self.gpu_bytes * self.memory_share - self.weight_bytes


class Workload(msgspec.Struct, frozen=True):
    """Lengths and engines under a name.

    ``lengths`` are drawn anew for each seed, or recorded: one list of groups per iteration, which seeds
    take in turn.  ``tables`` are those of a config file and describe the engines.  ``text`` is what is said,
    where an engine reads it.  ``notes`` are sentences about what was guessed.
    """

    name: str
    lengths: DrawnLengths | Sequence[Sequence[GroupLengths]]
    tables: Mapping[str, Any]
    text: RecordedText | None = None
    notes: tuple[str, ...] = ()

    def groups(self, seed: int, later: int = 0) -> Sequence[GroupLengths]:
        """Return the groups of one iteration, or of one ``later``."""
        if isinstance(self.lengths, DrawnLengths):
            return self.lengths.draw(seed + LATER_SEEDS * later)
        return self.lengths[(seed + later) % len(self.lengths)]

    @property
    def has_turns(self) -> bool:
        """Whether its responses are trajectories, whose turns tools answered."""
        return not isinstance(self.lengths, DrawnLengths) and any(
            group.turns for groups in self.lengths for group in groups
        )

    def config(self, plugins: Sequence[str], overrides: Sequence[str] = (), seed: int = 0) -> Config:
        """Return the configuration of a run with these plug-ins; ``overrides`` are KEY=VALUE.

        ``[seer.slots]`` counts as far as it names plug-ins that are among them.

        Raises:
            ConfigError: a key or value is not what it must be.
        """
        seer = {**self.tables.get("seer", {}), "plugins": list(plugins), "seed": seed}
        config = make_config(
            {**self.tables, "seer": seer}, overrides, base_dir=Path(), origin=f"workload {self.name}"
        )
        for key, remedy in NOT_HERE.items():
            for override in overrides:
                if f"{override.partition('=')[0].strip()}.".startswith(f"{key}."):
                    raise ConfigError(f"--set {override} has no effect here; {remedy}")
        if config.seer.engines != ("sim",):
            raise ConfigError(
                f"seer.engine = {config.seer.engine!r}: workloads run on simulated engines; leave it 'sim',"
                " and use `seer compare` for real ones"
            )
        return config.with_plugins(plugins)


def _whole_blocks(tokens: int) -> int:
    return tokens // BLOCK_TOKENS * BLOCK_TOKENS


def on(cluster: Cluster, context_tokens: int) -> dict[str, Any]:
    """Return the tables of a config with the instances of ``cluster``, for contexts so long."""
    return {
        "seer": {"engine": "sim", "kv_pool": "sim_pool"},
        "kv_pool": {
            "sim_pool": {
                "dram_bytes": int(NODE_DRAM_BYTES * cluster.nodes),
                "ssd_bytes": int(NODE_SSD_BYTES * cluster.nodes),
                "bandwidth_bytes_per_s": GPU_WIRE_BYTES_PER_S * cluster.gpus_per_instance,
            }
        },
        "engine": {
            "sim": {
                "preset": cluster.preset,
                **({} if cluster.cost is None else {"cost": msgspec.structs.asdict(cluster.cost)}),
                "instances": cluster.instances,
                "kv_capacity_tokens": cluster.kv_capacity_tokens,
                "block_tokens": BLOCK_TOKENS,
                "max_running": cluster.max_running,
                "max_batched_tokens": cluster.max_batched_tokens,
                "max_model_tokens": context_tokens,
                "report_interval_s": 5.0,
                "acceptance": cluster.drafting,
                "drafts": {cluster.vanilla_sd: cluster.drafting},
            }
        },
        "plugin": {
            "vanilla_sd": {"method": cluster.vanilla_sd},
        },
    }


def context_tokens(groups: Sequence[GroupLengths]) -> int:
    """Return the prompt and response tokens of all responses; a prompt counts once for each."""
    return sum(sum(group.output_tokens) + group.prompt_tokens * len(group.output_tokens) for group in groups)


def crowded(
    name: str,
    lengths: DrawnLengths | Sequence[Sequence[GroupLengths]],
    cluster: Cluster,
    instances: int,
    pressure: float | None,
) -> Workload:
    """Return a workload on so many instances of ``cluster``, with as much KV as makes it as crowded.

    ``pressure``: the KV that all responses of the first iteration fill in the end, over what there is.
    None leaves each instance the KV that its GPUs hold.  An instance has room for the longest context at
    least.  All tools work at once, however long they take.
    """
    first = Workload(name, lengths, {}).groups(0)
    recorded = lengths if not isinstance(lengths, DrawnLengths) else [first]
    longest = max(group.prompt_tokens + group.max_tokens for groups in recorded for group in groups)
    holds = cluster.kv_capacity_tokens if pressure is None else context_tokens(first) / pressure / instances
    capacity = max(holds, longest)
    tables = on(msgspec.structs.replace(cluster, instances=instances), longest)
    tables["engine"]["sim"]["kv_capacity_tokens"] = -(-int(capacity) // BLOCK_TOKENS) * BLOCK_TOKENS
    workload = Workload(name, lengths, tables)
    if workload.has_turns:
        trajectories = [turns for groups in recorded for group in groups for turns in group.turns]
        longest_s = max(turn.tool_s or 0.0 for turns in trajectories for turn in turns)
        tables["seer"]["turns"] = {
            "timeout_s": max(longest_s, TurnsTable().timeout_s),
            "at_once": len(trajectories),
        }
    return workload


def scaled(workload: Workload, share: float) -> Workload:
    """Return a smaller one of the same kind: so much of its groups and of its instances, at least 1 each.

    The KV pool has the memory and the disks of as much less machines.
    """
    assert isinstance(workload.lengths, DrawnLengths)
    engine, pool = workload.tables["engine"]["sim"], workload.tables["kv_pool"]["sim_pool"]
    instances = max(1, round(engine["instances"] * share))
    groups = max(1, round(workload.lengths.groups * instances / engine["instances"]))
    of_nodes = {name: pool[name] * instances // engine["instances"] for name in ("dram_bytes", "ssd_bytes")}
    tables = {
        **workload.tables,
        "engine": {"sim": {**engine, "instances": instances}},
        "kv_pool": {"sim_pool": {**pool, **of_nodes}},
    }
    lengths = msgspec.structs.replace(workload.lengths, groups=groups)
    return Workload(f"{workload.name} x {share:g}", lengths, tables)


def cluster_of(sizes: ModelSizes, gpu: GpuPeaks, name: str, gpus: int, reached: Reached = TYPICAL) -> Cluster:
    """Return an instance of any model on so many GPUs, which ``name`` names.

    Fewer requests run where their windows and states would take more than half of the memory, as in vLLM,
    which keeps two states of a request.

    Raises:
        ConfigError: its weights leave no room for KV.
    """
    cost = cost_on(sizes, gpu, gpus, reached)
    cluster = Cluster(
        preset="cpu-tiny",
        instances=1,
        gpus_per_instance=gpus,
        weight_bytes=cost.weight_bytes + cost.expert_bytes,
        kv_bytes_per_token=cost.kv_bytes_per_token,
        max_running=MEASURED_RUNNING,
        max_batched_tokens=8192,
        vanilla_sd="suffix",
        gpu_bytes=gpu.memory_bytes,
        gpu=name,
        cost=cost,
        request_bytes=sizes.window_bytes * gpus / min(gpus, sizes.kv_heads) + 2 * sizes.state_bytes,
        drafting=MEASURED_DRAFTING,
    )
    if cluster.request_bytes:
        fitting = int(cluster.free_bytes / 2 / cluster.request_bytes)
        running = min(cluster.max_running, max(1, fitting))
        cluster = msgspec.structs.replace(cluster, max_running=running)
    if cluster.kv_capacity_tokens < 1:
        raise ConfigError(
            f"the model's {cluster.weight_bytes / 1e9:,.0f} GB of weights leave no room for KV on {gpus} of"
            f" {name}; give more with --gpus"
        )
    return cluster


def _measured(name: str) -> Cluster:
    """Return the instances of a measured preset."""
    measured = MEASURED[name]
    cluster = cluster_of(
        measured.sizes, GPUS[measured.gpu], measured.gpu.upper(), measured.gpus, measured.reached
    )
    return msgspec.structs.replace(cluster, preset=name, cost=None)


# Sizes: model cards.  The limit on batched tokens is assumed.
CLUSTERS = {
    "moonlight": Cluster(
        preset="h800-moonlight",
        instances=32,
        gpus_per_instance=1,
        weight_bytes=32e9,
        kv_bytes_per_token=27 * 576 * 2,  # layers x MLA's values x bf16
        max_running=MAX_RUNNING,
        max_batched_tokens=8192,
        vanilla_sd="suffix",
    ),
    "qwen2.5-14b": Cluster(
        preset="h800-qwen2.5-14b",
        instances=8,
        gpus_per_instance=1,
        weight_bytes=29.5e9,
        kv_bytes_per_token=48 * 2 * (8 * 128) * 2,  # layers x (K, V) x heads x bf16
        max_running=MAX_RUNNING,
        max_batched_tokens=8192,
        vanilla_sd="suffix",
    ),
    "qwen2-vl-72b": Cluster(
        preset="h800-qwen2-vl-72b-tp8",
        instances=16,
        gpus_per_instance=8,
        weight_bytes=146e9,
        kv_bytes_per_token=80 * 2 * (8 * 128) * 2,  # layers x (K, V) x heads x bf16
        max_running=MAX_RUNNING,
        max_batched_tokens=8192,
        vanilla_sd="draft_model",
    ),
    "kimi-k2": Cluster(
        preset="h800-kimi-k2",
        instances=8,
        gpus_per_instance=32,
        weight_bytes=PRESETS["h800-kimi-k2"].weight_bytes + PRESETS["h800-kimi-k2"].expert_bytes,
        kv_bytes_per_token=61 * 576 * 2,
        max_running=32 * MAX_RUNNING,
        max_batched_tokens=65536,
        vanilla_sd="mtp",
    ),
    "qwen3-32b": _measured("h100-qwen3-32b-tp4"),
    "gpt-oss-120b": _measured("h200-gpt-oss-120b-tp4"),
    "deepseek-v3": _measured("h200-deepseek-v3-tp8"),
}

# Requests, group sizes, longest and mean responses: the paper.  Sigma and group share are fitted (see
# docs/results/reproduction.md).
LENGTHS = {
    "moonlight": DrawnLengths(400, 8, 22386, 65536, sigma=0.6, group_share=0.8),
    "qwen2-vl-72b": DrawnLengths(600, 16, 7615, 40960, sigma=1.0, group_share=0.8),
    "kimi-k2": DrawnLengths(800, 8, 38959, 98304, sigma=0.5, group_share=0.8),
}

WORKLOADS: Mapping[str, Workload] = {
    name: Workload(name, lengths, on(CLUSTERS[name], lengths.cap_tokens + LONGEST_PROMPT_TOKENS))
    for name, lengths in LENGTHS.items()
}
"""The paper's, by name."""

SYNTHETIC = DrawnLengths(64, 8, 4096, 16384, sigma=0.9, group_share=0.5, prompt_tokens=512)
"""Lengths of the workload ``synthetic``, where nothing else is said."""
