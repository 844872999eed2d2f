"""Decisions without I/O, clock or chance: the scheduler and what it decides with."""
