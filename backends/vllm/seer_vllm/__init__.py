"""vLLM engines for Seer: one process per instance, chunks in and out, keyed sampling inside."""

__all__ = ["GROUPED_DRAFTS", "KEYED_SERVER", "SUPPORTED_VLLM", "VERSIONS"]

SUPPORTED_VLLM = ("0.32.", "0.33.")
"""Keyed sampling reaches into vLLM's model runner, so only versions that begin so will do."""
VERSIONS = " or ".join(f"{each}*" for each in SUPPORTED_VLLM)

KEYED_SERVER = "SEER_KEYED_SAMPLING"
"""The environment variable that has a stock server sample by key, if it is 1."""

GROUPED_DRAFTS = "SEER_GROUPED_DRAFTS"
"""The environment variable that has vLLM's second model runner draft for Seer, if it is 1."""
