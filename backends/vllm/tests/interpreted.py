"""vLLM's second model runner on a CPU, with its Triton kernels in Triton's interpreter; imported by workers.

vLLM on a CPU wants a Triton with a back end "cpu", which no wheel has.  The interpreter uses none, so a
name without a compiler will do.  It has to be there before vLLM is imported.
"""

import os

os.environ["TRITON_INTERPRET"] = "1"

import triton.backends


class AlwaysActive:
    """A driver, as vLLM asks for it."""

    @staticmethod
    def is_active():
        return True


triton.backends.backends["cpu"] = triton.backends.Backend(compiler=None, driver=AlwaysActive)

from seer_vllm.instance import VllmAdapter  # noqa: E402


class Interpreted(VllmAdapter):
    """An instance whose second model runner runs."""
