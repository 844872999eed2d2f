"""Simulated inference engines for Seer: vLLM's scheduling on a virtual clock."""
