"""Instances that schedule asynchronously on a CPU, where vLLM switches that off; imported by workers."""

from seer_vllm.instance import VllmAdapter
from vllm.platforms.cpu import CpuPlatform

check = CpuPlatform.check_and_update_config


def unswitched(vllm_config):
    wanted = vllm_config.scheduler_config.async_scheduling
    check(vllm_config)
    vllm_config.scheduler_config.async_scheduling = wanted


class Ahead(VllmAdapter):
    """Plans its steps ahead wherever vLLM would."""

    def __init__(self, start):
        CpuPlatform.check_and_update_config = staticmethod(unswitched)
        super().__init__(start)
