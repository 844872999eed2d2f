"""Triton's kernels on a CPU, in its interpreter; imported by workers before vLLM.

vLLM on a CPU wants a Triton with a back end "cpu", which no wheel has.  The interpreter uses none, so a
name without a compiler will do.
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
