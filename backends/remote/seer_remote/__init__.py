"""Seer's scheduler over servers that run already, and belong to another program."""
