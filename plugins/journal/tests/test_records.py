"""Records survive the way to disk and back, and damage costs no record that is whole."""

import random
import zlib
from itertools import accumulate

import msgspec
from seer_host.images import PlacedImages, PromptImage
from seer_journal.records import (
    FORMAT,
    HEAD,
    MARK,
    Aborted,
    Begun,
    Damaged,
    Opened,
    WrittenChunk,
    difference,
    encode,
    scan,
)

from seer_core.model import ChunkRecord, PromptGroup, Sampling
from seer_core.model.arrays import Logprobs, Tokens

ACCOUNT = msgspec.structs.astuple(ChunkRecord("x", 3, 0.5, 1.25, 0, 7, 0, 0, 2, 3, [2, 1], [1, 0], 5))
RECORDS = [
    Opened(FORMAT, "cafe", {"--iteration": "0"}),
    Begun.of(PromptGroup("g", (5, 6), 2, 64, Sampling(0.5), 2**63 - 1), 2, {"sum": "12ab"}),
    WrittenChunk("g/0", 0, Tokens([2**31 - 1, 0, 1]), Logprobs([-0.5, -1e-30, -0.1]), False, ACCOUNT),
    WrittenChunk("g/1", 3, Tokens(), Logprobs(), True, ACCOUNT),
    Aborted("g/0"),
]
DATA = b"".join(map(encode, RECORDS))


def test_records_come_back_as_they_were():
    assert list(scan(DATA)) == RECORDS
    assert ChunkRecord(*RECORDS[2].account) == ChunkRecord(
        "x", 3, 0.5, 1.25, 0, 7, 0, 0, 2, 3, [2, 1], [1, 0], 5
    )


def test_a_torn_end_costs_the_record_that_was_cut():
    ends = list(accumulate(len(encode(record)) for record in RECORDS))
    for end in range(len(DATA)):
        whole = sum(each <= end for each in ends)
        begin = ends[whole - 1] if whole else 0
        torn = [Damaged(begin, end - begin)] if end > begin else []
        assert list(scan(DATA[:end])) == RECORDS[:whole] + torn


def test_a_flipped_bit_costs_one_record_at_most_and_the_others_are_found():
    for bit in range(8 * len(DATA)):
        data = bytearray(DATA)
        data[bit // 8] ^= 1 << bit % 8
        found = list(scan(bytes(data)))
        records = [each for each in found if not isinstance(each, Damaged)]
        assert records == [record for record in RECORDS if record in records]
        assert len(records) == len(RECORDS) - 1
        assert sum(each.size for each in found if isinstance(each, Damaged)) > 0


def test_bytes_that_are_no_record_are_counted_and_nothing_else_comes_of_them():
    draw = random.Random(7)
    for size in (1, 3, 12, 13, 5000):
        noise = draw.randbytes(size)
        assert list(scan(noise)) == [Damaged(0, size)]
        assert list(scan(noise + DATA)) == [Damaged(0, size), *RECORDS]
    assert list(scan(b"")) == []


def test_a_frame_of_something_else_is_damage():
    body = msgspec.msgpack.encode(["z", 1])
    frame = HEAD.pack(MARK, len(body), zlib.crc32(body)) + body
    assert list(scan(frame + DATA)) == [Damaged(0, len(frame)), *RECORDS]


def test_a_token_costs_less_than_ten_bytes_in_chunks_of_64():
    account = msgspec.structs.astuple(ChunkRecord("vllm-0", 64, 12.345, 13.456, 1000, 24, 0, 0, 3, 60))
    chunk = WrittenChunk("0123456789ab/7", 4096, Tokens(range(64)), Logprobs([-0.25] * 64), False, account)
    assert len(encode(chunk)) < 64 * 10


def test_a_group_with_another_image_or_another_size_of_it_is_another_group():
    def begun(digest, length=4):
        images = PlacedImages([PromptImage(digest, 2, 2)], [(1, length)])
        group = PromptGroup("g", (5, 6), 2, 64, attachments=images)
        return Begun.of(group, 2, {"sum": "12ab"})

    assert difference(begun("a"), begun("a")) is None
    for other in (begun("b"), begun("a", 9)):
        found = difference(begun("a"), other)
        assert found is not None
        assert found[0] == "digest of images or attachments"
