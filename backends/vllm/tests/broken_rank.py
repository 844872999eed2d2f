"""An instance whose second rank cannot read its KV; imported by workers."""

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
