"""Keyed sampling, the same on every engine, and the test of it at start."""
