"""SGLang engines for Seer."""

__all__ = ["SUPPORTED_SGLANG"]

SUPPORTED_SGLANG = "0.5.23"
"""The version on whose internals ``seer_sglang.internals`` relies."""
