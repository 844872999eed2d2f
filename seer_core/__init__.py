"""Seer: a pluggable, exact scheduler for the rollout phase of synchronous RL on language models."""
