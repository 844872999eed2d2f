"""A simulated workload's config, turned into one for an emulated accelerator, on a virtual clock.

Instances, costs and the KV pool's rates are the simulator's; only what schedules within an instance is real.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
from seer_sim.plugin import Settings as SimSettings
from seer_sim.pool import Settings as PoolSettings

from seer_core.config import Config, structure
from seer_core.errors import ConfigError
from seer_core.ports import EngineFleet
from seer_lab.lengths import TrueLengths
from seer_lab.texts import Text

__all__ = ["ENGINE", "SCHEDULERS", "paced", "paced_fleet"]

ENGINE = "paced"

SCHEDULERS = {"paced": "vllm", "paced-sglang": "sglang"}
"""Whose scheduler an engine of the laboratory has, by its name."""

MISSING = {
    "vllm": "--engine paced needs vLLM and its backend ({}); install it: pip install 'seer-vllm[cpu,paced]'",
    "sglang": "--engine paced-sglang needs the package seer-vllm, without vLLM ({}); install it, and SGLang:"
    " make setup-sglang",
}

ALIKE = (
    "instances",
    "kv_capacity_tokens",
    "block_tokens",
    "max_running",
    "max_model_tokens",
    "max_batched_tokens",
    "vocab_size",
    "preset",
    "cost",
    "chunk_s",
    "chunk_s_per_token",
    "report_interval_s",
    "kill_at_s",
    "labels",
)
"""Settings that mean the same in ``[engine.sim]`` and in ``[engine.paced]``."""

POOL_BYTES = 1 << 30
"""A pool of fingerprints needs no more of this machine's memory, whatever the emulated one has."""


def paced(config: Config, scheduler: str) -> Config:
    """Return the same run on paced instances; a simulated KV pool becomes the local one, of equal rates."""
    sim = structure(config.engine.get("sim", {}), SimSettings, "engine.sim")
    table = {name: getattr(sim, name) for name in ALIKE}
    table["scheduler"] = scheduler
    table |= {"draft_step_s": sim.acceptance.step_s, "draft_request_s": sim.acceptance.request_s}
    pool = "none"
    if config.seer.kv_pool == "sim_pool":
        pool = "local"
        rates = structure(config.kv_pool.get("sim_pool", {}), PoolSettings, "kv_pool.sim_pool")
        table |= {"move_bytes_per_s": rates.bandwidth_bytes_per_s, "move_s": rates.latency_s}
    return msgspec.structs.replace(
        config,
        seer=msgspec.structs.replace(config.seer, engine=ENGINE, kv_pool=pool),
        engine={ENGINE: msgspec.to_builtins(table)},
        kv_pool={} if pool == "none" else {pool: {"capacity_bytes": POOL_BYTES}},
    )


def paced_fleet(config: Config, lengths: Mapping[str, int], text: Text | None) -> EngineFleet:
    """Return paced instances that know how long each response is, and repeat its text or make it up.

    Raises:
        ConfigError: the scheduler or its backend is not installed.
    """
    scheduler = config.engine[ENGINE].get("scheduler", "vllm")
    try:
        from seer_paced.plugin import Settings, make_fleet
        from seer_paced.script import Recorded, Script
    except ImportError as error:
        raise ConfigError(MISSING[scheduler].format(error)) from error
    settings = structure(config.engine[ENGINE], Settings, "engine.paced")
    said = None
    if text is not None:
        said = {
            name: Recorded(name, tokens, "length" if name in text.cut else "stop")
            for name, tokens in text.responses.items()
        }
    script = Script(settings.vocab_size, TrueLengths(by_request=dict(lengths)), said)
    return make_fleet(settings, None, script)
