"""An instance whose requests wait for every block that they load, imported by workers."""

from seer_vllm import connector
from seer_vllm.instance import VllmAdapter


class Waiting(VllmAdapter):
    """Lets no step begin with a load."""

    def __init__(self, start):
        connector.AWAITED_BYTES = 0
        super().__init__(start)
