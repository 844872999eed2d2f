"""Settings of all tests: Hypothesis never judges by time, on machines that others use too."""

from hypothesis import settings

settings.register_profile("seer", deadline=None)
settings.load_profile("seer")
