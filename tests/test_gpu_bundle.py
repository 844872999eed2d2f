"""``scripts/gpu-bundle``: which GPU code it keeps of vLLM's libraries."""

import struct

import pytest

from bench.gpu.fatbin import ENTRY, HEAD, MACHINE, PTX, containers, kept_for, of_heads

BEFORE, BEHIND = b"\x7fELF" + bytes(60), b"the end"


def entry(kind, architecture, code):
    return ENTRY.pack(kind, 257, 64, len(code), 0, 0, 8, 1, architecture) + bytes(64 - ENTRY.size) + code


def library(*held):
    found = BEFORE
    for entries in held:
        content = b"".join(entry(*each) for each in entries)
        found += HEAD.pack(0xBA55ED50, 1, HEAD.size, len(content)) + content
    return found + BEHIND


def test_the_code_of_one_kind_of_gpu_is_kept_and_all_else_is_zeros_in_its_place():
    whole = library([(MACHINE, 80, b"a" * 8), (MACHINE, 90, b"b" * 8), (PTX, 90, b"c" * 8)])
    trimmed = kept_for(whole, 90)
    assert trimmed == library([(MACHINE, 80, bytes(8)), (MACHINE, 90, b"b" * 8), (PTX, 90, bytes(8))])


def test_ptx_is_kept_where_there_is_no_machine_code_of_that_gpu():
    held = [(MACHINE, 80, b"a" * 8), (PTX, 80, b"b" * 8), (PTX, 100, b"c" * 8)], [(MACHINE, 90, b"d" * 8)]
    found = [
        [trimmed_code(kept_for(library(*held), 90), each) for each in some]
        for some in containers(library(*held))
    ]
    assert found == [[bytes(8), b"b" * 8, bytes(8)], [b"d" * 8]]


def trimmed_code(trimmed, entry):
    return trimmed[entry.start : entry.start + entry.size]


def test_bytes_that_look_like_a_container_and_are_none_stay_as_they_are():
    whole = BEFORE + struct.pack("<I", 0xBA55ED50) + b"anything else at all" + BEHIND
    assert kept_for(whole, 90) == whole


@pytest.mark.parametrize(
    ("code", "wanted"),
    [
        (b"CollectiveMainloopFwdSm90ILi2EN4cute5tupleISA_EEELi128ENS_10bfloat16_tEf", True),
        (b"CollectiveMainloopFwdSm90ILi2EN4cute5tupleISA_EEELi256ENS_10bfloat16_tEf", False),
        (b"prepare_varlen_num_blocks_kernel", True),
    ],
)
def test_attention_is_kept_for_heads_of_one_size(code, wanted):
    assert of_heads(128)(code) is wanted
