"""The evaluation of arXiv 2511.14617 again, on simulated engines: ``seer reproduce``."""
