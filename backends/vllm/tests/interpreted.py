"""vLLM's second model runner on a CPU, its Triton kernels in Triton's interpreter; imported by workers."""

import triton_interpreter  # noqa: F401  (before vLLM is imported)
from seer_vllm.instance import VllmAdapter
from vllm.platforms.cpu import CpuPlatform

check = CpuPlatform.check_and_update_config


class Interpreted(VllmAdapter):
    """An instance whose second model runner runs."""


def unswitched(vllm_config):
    """Check a config as vLLM does on a CPU, where it also switches async scheduling off: leave that on."""
    wanted = vllm_config.scheduler_config.async_scheduling
    check(vllm_config)
    vllm_config.scheduler_config.async_scheduling = wanted


class Ahead(VllmAdapter):
    """An instance whose second model runner runs, and that may plan its steps ahead."""

    def __init__(self, start):
        CpuPlatform.check_and_update_config = staticmethod(unswitched)
        super().__init__(start)
