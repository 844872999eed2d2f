"""Triton's kernels on a CPU, in its interpreter; imported by every process that has this folder on its path.

vLLM on a CPU wants a Triton with a back end "cpu", which no wheel has.  The interpreter uses none, so a
name without a compiler will do.
"""

import os

os.environ["TRITON_INTERPRET"] = "1"
os.environ["TORCHDYNAMO_DISABLE"] = "1"  # or torch would compile for that back end, with several ranks

import triton.backends
from triton.runtime import interpreter


class AlwaysActive:
    """A driver, as vLLM asks for it."""

    @staticmethod
    def is_active():
        return True


triton.backends.backends["cpu"] = triton.backends.Backend(compiler=None, driver=AlwaysActive)


class Number(int):
    """A number of a kernel's loop, which compiled kernels may cast; vLLM's for top-k and top-p does."""

    def to(self, dtype):
        return self


patch_language = interpreter._patch_lang_core


def patch_with_numbers(lang, scope):
    """Let loops count by ``Number``."""
    patch_language(lang, scope)
    plain = lang.range
    scope.set_attr(lang, "range", lambda *arguments, **named: map(Number, plain(*arguments, **named)))


interpreter._patch_lang_core = patch_with_numbers
