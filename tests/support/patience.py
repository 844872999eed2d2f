"""How long a test waits for what will happen if all is well."""

PATIENCE_S = 120.0
"""Seconds after which a wait has failed: far above any machine's, so that no pass depends on one's speed."""
