from seer_testing import SplitterContract

from seer_growing_chunks import GrowingChunks

pytest_plugins = ["seer_testing.simulate"]


class TestGrowingChunks(SplitterContract):
    def make(self):
        return GrowingChunks(first_tokens=8, factor=2)


def test_chunks_grow(simulation):
    settings = {"growing_chunks": {"first_tokens": 8}}
    result = simulation.run(["growing_chunks"], settings=settings)
    for completion in result.completions:
        chunks = [chunk.tokens for chunk in completion.chunks]
        assert chunks[:-1] == [8 * 2**number for number in range(len(chunks) - 1)]
