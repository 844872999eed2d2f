"""Triton's kernels on a CPU, in its interpreter; imported by every process that has this folder on its path.

vLLM on a CPU wants a Triton with a back end "cpu", which no wheel has.  The interpreter uses none, so a
name without a compiler will do.
"""

import os

os.environ["TRITON_INTERPRET"] = "1"
os.environ["TORCHDYNAMO_DISABLE"] = "1"  # or torch would compile for that back end, with several ranks

import triton.backends


class AlwaysActive:
    """A driver, as vLLM asks for it."""

    @staticmethod
    def is_active():
        return True


triton.backends.backends["cpu"] = triton.backends.Backend(compiler=None, driver=AlwaysActive)
