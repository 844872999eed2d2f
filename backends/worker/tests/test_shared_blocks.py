"""Blocks of KV in memory that the processes of an instance share."""

import gc
import multiprocessing
import os
from contextlib import suppress

import numpy as np
import pytest
from seer_worker.process.shared_blocks import SharedBlocks


def write_part(blocks, rank):
    blocks[:, 4 * rank : 4 * (rank + 1)] = 10 * rank + np.arange(len(blocks), dtype=np.uint8)[:, None]


def open_blocks():
    """Return how many descriptors of shared blocks this process has; other threads open others."""
    gc.collect()
    links = []
    for each in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            links.append(os.readlink(f"/proc/self/fd/{each}"))
    return sum("seer-kv-blocks" in link for link in links)


def test_each_process_writes_its_part_in_place():
    shared = SharedBlocks(3, 8)
    spawn = multiprocessing.get_context("spawn")
    ranks = [spawn.Process(target=write_part, args=(shared, rank)) for rank in range(2)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    assert shared.blocks.tolist() == [[i] * 4 + [10 + i] * 4 for i in range(3)]


def test_the_blocks_outlive_what_names_them_and_nothing_is_left():
    before = open_blocks()
    shared = SharedBlocks(2, 4096)
    assert open_blocks() > before
    blocks = shared.blocks
    blocks[1] = 7
    del shared
    assert blocks[1, -1] == 7
    del blocks
    assert open_blocks() == before


def test_more_than_there_are_descriptors_for_is_an_error_that_takes_none(monkeypatch):
    def full(*_):
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(os, "ftruncate", full)
    before = open_blocks()
    with pytest.raises(OSError, match="Too many open files"):
        SharedBlocks(1, 1)
    assert open_blocks() == before
