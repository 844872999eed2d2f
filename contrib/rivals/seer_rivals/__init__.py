"""Rivals of Seer's scheduling as plug-ins, to compare with on the same lengths."""
