"""vLLM's second model runner on a CPU, its Triton kernels in Triton's interpreter; imported by workers."""

import triton_interpreter  # noqa: F401  (before vLLM is imported)
from waiting import Waiting


class Interpreted(Waiting):
    """An instance whose second model runner runs, and whose requests wait for every block that they load."""
