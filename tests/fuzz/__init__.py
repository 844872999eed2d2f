"""Fuzzing of every reader: a moment each by default, longer with --fuzz-seconds."""
