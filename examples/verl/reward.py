"""A reward as verl calls it: ``reward.custom_reward_function.path`` names this file."""

from typing import Any


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any] | None = None
) -> float:
    """Return 1 for a response of the tiny reasoner that ends in the right answer, else 0."""
    return float("".join(solution_str.split()).endswith(f"answer{ground_truth}"))
