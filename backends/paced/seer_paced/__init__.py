"""vLLM or SGLang on an emulated accelerator: a real scheduler, a model that computes nothing, scripted text.

No claim about numerics: tokens and log-probs are not a model's.
"""
