"""Labels of instances, as an engine's config gives them."""

from __future__ import annotations

from seer_core.errors import ConfigError

__all__ = ["InstanceLabels", "labels_of"]

InstanceLabels = dict[str, str] | tuple[dict[str, str], ...]
"""Type of an engine's setting ``labels``: one table for all of its instances, or a list with one for each."""


def labels_of(labels: InstanceLabels, instances: int, where: str) -> list[dict[str, str]]:
    """Return each instance's labels; ``where`` is the table in which they stand.

    Raises:
        ConfigError: there are not as many as instances.
    """
    if isinstance(labels, dict):
        return [labels] * instances
    if len(labels) != instances:
        raise ConfigError(
            f"{where}.labels lists {len(labels)} tables for {instances} instances; give one for each, or one"
            " table for all"
        )
    return list(labels)
