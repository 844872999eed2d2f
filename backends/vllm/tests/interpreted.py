"""vLLM's second model runner on a CPU, its Triton kernels in Triton's interpreter; imported by workers."""

import triton_interpreter  # noqa: F401  (before vLLM is imported)
from seer_vllm.instance import VllmAdapter


class Interpreted(VllmAdapter):
    """An instance whose second model runner runs."""
