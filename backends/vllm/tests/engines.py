"""Instances with something wrong about their sampling, imported by workers."""

import torch
from seer_vllm import sampling
from seer_vllm.instance import VllmAdapter


def unhook(worker):
    del worker.model_runner._sample


class Unhooked(VllmAdapter):
    """Samples as vLLM does."""

    def __init__(self, start):
        super().__init__(start)
        self.engine.collective_rpc(unhook)


class Unseeded(VllmAdapter):
    """Draws all its noise from one seed."""

    def __init__(self, start):
        choices = sampling.chosen_by_key

        def by_one_seed(logits, temperature, top_k, top_p, seeds, positions, min_p):
            return choices(logits, temperature, top_k, top_p, torch.zeros_like(seeds), positions, min_p)

        sampling.chosen_by_key = by_one_seed
        super().__init__(start)
