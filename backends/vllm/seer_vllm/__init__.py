"""vLLM engines for Seer: one process per instance, chunks in and out, keyed sampling inside."""

__all__ = ["SUPPORTED_VLLM"]

SUPPORTED_VLLM = "0.32."
"""Keyed sampling reaches into vLLM's model runner, so only these versions will do."""
