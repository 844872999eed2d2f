"""The command: SkyRL's, with Seer's engines beneath its generator."""

from __future__ import annotations

import sys

import ray
from skyrl.train.utils import validate_cfg
from skyrl.train.utils.utils import initialize_ray

from seer_core.errors import SeerError
from seer_skyrl.training import SeerConfig, SeerExp, check


def train(cfg: SeerConfig) -> None:
    """Train, in a process of Ray, as SkyRL's own entry points do."""
    SeerExp(cfg).run()


def main() -> None:
    """Check the options, start Ray, train."""
    cfg = SeerConfig.from_cli_overrides(sys.argv[1:])
    try:
        check(cfg)
    except SeerError as error:
        sys.exit(f"error: {error}")
    validate_cfg(cfg)
    initialize_ray(cfg)
    ray.get(ray.remote(num_cpus=1)(train).remote(cfg))


if __name__ == "__main__":
    main()
