from seer_testing import ObserverContract

from seer_chunk_counts import ChunkCounts

pytest_plugins = ["seer_testing.simulate"]


class TestChunkCounts(ObserverContract):
    def make(self):
        return ChunkCounts()


def test_it_counts_every_chunk_and_every_response(simulation):
    result, counts = simulation.run(["chunk_counts"]), ChunkCounts()
    for record in result.trace:
        counts.observe(record.now, record.event, record.commands)
    assert counts.chunks.total() == result.summary.chunks
    assert counts.finish_reasons == result.summary.finish_reasons
