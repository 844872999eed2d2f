"""Lengths from the logs of other systems: one module for each format, and their table in ``formats``."""
