"""An instance whose second rank cannot read its KV, and that rank; imported by workers."""

import sys

from seer_sglang import rank, ranks
from seer_sglang.instance import SglangAdapter


def fail(layers, slots):
    raise OSError("rank 1 has lost its memory")


class BrokenRank(SglangAdapter):
    """An instance with that rank."""

    def __init__(self, start):
        ranks.MODULE = __name__
        super().__init__(start)


def main(number, fd):
    """Run that rank, until rank 0 is gone."""
    from seer_sglang import internals

    internals.check_kernels()

    from seer_sglang.blocks import SglangLayers

    SglangLayers.read = fail
    rank.main(number, fd)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
