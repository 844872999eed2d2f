"""Proof of the code for GPUs, in parts: ``scripts/gpu-check``."""
