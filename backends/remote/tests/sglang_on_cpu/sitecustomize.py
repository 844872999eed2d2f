"""On the path of a stock SGLang server, lets its deterministic inference run on a CPU.

SGLang keeps it to attention backends of accelerators, makes kernels there independent of the batch, and takes
its hash from ``sgl_kernel``, for which there is a stand-in here without it.  It keeps routed experts in
memory that is pinned for a device.
"""

import sys

if any("sglang" in each or "multiprocessing" in each for each in sys.orig_argv):
    import sgl_kernel  # noqa: F401, before torchvision, which needs an operator of the stand-in's
    import torch
    from sglang.srt import batch_invariant_ops, server_args
    from sglang.srt.mem_cache.pool_host.common import ALLOC_MEMORY_FUNCS

    ALLOC_MEMORY_FUNCS["cpu"] = lambda dims, dtype, device, **_: torch.empty(dims, dtype=dtype)
    server_args.DETERMINISTIC_ATTENTION_BACKEND_CHOICES.append("torch_native")
    batch_invariant_ops.enable_batch_invariant_mode = lambda: None
    WORD = 0xFFFFFFFF

    def rotated(h, by):
        return ((h << by) | (h >> (32 - by))) & WORD

    def times(h, factor):
        """Multiply 32-bit numbers in halves: the product of two would not fit into 63 bits."""
        return ((h * (factor & 0xFFFF)) + (((h * (factor >> 16)) & 0xFFFF) << 16)) & WORD

    def mixed(h, k):
        h = rotated(h ^ times(rotated(times(k, 0xCC9E2D51), 15), 0x1B873593), 13)
        return (h * 5 + 0xE6546B64) & WORD

    def murmur_hash32(seed, positions, columns):
        """Return MurmurHash3 of seed, position and column, uint32 [rows, columns]."""
        seed, positions = seed.view(torch.int64)[:, None], positions.to(torch.int64)[:, None]
        h = mixed(torch.zeros_like(seed), seed & WORD)
        h = mixed(h, (seed >> 32) & WORD)
        h = mixed(h, positions & WORD)
        h = mixed(h, columns.to(torch.int64)[None, :] & WORD) ^ 16
        h = times(h ^ (h >> 16), 0x85EBCA6B)
        h = times(h ^ (h >> 13), 0xC2B2AE35)
        return (h ^ (h >> 16)).to(torch.uint32)

    library = torch.library.Library("sgl_kernel", "FRAGMENT")
    library.define("murmur_hash32_cpu(Tensor seed, Tensor positions, Tensor columns) -> Tensor")
    library.impl("murmur_hash32_cpu", murmur_hash32, "CompositeExplicitAutograd")
    # No model here calls them, but SGLang looks for them where it reads images of Qwen-VL.
    normed = ("fused_qk_gemma_rmsnorm", "fused_qk_gemma_rmsnorm_with_gate")
    for name in (*normed, "fused_sigmoid_mul", "fused_qkvzba_split_reshape_cat_contiguous"):
        library.define(f"{name}_cpu(Tensor input) -> Tensor")
