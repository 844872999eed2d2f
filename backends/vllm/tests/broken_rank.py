"""Instances whose second rank cannot read its KV, or changes an adapter; imported by workers."""

from seer_vllm import instance
from seer_vllm.extension import WorkerExtension
from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group


class BrokenReads(WorkerExtension):
    """Cannot read KV on rank 1."""

    def seer_install(self, end_token_ids):
        if self.rank == 1 and has_kv_transfer_group():
            get_kv_transfer_group().read_part = fail
        return super().seer_install(end_token_ids)


def fail(block_ids, into):
    raise OSError("rank 1 has lost its memory")


class BrokenRank(instance.VllmAdapter):
    """An instance with that rank."""

    def __init__(self, start):
        instance.EXTENSION = "broken_rank.BrokenReads"
        super().__init__(start)


class ChangedAdapters(WorkerExtension):
    """Changes a value of each adapter on rank 1."""

    def seer_install(self, end_token_ids):
        if self.rank == 1:
            manager = self.model_runner.lora_manager._adapter_manager
            activate = manager.activate_adapter
            [layer, *_] = (each for name, each in manager.modules.items() if name.endswith("qkv_proj"))

            def change(number):
                activate(number)
                layer.lora_b_stacked[0][0, 0, 0, 0] += 1

            manager.activate_adapter = change
        return super().seer_install(end_token_ids)


class ChangingRank(instance.VllmAdapter):
    """An instance with that rank."""

    def __init__(self, start):
        instance.EXTENSION = "broken_rank.ChangedAdapters"
        super().__init__(start)
