"""Contracts that a plug-in or a backend implements: policies, engines, KV pools, drafters and clocks."""
