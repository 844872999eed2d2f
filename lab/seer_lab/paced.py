"""A simulated workload's config, turned into one for an emulated accelerator, on a virtual clock.

Instances, costs and the KV pool's rates are the simulator's; only what schedules within an instance is real.
"""

from __future__ import annotations

import msgspec
from seer_host.config_files import Config
from seer_host.installation import how_to_install
from seer_host.tables import structure
from seer_sim.plugin import Settings as SimSettings
from seer_sim.pool import MoveRates
from seer_sim.pool import Settings as PoolSettings
from seer_sim.settings import EmulatedSettings

from seer_core.errors import ConfigError
from seer_core.ports.engine import EngineFleet
from seer_lab.lengths import TrueLengths
from seer_lab.texts import RecordedText

__all__ = ["ENGINE", "SCHEDULERS", "paced", "paced_fleet"]

ENGINE = "paced"

SCHEDULERS = {"paced": "vllm", "paced-sglang": "sglang"}
"""Whose scheduler an engine of the laboratory has, by its name."""

MISSING = {
    "vllm": "--engine paced needs vLLM and the package seer-paced ({}); "
    + how_to_install("paced,vllm", "`make setup`"),
    "sglang": "--engine paced-sglang needs the package seer-paced ({}) and SGLang; "
    + how_to_install("paced,sglang", "`make setup-sglang`"),
}

POOL_BYTES = 1 << 30
"""A pool of fingerprints needs no more of this machine's memory, however much the emulated one has."""


def paced(config: Config, scheduler: str) -> Config:
    """Return the same run on emulated instances; a simulated KV pool becomes the local one, at its rates.

    Settings of ``[engine.paced]`` that simulated engines lack are kept, but for the clock and the script,
    which are the laboratory's own.
    """
    sim = structure(config.engine.get("sim", {}), SimSettings, "engine.sim")
    own = {"scheduler": scheduler, "clock": "virtual", "script": ""}
    table = {**config.engine.get(ENGINE, {}), **_only(EmulatedSettings, sim), **own}
    pool = "none"
    if config.seer.kv_pool == "sim_pool":
        pool = "local"
        rates = structure(config.kv_pool.get("sim_pool", {}), PoolSettings, "kv_pool.sim_pool")
        table["moves"] = _only(MoveRates, rates)
    return msgspec.structs.replace(
        config,
        seer=msgspec.structs.replace(config.seer, engine=ENGINE, kv_pool=pool),
        engine={ENGINE: msgspec.to_builtins(table)},
        kv_pool={} if pool == "none" else {pool: {"capacity_bytes": POOL_BYTES}},
    )


def paced_fleet(config: Config, lengths: TrueLengths, text: RecordedText | None) -> EngineFleet:
    """Return emulated instances whose responses and turns are so long, with these texts or made-up ones.

    Raises:
        ConfigError: the scheduler or its backend is not installed.
    """
    scheduler = config.engine[ENGINE].get("scheduler", "vllm")
    try:
        from seer_paced.plugin import Settings as PacedSettings
        from seer_paced.plugin import make_fleet
        from seer_paced.script import Recorded, Script
    except ImportError as error:
        raise ConfigError(MISSING[scheduler].format(error)) from error
    settings = structure(config.engine[ENGINE], PacedSettings, "engine.paced")
    recorded = None
    if text is not None:
        recorded = {
            name: Recorded(name, tokens, "length" if name in text.cut else "stop")
            for name, tokens in text.responses.items()
        }
    script = Script(settings.vocab_size, lengths, recorded)
    return make_fleet(settings, None, script)


def _only(base: type[msgspec.Struct], settings: msgspec.Struct) -> dict[str, object]:
    return {name: getattr(settings, name) for name in base.__struct_fields__}
