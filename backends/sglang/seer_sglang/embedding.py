"""The embedding of several ranks on a CPU.

SGLang has torch compile the function that finds out which tokens are another rank's.  Its few operations on
integers give the same without, and each start of an instance would wait for a compiler.
"""

from __future__ import annotations

import inspect

from sglang.srt.layers import vocab_parallel_embedding

__all__ = ["install"]


def install() -> None:
    """Have tokens of other ranks found without a compiler, in this process."""
    compiled = vocab_parallel_embedding.get_masked_input_and_mask
    vocab_parallel_embedding.get_masked_input_and_mask = inspect.unwrap(compiled)
