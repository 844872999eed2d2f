"""Benchmarks: each case answers one question, and its result is stored with commit, machine and command."""
