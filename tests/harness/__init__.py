"""How a run of tests goes: which tests in which order, for how long, and what makes a run fail."""
