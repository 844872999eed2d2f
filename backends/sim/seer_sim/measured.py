"""Cost models of published models on H100 and H200, fitted to published measurements.

The measurements are of AIConfigurator's ``silicon_sample.csv`` (github.com/ai-dynamo/aiconfigurator,
Apache-2.0): times per output token of vLLM and SGLang under a constant number of requests.  ``python -m bench
predictions costs`` fits them again, and predicts rows that were left out (docs/results/predictions.md).
"""

from __future__ import annotations

from functools import cached_property

import msgspec

from seer_sim.cost import CostModel
from seer_sim.machines import GPUS, Reached, cost_on
from seer_sim.published import CONFIGS
from seer_sim.sizes import ModelSizes, sizes_of

__all__ = ["MEASURED", "MeasuredModel"]


class MeasuredModel(msgspec.Struct, frozen=True, dict=True):
    """A model on so many GPUs of a kind, and what ``engine`` reached there."""

    model: str
    gpu: str
    gpus: int
    engine: str
    reached: Reached

    @cached_property
    def sizes(self) -> ModelSizes:
        """The model's sizes."""
        return sizes_of(CONFIGS[self.model])

    @cached_property
    def cost(self) -> CostModel:
        """The seconds and bytes of a step of this model here."""
        return cost_on(self.sizes, GPUS[self.gpu], self.gpus, self.reached)


# Fitted to all rows of a model and GPU, on any number of GPUs.
MEASURED = {
    "h100-qwen3-32b-tp4": MeasuredModel(
        "Qwen/Qwen3-32B",
        "h100",
        4,
        "vLLM 0.12.0",
        Reached(
            host_s=0.00188,
            layer_s=2.67e-05,
            reduce_s=8.93e-06,
            request_s=5.41e-05,
            mixture_s=1.2e-05,
            routing_s=2e-07,
            weights=0.975,
            experts=0.8,
            kv=0.899,
            compute=0.47,
            expert_compute=0.4,
            attention=0.716,
            link=0.563,
        ),
    ),
    "h200-llama-3.1-8b": MeasuredModel(
        "meta-llama/Llama-3.1-8B-Instruct",
        "h200",
        1,
        "SGLang 0.5.6",
        Reached(
            host_s=0.00649,
            layer_s=3.36e-05,
            reduce_s=4.69e-06,
            request_s=1.39e-05,
            mixture_s=1.2e-05,
            routing_s=2e-07,
            weights=0.912,
            experts=0.8,
            kv=1.03,
            compute=0.529,
            expert_compute=0.4,
            attention=0.49,
            link=0.658,
        ),
    ),
    "h100-gpt-oss-120b-tp4": MeasuredModel(
        "openai/gpt-oss-120b",
        "h100",
        4,
        "vLLM 0.18.0",
        Reached(
            host_s=0.00131,
            layer_s=2.16e-05,
            reduce_s=7.69e-06,
            request_s=1.94e-05,
            mixture_s=1.07e-05,
            routing_s=2.79e-07,
            weights=0.654,
            experts=1.19,
            kv=1.81,
            compute=0.636,
            expert_compute=0.703,
            attention=0.561,
            link=0.419,
        ),
    ),
    "h200-gpt-oss-120b-tp4": MeasuredModel(
        "openai/gpt-oss-120b",
        "h200",
        4,
        "vLLM 0.18.0",
        Reached(
            host_s=0.00153,
            layer_s=2.39e-05,
            reduce_s=2.93e-06,
            request_s=1.33e-05,
            mixture_s=1.13e-05,
            routing_s=1.28e-07,
            weights=0.629,
            experts=0.672,
            kv=1.76,
            compute=0.583,
            expert_compute=0.246,
            attention=0.552,
            link=0.607,
        ),
    ),
    "h200-minimax-m2.5-tp8": MeasuredModel(
        "MiniMaxAI/MiniMax-M2.5",
        "h200",
        8,
        "vLLM 0.18.0",
        Reached(
            host_s=0.00258,
            layer_s=3.49e-05,
            reduce_s=1.05e-05,
            request_s=4.71e-05,
            mixture_s=1.32e-05,
            routing_s=1.65e-07,
            weights=0.802,
            experts=0.965,
            kv=2.97,
            compute=0.6,
            expert_compute=0.488,
            attention=0.572,
            link=0.507,
        ),
    ),
    "h200-qwen3-235b-tp4": MeasuredModel(
        "Qwen/Qwen3-235B-A22B-FP8",
        "h200",
        4,
        "vLLM 0.12.0",
        Reached(
            host_s=0.00206,
            layer_s=3.02e-05,
            reduce_s=9.66e-06,
            request_s=0.000114,
            mixture_s=1.26e-05,
            routing_s=1.03e-07,
            weights=0.783,
            experts=0.614,
            kv=0.645,
            compute=0.626,
            expert_compute=0.292,
            attention=0.619,
            link=0.502,
            reads_all=True,
        ),
    ),
    "h200-deepseek-v3-tp8": MeasuredModel(
        "deepseek-ai/DeepSeek-V3",
        "h200",
        8,
        "SGLang 0.5.9",
        Reached(
            host_s=0.00281,
            layer_s=3.7e-05,
            reduce_s=1.08e-05,
            request_s=0.000101,
            mixture_s=1.35e-05,
            routing_s=2.79e-07,
            weights=0.792,
            experts=1.16,
            kv=2.54,
            compute=0.601,
            expert_compute=0.497,
            attention=0.588,
            link=0.483,
        ),
    ),
    "h200-kimi-k2.5-tp8": MeasuredModel(
        "moonshotai/Kimi-K2.5",
        "h200",
        8,
        "vLLM 0.16.0",
        Reached(
            host_s=0.00302,
            layer_s=3.88e-05,
            reduce_s=1.11e-05,
            request_s=4.64e-05,
            mixture_s=1.36e-05,
            routing_s=3.16e-07,
            weights=0.781,
            experts=0.756,
            kv=1.35,
            compute=0.601,
            expert_compute=0.45,
            attention=0.513,
            link=0.48,
        ),
    ),
}
"""Presets by name."""
