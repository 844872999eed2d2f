"""vLLM on an emulated accelerator: its real scheduler, a worker that computes nothing, scripted text.

No claim about numerics: tokens and log-probs are not a model's.
"""
